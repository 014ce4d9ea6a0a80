"""Makes a draft head from the checkpoints that people have: EAGLE's, EAGLE-3's, MiMo's MTP layer. Strict: every tensor has a
place and every place a tensor.

The embedding and the output matrix that a head shares with its target are read from the target's checkpoint.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from foredraft.errors import CheckpointError
from foredraft.layers.embedding import Embedding
from foredraft.layers.linear import Linear
from foredraft.models.config import ModelConfig
from foredraft.models.draft_heads.config import HeadConfig
from foredraft.models.draft_heads.modules import (
    HEADS,
    DraftHead,
    Eagle3Head,
    EagleHead,
    HeadLayer,
    MtpHead,
    target_lm_head,
)
from foredraft.models.loader import fill_randomly
from foredraft.models.weights import open_checkpoint

Targets = dict[str, torch.Tensor]

_MTP_PREFIX = "mtp_layers.0."
# Tensors that checkpoints carry and a head does not need.
_UNUSED = ("t2d", "rotary_emb.inv_freq")


def load_head(
    path: Path,
    algorithm: str,
    target_path: Path,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    token_map: torch.Tensor | None = None,
) -> DraftHead:
    """Loads a head for a target.

    Args:
        path: The head's directory; the target's own for MTP layers that lie there.
        target_path: The target's directory.
        token_map: FR-Spec: target ids that the head may propose, for heads that use the target's output matrix.

    Raises:
        CheckpointError: Something is missing, unexpected, misshaped, or made for another target.
    """
    target = ModelConfig.from_dir(target_path)
    config = HeadConfig.from_dir(path, algorithm, target)
    # Heads are trained on the table's rows as they are, also where the target scales them (Gemma).
    embedding = Embedding(target.vocab_size, target.hidden_size, 1.0, dtype, device)
    own_head = config.draft_vocab_size > 0
    if own_head:
        lm_head = Linear(target.hidden_size, config.draft_vocab_size, False, dtype, device)
    else:
        lm_head = target_lm_head(target, embedding, dtype, device)
    head = HEADS[algorithm](config, embedding, lm_head, dtype, device)
    if load_format == "dummy":
        fill_randomly(head)
        return head
    tensors = _read(path, only_mtp=algorithm == "MTP")
    targets = _targets(head)
    if own_head:
        targets["lm_head.weight"] = head.lm_head.weight
        head.token_map = _draft_vocabulary(path, tensors, config)
    elif not path.samefile(target_path):
        tensors = {k: v for k, v in tensors.items() if not k.startswith("lm_head.")}
    own_embedding = "embed_tokens.weight" in tensors
    if own_embedding:
        targets["embed_tokens.weight"] = embedding.weight
    _fill(path, tensors, targets)
    _read_shared(target_path, target, None if own_embedding else embedding, lm_head, own_head)
    if token_map is not None:
        _shorten(head, token_map.to(device), dtype, device)
    return head


def _read(path: Path, only_mtp: bool) -> Targets:
    """All tensors by name, without the `model.` in front; .bin files without running anything in them."""
    files = sorted(path.glob("*.safetensors"))
    tensors: Targets = {}
    if files:
        for file in open_checkpoint(path):
            for name, entry in file.entries.items():
                plain = name.removeprefix("model.")
                if only_mtp and not plain.startswith("mtp_layers."):
                    continue
                tensors[plain] = torch.empty(entry.shape, dtype=entry.dtype)
                file.copy_to(entry, tensors[plain])
        return tensors
    pickled = sorted(path.glob("pytorch_model*.bin"))
    if not pickled:
        raise CheckpointError(f"{path}: neither *.safetensors nor pytorch_model*.bin")
    for part in pickled:
        try:
            loaded = torch.load(part, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CheckpointError(f"{part}: is not a file of plain tensors: {error}") from error
        tensors |= {name.removeprefix("model."): tensor for name, tensor in loaded.items()}
    return tensors


def _targets(head: DraftHead) -> Targets:
    """The memory that each of a head's own tensors fills."""
    targets: Targets = {}

    def add(name: str, module: torch.nn.Module) -> None:
        for kind in ("weight", "bias"):
            parameter = getattr(module, kind, None)
            if parameter is not None:
                targets[f"{name}.{kind}"] = parameter

    if isinstance(head, EagleHead):
        add("fc", head.fc)
        for index, layer in enumerate(head.decoder_layers):
            targets |= _layer_targets(f"layers.{index}.", layer, head.config.layer)
    elif isinstance(head, Eagle3Head):
        add("fc", head.fc)
        add("midlayer.hidden_norm", head.hidden_norm)
        add("norm", head.norm)
        targets |= _layer_targets("midlayer.", head.midlayer, head.config.layer)
    elif isinstance(head, MtpHead):
        for name, module in (
            ("token_layernorm", head.token_norm),
            ("hidden_layernorm", head.hidden_norm),
            ("input_proj", head.input_proj),
            ("final_layernorm", head.final_norm),
        ):
            add(_MTP_PREFIX + name, module)
        targets |= _layer_targets(_MTP_PREFIX, head.layer, head.config.layer)
    return targets


