"""GGUF files of mixed types against transformers in float64 with the weights that they stand
for.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draft_service.models.shared_weights import load_shared_weights
from foredraft.attention.cpu import CpuAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.gguf_convert import convert
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from testing import gguf_files

TOKENS = list(range(2, 22))
MOST_ERROR = 1e-5  # of logits, relative to their norm


def one_type(kind: str) -> Callable[[str], str]:
    return lambda name: kind


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M mixes them, and each other type somewhere."""
    if name.startswith("blk.1."):
        others = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q5_K", "attn_k": "Q5_1"}
        return others.get(name.split(".")[2], "Q4_K")
    others = {"attn_v": "Q5_0", "attn_k": "F16", "attn_output": "Q4_1", "ffn_up": "BF16"}
    others |= {"ffn_down": "Q4_0", "token_embd": "Q8_0", "output": "Q6_K"}
    return others.get(name.split(".")[-2], "Q4_K")


def converted(file: Path) -> Path:
    target = file.with_suffix("")
    target.mkdir()
    convert(file, target)
    return target


def reference(file: Path) -> torch.nn.Module:
    with pytest.MonkeyPatch.context() as patch:
        # transformers makes the same table of names for each module of the model.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).double()


@torch.inference_mode()
def check(file: Path, directory: Path) -> DecoderModel:
    """Compares logits, and what drafts read of their target."""
    model, theirs = load_model(directory, torch.float32), reference(file)
    kv = PagedKV.for_model(model.config, 4, 8, torch.float32, "cpu")
    runner = ModelRunner(model, kv, CpuAttention())
    got = runner.forward([SequenceRows.chunk([0, 1, 2], 0, TOKENS, "all")]).logits.double()
    want = theirs(torch.tensor([TOKENS])).logits[0]
    assert float((got - want).norm() / want.norm()) < MOST_ERROR
    shared = load_shared_weights(directory, model.config, torch.float32, torch.device("cpu"))
    assert torch.equal(shared.embedding.weight.double(), theirs.model.embed_tokens.weight)
    assert torch.equal(shared.lm_head.weight.double(), theirs.lm_head.weight)
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", [*gguf_files.QUANTIZED, "F16", "BF16", "F32"])
def test_files_of_one_type(kind: str, is_tied: bool, tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", one_type(kind), is_tied=is_tied)
    model = check(file, converted(file))
    is_packed = kind in gguf_files.QUANTIZED
    assert (model.embedding.table is not None) == is_packed
    assert (model.embedding.table is model.lm_head) == (is_packed and is_tied)
    count = 14 + 2 - is_tied
    assert str(model.config.quantization) == (f"gguf {kind} ({count})" if is_packed else "None")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_mixed_types_of_each_architecture(architecture: str, tmp_path: Path) -> None:
    is_tied = architecture == "gemma3"
    file = gguf_files.write(tmp_path / "tiny.gguf", mixed, architecture, is_tied)
    model = check(file, converted(file))
    said = str(model.config.quantization)
    kinds = ["Q4_K", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q8_0"]
    assert all(f"{kind} (" in said for kind in kinds)
    fused = [layer.attention.qkv for layer in model.decoder_layers]
    assert [len(one.pieces) for one in fused] == [3, 3]
    assert [len(model.decoder_layers[0].mlp.gate_up.pieces)] == [2]
    names = [type(layer.mlp.down.method).__name__ for layer in model.decoder_layers]
    assert names == ["TiledMethod", "TiledMethod"]
    # An estimate, made before anything is loaded.
    total = sum(one.numel() * one.element_size() for one in model.parameters())
    assert 0.9 < model.config.weight_bytes(4, on_cpu=True) / total < 1.1


def test_an_embedding_and_lm_head_of_which_one_is_plain(tmp_path: Path) -> None:
    for table in ("token_embd", "output"):

        def types(name: str, table: str = table) -> str:
            return "F16" if name.startswith(table) else "Q5_K"

        file = gguf_files.write(tmp_path / f"{table}.gguf", types)
        model = check(file, converted(file))
        assert (model.embedding.table is None) == (table == "token_embd")
        assert model.lm_head.weight.is_floating_point() == (table == "output")


ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    "linear": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("kind", ROPES)
def test_stretched_rotary_embeddings(kind: str, tmp_path: Path) -> None:
    """llama.cpp writes Llama 3's as divisors of the frequencies, others as metadata."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    head_dim = gguf_files.HEAD_DIMS["llama"]
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=gguf_files.HIDDEN,
        num_attention_heads=gguf_files.HEADS,
        max_position_embeddings=gguf_files.CONTEXT,
        rope_parameters=rope,
    )
    rotary = LlamaRotaryEmbedding(config)
    change: dict[str, np.ndarray | None] | None = None
    scaling = None
    if kind == "llama3":
        plain = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        change = {"rope_freqs.weight": (plain / rotary.inv_freq).float().numpy()}
    else:
        scaling = kind, ROPES[kind]["factor"], int(ROPES[kind]["original_max_position_embeddings"])
    file = gguf_files.write(tmp_path / "tiny.gguf", one_type("F32"), change=change, scaling=scaling)
    model, theirs = load_model(converted(file), torch.float32), reference(file)
    theirs.model.rotary_emb = rotary
    kv = PagedKV.for_model(model.config, 4, 8, torch.float32, "cpu")
    runner = ModelRunner(model, kv, CpuAttention())
    with torch.inference_mode():
        got = runner.forward([SequenceRows.chunk([0, 1, 2], 0, TOKENS, "all")]).logits.double()
        want = theirs(torch.tensor([TOKENS])).logits[0]
    assert float((got - want).norm() / want.norm()) < MOST_ERROR


def test_stretched_rotary_embeddings_that_are_not_computed(tmp_path: Path) -> None:
    factors = np.full(gguf_files.HEAD_DIMS["llama"] // 2, 3.0, np.float32)
    file = gguf_files.write(
        tmp_path / "factors.gguf", one_type("F16"), change={"rope_freqs.weight": factors}
    )
    with pytest.raises(CheckpointError, match="rope_freqs"):
        convert(file, tmp_path)
    file = gguf_files.write(tmp_path / "long.gguf", one_type("F16"), scaling=("longrope", 4.0, 16))
    with pytest.raises(CheckpointError, match="longrope is not supported"):
        convert(file, tmp_path)


def test_the_largest_gemmas_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of scores follows from the number of layers alone; transformers takes another."""
    sizes = {"HIDDEN": 96, "MLP": 64, "HEADS": 4, "KV_HEADS": 2, "LAYERS": 62}
    for name, size in sizes.items():
        monkeypatch.setattr(gguf_files, name, size)
    monkeypatch.setitem(gguf_files.HEAD_DIMS, "gemma3", 16)
    numbers = {"gemma3.final_logit_softcapping": 3.0, "gemma3.rope.freq_base_swa": 500.0}
    file = gguf_files.write(tmp_path / "27b.gguf", one_type("F16"), "gemma3", metadata=numbers)
    ropes = {"full_attention": 10000.0, "sliding_attention": 500.0}
    config = Gemma3TextConfig(
        vocab_size=98,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=62,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=96 // 4,
        final_logit_softcapping=3.0,
        sliding_window=8,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ropes.items()
        },
    )
    theirs = Gemma3ForCausalLM._from_config(config, attn_implementation="eager").double()
    theirs.load_state_dict(reference(file).state_dict())
    model = load_model(converted(file), torch.float32)
    kv = PagedKV.for_model(model.config, 4, 8, torch.float32, "cpu")
    rows = [SequenceRows.chunk([0, 1, 2], 0, TOKENS, "all")]
    got = ModelRunner(model, kv, CpuAttention()).forward(rows).logits.double()
    with torch.inference_mode():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    assert float((got - want).norm() / want.norm()) < MOST_ERROR


def test_every_token_that_ends_a_text(tmp_path: Path) -> None:
    """The end of a turn is another token than that of a text; one that is not there is none."""
    numbers = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 500}
    file = gguf_files.write(tmp_path / "tiny.gguf", one_type("F16"), metadata=numbers)
    assert ModelConfig.from_dir(converted(file)).eos_token_ids == (1, 7)


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(name: str, tmp_path: Path) -> None:
    numbers = {f"llama.{name}": 4.0}
    file = gguf_files.write(tmp_path / "tiny.gguf", one_type("F16"), metadata=numbers)
    config = ModelConfig.from_dir(converted(file))
    [rope] = set(config.ropes)
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_limits_of_yarn(tmp_path: Path) -> None:
    limits = {"beta_fast": 16.0, "beta_slow": 2.0}
    numbers = {f"llama.rope.scaling.yarn_{name}": limit for name, limit in limits.items()}
    scaling = ("yarn", 4.0, 16)
    file = gguf_files.write(
        tmp_path / "tiny.gguf", one_type("F16"), scaling=scaling, metadata=numbers
    )
    [rope] = set(ModelConfig.from_dir(converted(file)).ropes)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)


