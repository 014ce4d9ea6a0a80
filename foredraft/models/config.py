"""Reads a model's configuration from its Hugging Face directory.

Torch-free, so that every service can read it.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.layers.weight_scheme import GGUF_BLOCKS, GGUF_ON_GPUS, GGUF_SCHEMES
from foredraft.models.config_keys import REFUSED_KINDS, check_keys, check_model_type
from foredraft.models.config_reader import MAX_LAYERS, MAX_SIZE, Reader, read_json
from foredraft.models.families import FAMILIES, Family
from foredraft.models.layer_config import layer_types, ropes, window
from foredraft.models.quantization_config import VOCABULARY, Quantization, read_quantization
from foredraft.models.rope_config import RopeConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder-only model that `decoder.DecoderModel` computes.

    Attributes:
        architecture: Name of the architecture in config.json.
        max_position_embeddings: Context length; the stretched one, where rotary embeddings are
            stretched.
        windows: For each layer, the number of newest positions that it sees (its own included),
            None for all.
        ropes: Rotary embedding of each layer.
        qk_norm: Whether queries and keys are normalised per head.
        attention_bias, attention_output_bias, mlp_bias: Whether these projections have a bias.
        norm_offset: Number added to the weights of all norms (Gemma stores them minus one).
        sandwich_norms: Whether there are norms after attention and MLP too (Gemma 3).
        embedding_scale: Factor of token embeddings.
        attention_scale: Factor of attention scores.
        logit_softcap: Limit that tanh caps logits to; None for no cap.
        tie_word_embeddings: Whether the LM head is the embedding.
        num_mtp_layers: Number of multi-token-prediction layers of the checkpoint, beside the
            decoder's.
        dtype: Type of the checkpoint's weights, as torch spells it.
        eos_token_ids: Tokens that end a sequence.
        quantization: Quantisation of the linear layers' weights; None for plain ones.
        fingerprint: Hash of everything that shapes the computation; equal for equal models,
            whatever their weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    attention_scale: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    num_mtp_layers: int = 0
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> "ModelConfig":
        """Reads config.json and, for the end-of-sequence tokens, generation_config.json.

        Uses the tokenizer's where both have none.

        Raises:
            CheckpointError: A file is missing or broken, or the model is of a kind that is not
                supported.
        """
        file = Path(path) / "config.json"
        raw = with_modelopts_file(read_json(file), Path(path))
        generation_file = Path(path) / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        config = cls.from_dict(raw, generation, where=str(file))
        if not config.eos_token_ids:
            config = dataclasses.replace(config, eos_token_ids=_tokenizers_eos(Path(path)))
        return config

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        where: str = "config.json",
        is_whole_model: bool = True,
    ) -> "ModelConfig":
        """Reads the content of config.json; `where` names it in errors.

        Args:
            is_whole_model: False for the layer of a draft head, whose file may describe its target
                in other keys.

        Raises:
            CheckpointError: See `from_dir`.
        """
        try:
            reader = Reader(raw, where)
            architecture = _architecture(reader)
            family = FAMILIES[architecture]
            if is_whole_model:
                check_model_type(reader, architecture, family.model_type)
                check_keys(reader, architecture, family.keys)
            return _parse(reader, architecture, family, generation or {})
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(f"{where}: {error}") from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal."""
        fields = dataclasses.asdict(self)
        for name in ("dtype", "eos_token_ids", "quantization"):
            del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def dynamic_from(self) -> int | None:
        """Length from which rotary embeddings depend on the length of a prompt (NTK by length);
        None without such embeddings.

        The keys of a longer prompt are other ones for each length, so prompts that begin alike
        share none.
        """
        lengths = [rope.original_max_positions for rope in self.ropes if rope.kind == "dynamic"]
        return min(lengths, default=None)

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes that ranks of one model divide equally, by their names in errors."""
        return {
            "attention heads": self.num_heads,
            "key and value heads": self.num_kv_heads,
            "columns of the MLP": self.intermediate_size,
        }

    def why_not_shared(self, num_ranks: int) -> str:
        """Returns why ranks that divide the `shared_sizes` cannot share the quantised weights;
        empty where they can.
        """
        quantization = self.quantization
        if quantization is None or num_ranks == 1:
            return ""
        if quantization.has_vocabulary and not quantization.types:
            return "its quantised embedding and LM head are not shared by ranks"
        for layer in range(self.num_layers):
            for name, split, count, whole in self._shares(num_ranks):
                scheme = quantization.scheme_of(f"model.layers.{layer}.{name}")
                if scheme is not None and (why := scheme.why_cut(split, count, whole)):
                    return f"{name} of layer {layer}: {why}"
        return ""

    def _shares(self, num_ranks: int) -> Iterator[tuple[str, str, int, int]]:
        """Yields the matrices of a layer: the name, what ranks divide, how many of it each has, and
        how many there are.
        """
        heads, columns = self.num_heads * self.head_dim, self.intermediate_size
        # Of few key and value heads several ranks hold the same.
        kv_heads = max(1, self.num_kv_heads // num_ranks)
        yield "self_attn.q_proj", "outputs", heads // num_ranks, heads
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            own, whole = kv_heads * self.head_dim, self.num_kv_heads * self.head_dim
            yield name, "outputs", own, whole
        yield "self_attn.o_proj", "inputs", heads // num_ranks, heads
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            yield name, "outputs", columns // num_ranks, columns
        yield "mlp.down_proj", "inputs", columns // num_ranks, columns

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of one token's keys and values in all layers, in a type of
        `itemsize` bytes.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def weight_bytes(self, itemsize: int, on_cpu: bool) -> int:
        """Returns the bytes of the weights in memory, with `itemsize` bytes for each that is
        not quantised.
        """
        all_bytes = self.num_parameters * itemsize
        # 8-bit floats are expanded on a CPU, which has no products of them.
        if self.quantization is None or (on_cpu and self.quantization.scheme.layout == "fp8"):
            return all_bytes
        if self.quantization.types:
            return all_bytes - self._saved_bytes(self.quantization.types, itemsize, on_cpu)
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        saved = itemsize - self.quantization.scheme.bits / 8
        packed = self.num_layers * (attention + mlp)
        if self.quantization.has_vocabulary and on_cpu:
            packed += self.vocab_size * self.hidden_size * (2 - self.tie_word_embeddings)
        return all_bytes - int(packed * saved)

    def _saved_bytes(self, types: Mapping[str, str], itemsize: int, on_cpu: bool) -> int:
        """Returns how many bytes smaller a GGUF file's matrices are than plain ones."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp, vocabulary = self.intermediate_size, self.vocab_size
        outputs = {"q_proj": heads, "k_proj": kv, "v_proj": kv, "o_proj": heads}
        outputs |= {"gate_proj": mlp, "up_proj": mlp, "down_proj": mlp}
        outputs |= {"embed_tokens": vocabulary, "lm_head": vocabulary}
        saved = 0.0
        for name, kind in types.items():
            if not on_cpu and (kind not in GGUF_ON_GPUS or name in VOCABULARY):
                continue  # expanded
            size, num_bytes = GGUF_BLOCKS[kind]
            # Numbers of 5 and 6 bits lie in 8.
            each = max(num_bytes / size, GGUF_SCHEMES[kind].bits / 8)
            saved += outputs[name.rpartition(".")[2]] * self.hidden_size * (itemsize - each)
        return int(saved)

    @property
    def key_cost(self) -> float:
        """FLOPs of one query's attention to one key in all layers, per FLOP of a token's
        weights.
        """
        return 2 * self.num_layers * self.num_heads * self.head_dim / self.num_parameters

    @property
    def num_parameters(self) -> int:
        """Number of weights of the decoder, a tied head counted once."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * heads + 2 * kv)
        attention += (heads + 2 * kv) * self.attention_bias
        attention += (
            self.hidden_size * self.attention_output_bias + 2 * self.head_dim * self.qk_norm
        )
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        norms = (4 if self.sandwich_norms else 2) * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + tables + self.hidden_size


def with_modelopts_file(raw: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of config.json with `quantization_config`, which ModelOpt's first exports
    have in a file of its own.
    """
    file = directory / "hf_quant_config.json"
    if raw.get("quantization_config") or not file.is_file():
        return dict(raw)
    own = Reader(read_json(file), str(file)).mapping("quantization")
    return {**raw, "quantization_config": {"quant_method": "modelopt", **own}}