def _layer_targets(prefix: str, layer: HeadLayer, config: ModelConfig) -> Targets:
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts: dict[str, tuple[torch.nn.Module | None, int, int]] = {
        "self_attn.q_proj": (layer.attention.qkv, 0, heads),
        "self_attn.k_proj": (layer.attention.qkv, heads, kv),
        "self_attn.v_proj": (layer.attention.qkv, heads + kv, kv),
        "self_attn.o_proj": (layer.attention.output, 0, config.hidden_size),
        "mlp.gate_proj": (layer.mlp.gate_up, 0, config.intermediate_size),
        "mlp.up_proj": (layer.mlp.gate_up, config.intermediate_size, config.intermediate_size),
        "mlp.down_proj": (layer.mlp.down, 0, config.hidden_size),
        "input_layernorm": (layer.attention_norm, 0, config.hidden_size),
        "post_attention_layernorm": (layer.mlp_norm, 0, config.hidden_size),
    }
    targets: Targets = {}
    for part, (module, start, size) in parts.items():
        for kind in ("weight", "bias"):
            parameter = getattr(module, kind, None)
            if parameter is not None:
                targets[f"{prefix}{part}.{kind}"] = parameter[start : start + size]
    return targets


@torch.no_grad()
def _fill(path: Path, tensors: Mapping[str, torch.Tensor], targets: Targets) -> None:
    renamed = {_canonical(name, targets): tensor for name, tensor in tensors.items()}
    unexpected = [n for n in renamed if n not in targets and not n.endswith(_UNUSED)]
    missing = [name for name in targets if name not in renamed]
    if unexpected:
        raise CheckpointError(f"{path}: unexpected tensor {', '.join(sorted(unexpected)[:3])}")
    if missing:
        raise CheckpointError(f"{path}: missing tensor {', '.join(sorted(missing)[:3])}")
    for name, target in targets.items():
        tensor = renamed[name]
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, {list(target.shape)} is needed"
            )
        target.copy_(tensor)


def _canonical(name: str, targets: Targets) -> str:
    """EAGLE-3 checkpoints call their one layer `midlayer` or `layers.0`."""
    if name in targets:
        return name
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def _draft_vocabulary(path: Path, tensors: Targets, config: HeadConfig) -> torch.Tensor | None:
    """Target ids of an EAGLE-3 head's columns: `d2t` holds what has to be added to a column's own index."""
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if offsets is None:
        if config.draft_vocab_size != config.layer.vocab_size:
            raise CheckpointError(f"{path}: missing tensor d2t, the map of its draft vocabulary")
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if len(ids) != config.draft_vocab_size:
        raise CheckpointError(
            f"{path}: d2t has {len(ids)} entries, draft_vocab_size is {config.draft_vocab_size}"
        )
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab_size:
        raise CheckpointError(f"{path}: d2t points outside the target's vocabulary")
    return ids


@torch.no_grad()
def _read_shared(
    path: Path,
    target: ModelConfig,
    embedding: Embedding | None,
    lm_head: Linear,
    own_head: bool,
) -> None:
    """Fills what the head shares with its target."""
    wanted: Targets = {}
    needs_head = not own_head and not target.tie_word_embeddings
    if embedding is not None:
        wanted["model.embed_tokens.weight"] = embedding.weight
    if needs_head:
        wanted["lm_head.weight"] = lm_head.weight
    for file in open_checkpoint(path):
        for name in [name for name in wanted if name in file.entries]:
            file.copy_to(file.entries[name], wanted.pop(name))
    if wanted:
        raise CheckpointError(f"{path}: missing tensor {', '.join(wanted)}")


@torch.no_grad()
def _shorten(head: DraftHead, ids: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """FR-Spec (Zhao et al. 2025, arXiv 2502.14856): the head scores the given tokens alone."""
    short = Linear(head.lm_head.weight.shape[1], len(ids), False, dtype, device)
    short.weight.copy_(head.lm_head.weight[ids])
    head.lm_head, head.token_map = short, ids


def read_token_map(path: Path, vocab_size: int) -> torch.Tensor:
    """A token map: target ids, int64. Safetensors with one tensor, or .pt with a tensor or list of ids.

    Raises:
        CheckpointError: It cannot be read, or an id is not in the vocabulary.
    """
    try:
        if path.suffix == ".safetensors":
            ids = next(iter(load_file(path).values()))
        else:
            ids = torch.as_tensor(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise CheckpointError(f"{path}: is not a token map: {error}") from error
    ids = ids.long().flatten()
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointError(f"{path}: ids must be in [0, {vocab_size})")
    if len(ids.unique()) != len(ids):
        raise CheckpointError(f"{path}: ids are there twice")
    return ids