@pytest.mark.parametrize(
    ("architecture", "name", "number"),
    [
        ("llama", "rope.dimension_count", 32),
        ("qwen3", "attention.value_length", 64),
        ("llama", "rope.scaling.attn_factor", 1.2),
        ("llama", "rope.scaling.alpha", 1000.0),
        ("gemma3", "attention.sliding_window_pattern", 2),
    ],
)
def test_metadata_that_is_not_computed(
    architecture: str, name: str, number: float, tmp_path: Path
) -> None:
    numbers = {f"{architecture}.{name}": number}
    file = gguf_files.write(tmp_path / "tiny.gguf", one_type("F16"), architecture, metadata=numbers)
    with pytest.raises(CheckpointError, match=rf"{architecture}\.{name}"):
        convert(file, tmp_path)


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_of_a_file_is_refused(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a large file lacks tensors, whichever part it is."""
    in_parts = functools.partial(gguf.GGUFWriter, split_max_tensors=12)
    monkeypatch.setattr(gguf, "GGUFWriter", in_parts)
    gguf_files.write(tmp_path / "tiny.gguf", one_type("F16"))
    with pytest.raises(CheckpointError, match=r"is one of 2 parts.*--merge"):
        convert(tmp_path / f"tiny-0000{part}-of-00002.gguf", tmp_path)


def test_tensors_that_are_not_read_are_named(tmp_path: Path) -> None:
    def refuse(name: str, values: np.ndarray, message: str) -> None:
        change: dict[str, np.ndarray | None] = {name: values}
        file = gguf_files.write(tmp_path / "tiny.gguf", one_type("F16"), change=change)
        with pytest.raises(CheckpointError, match=message):
            convert(file, tmp_path)

    name = "blk.0.ffn_gate_inp.weight"
    refuse(name, np.ones(3, np.float32), f"unexpected tensor {name}")
    name = "blk.1.attn_k.weight"
    refuse(name, np.ones((128, 256), np.int8), f"tensor {name} has the unsupported type I8")
    file = gguf_files.write(
        tmp_path / "short.gguf", one_type("Q4_K"), change={"blk.1.attn_k.weight": None}
    )
    directory = converted(file)
    with pytest.raises(CheckpointError, match=r"missing tensor .*1\.self_attn\.k_proj\.weight"):
        load_model(directory)


def test_other_types_become_bfloat16(tmp_path: Path) -> None:
    def types(name: str) -> str:
        return "TQ2_0" if "ffn_up" in name else "Q4_K"

    file = gguf_files.write(tmp_path / "tiny.gguf", types)
    directory = converted(file)
    stored = load_file(directory / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    want = reference(file).model.layers[1].mlp.up_proj.weight
    assert torch.equal(stored, want.bfloat16())
    model = load_model(directory, torch.float32)
    assert str(model.config.quantization) == "gguf Q4_K (14)"
    assert len(model.decoder_layers[1].mlp.gate_up.pieces) == 2


def test_types_that_a_directory_names_and_nobody_reads(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", one_type("Q5_0"))
    directory = converted(file)
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"]["types"]["lm_head"] = "IQ1_S"
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="GGUF types IQ1_S are not supported"):
        ModelConfig.from_dir(directory)


def test_a_plain_file_keeps_the_types_of_its_tensors(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", one_type("F16"))
    directory = converted(file)
    types = {tensor.dtype for tensor in load_file(directory / "model.safetensors").values()}
    assert types == {torch.float16, torch.float32}
    assert AutoTokenizer.from_pretrained(directory).encode("ab") is not None


def test_made_up_weights(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", mixed)
    directory = converted(file)
    (directory / "model.safetensors").unlink()
    model = load_model(directory, torch.float32, load_format="dummy")
    x = torch.randn(3, gguf_files.HIDDEN)
    for layer in model.decoder_layers:
        assert 0.15 < float(layer.mlp.gate_up(x).std()) < 0.6  # 0.02 * sqrt(256)