def _parse(
    reader: Reader, architecture: str, family: Family, generation: Mapping[str, Any]
) -> ModelConfig:
    raw = reader.raw
    num_layers = reader.size("num_hidden_layers", most=MAX_LAYERS)
    hidden_size = reader.size("hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(reader, family, hidden_size)
    max_positions = reader.size("max_position_embeddings", family.max_positions)
    types = layer_types(reader, family, num_layers)
    width = window(reader, family)
    if width is None and "sliding_attention" in types:
        if family.sliding == "none":
            raise reader.fail(f"layer_types: {architecture} has no sliding_attention")
        raise reader.fail("layer_types names sliding_attention but sliding_window is not set")
    activation = _activation(reader, family)
    scale = reader.positive("query_pre_attn_scalar", 256) if family.gemma else head_dim
    bias = reader.flag("attention_bias", family.attention_bias)
    rotary = ropes(reader, family, types, max_positions)
    if head_dim == 2 and any(rope.kind == "dynamic" for rope in rotary):
        raise reader.fail("rope type dynamic needs a head_dim above 2")
    epsilon = reader.number("rms_norm_eps", 1e-6)
    if epsilon < 0:
        raise reader.fail(f"rms_norm_eps must not be negative, not {epsilon:g}")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max(max_positions, *(rope.max_positions for rope in rotary)),
        rms_norm_eps=epsilon,
        activation=activation,
        windows=tuple(width if kind == "sliding_attention" else None for kind in types),
        ropes=rotary,
        attention_scale=scale**-0.5,
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.gemma),
        attention_bias=True if family.always_bias else bias,
        attention_output_bias=bias and not family.qkv_bias_only,
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        norm_offset=1.0 if family.gemma else 0.0,
        sandwich_norms=family.gemma,
        embedding_scale=math.sqrt(hidden_size) if family.gemma else 1.0,
        logit_softcap=_softcap(reader, family),
        num_mtp_layers=int(reader.number("num_nextn_predict_layers", 0)),
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=_token_ids(Reader(generation, "generation_config.json"))
        or _token_ids(reader),
        quantization=read_quantization(reader),
    )


def _heads(reader: Reader, family: Family, hidden_size: int) -> tuple[int, int, int]:
    """Returns the numbers of heads of queries, and of keys and values, and their size."""
    num_heads = reader.size("num_attention_heads")
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    # Qwen3 and Gemma3 have a head size of their own even where config.json leaves it out.
    head_dim = reader.size("head_dim", family.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise reader.fail(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise reader.fail(f"head_dim {head_dim} is odd; rotary embeddings need pairs")
    return num_heads, num_kv_heads, head_dim


def _activation(reader: Reader, family: Family) -> str:
    given = reader.raw.get("hidden_activation" if family.gemma else "hidden_act")
    name = given or family.activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise reader.fail(f"activation {name!r} is not supported")
    return ACTIVATIONS[name]


def _architecture(reader: Reader) -> str:
    raw = reader.raw
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    for key, kind in REFUSED_KINDS.items():
        if raw.get(key):
            raise reader.fail(f"{kind} models are not supported ({name}, {key})")
    if not isinstance(name, str) or name not in FAMILIES:
        raise reader.fail(
            f"architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if raw.get("use_bidirectional_attention"):
        raise reader.fail("use_bidirectional_attention is not supported")
    return name


def _softcap(reader: Reader, family: Family) -> float | None:
    if not family.gemma or reader.raw.get("final_logit_softcapping") is None:
        return None
    return reader.positive("final_logit_softcapping", 0.0)


def _token_ids(reader: Reader) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens, one or several; -1 stands for none."""
    value = reader.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token <= MAX_SIZE for token in ids):
        raise reader.fail(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(token for token in ids if token >= 0)


def _tokenizers_eos(folder: Path) -> tuple[int, ...]:
    """Returns the end-of-sequence token that the tokenizer's files name."""
    tokenizer = folder / "tokenizer.json"
    named = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    roles = [read_json(file).get("eos_token") for file in named if file.is_file()]
    texts = [role.get("content") if isinstance(role, Mapping) else role for role in roles]
    eos = next((text for text in texts if isinstance(text, str)), None)
    if eos is None or not tokenizer.is_file():
        return ()
    added = read_json(tokenizer).get("added_tokens")
    tokens = added if isinstance(added, list) else []
    found = [token for token in tokens if isinstance(token, Mapping)]
    ids = [token.get("id") for token in found if token.get("content") == eos]
    return _token_ids(Reader({"eos_token_id": ids}, str(tokenizer)))
