"""Reads a block drafter's config.json (DFlash, DSpark) in any of the published layouts.

Torch-free.

z-lab and SpecForge have a `dflash_config`, DeepSpec and ModelOpt have keys at the top, and the
speculators library has a nested `transformer_layer_config`.
"""

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foredraft.errors import CheckpointError
from foredraft.models.config_reader import MAX_SIZE, Reader

BlockAlgorithm = Literal["DFLASH", "DSPARK"]

MARKOV_HEADS = ("vanilla", "gated", "rnn")
MARKOV_TENSOR = "markov_w1.weight"
_MAX_HEADER_BYTES = 100_000_000
_MASK_TOKEN_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Parts of tensors' names that give a kind away which is not served, and how it is called.
_REFUSED_TENSORS = {
    "candidate_selector.": "DFlash2",
    "attention_conv.": "DFlash2",
    "mlp_conv.": "DFlash2",
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "aux_hidden_norms.": "DFlash with a norm for each layer of the target",
    "self_attn.g_proj.": "DFlash with gated attention",
}


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Options of a block drafter beside its decoder layers.

    Attributes:
        block_size: Number of rows of one block, the newest committed token included.
        mask_token_id: Token that stands for those still to be drafted.
        from_anchor: Whether a row predicts the token after its position, so that the first row
            drafts too; else each row but the first predicts the token at its own position.
        is_window_causal: Whether a row of a sliding layer sees no later row of its block.
        markov_rank: Width of DSpark's bias by the previous token; 0 for none.
        markov_kind: One of MARKOV_HEADS.
        num_target_layers: Number of layers of the target that the drafter was made for; None where
            config.json does not say.
        default_layers: Rule that selects the target's layers where config.json names none.
    """

    block_size: int
    mask_token_id: int
    from_anchor: bool = False
    is_window_causal: bool = False
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    num_target_layers: int | None = None
    default_layers: Literal["evenly", "speculators"] = "evenly"

    @property
    def num_drafted(self) -> int:
        """Number of tokens that one block proposes."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def usual_layers(self, num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
        """Returns the target layers whose input (the residual stream) is read where config.json
        names none.
        """
        if self.default_layers == "speculators":
            return (2, num_target_layers // 2, num_target_layers - 3)
        if num_draft_layers == 1:
            return (num_target_layers // 2 + 1,)
        span = num_target_layers - 4
        outputs = [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]
        return tuple(layer + 1 for layer in outputs)


def is_block_draft(raw: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a block drafter, or one of the kinds that are
    refused by name.
    """
    if kind := raw.get("speculators_model_type"):
        return str(kind) in ("dflash", "dspark", "dflash2", "domino")
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return (
        any(part in name for part in ("DFlash", "DSpark", "Domino"))
        or isinstance(raw.get("dflash_config"), Mapping)
        or isinstance(raw.get("dspark_config"), Mapping)
    )


def read_block_options(
    raw: Mapping[str, Any], where: str, tensors: Collection[str] = ()
) -> tuple[BlockAlgorithm, BlockOptions]:
    """Returns the drafter's algorithm and options.

    Args:
        raw: Content of config.json, for which `is_block_draft` holds.
        where: Names the file in errors.
        tensors: Names of the checkpoint's tensors; they decide between DFlash and DSpark where
            there are any.

    Raises:
        CheckpointError: A key is missing or wrong, or this is a kind that is not served.
    """
    keys = _Keys(raw, where)
    name = _refuse(keys, tensors, where)
    is_speculators = bool(raw.get("speculators_model_type"))
    rank = keys.count("markov_rank", 256 if name == "dspark" and is_speculators else 0)
    if tensors:
        has_markov = any(tensor.endswith(MARKOV_TENSOR) for tensor in tensors)
        if has_markov and not rank:
            raise CheckpointError(f"{where}: markov_rank is missing, but there is {MARKOV_TENSOR}")
        rank = rank if has_markov else 0
    kind = str(keys.get("markov_head_type") or "vanilla").lower()
    if rank and kind not in MARKOV_HEADS:
        raise CheckpointError(
            f"{where}: markov_head_type {kind!r} is not supported; known: {', '.join(MARKOV_HEADS)}"
        )
    # DeepSpec's DFlash is its DSpark without the bias: its first row drafts as well.
    predicts_next = keys.flag("sample_from_anchor", keys.flag("shift_label", name == "dspark"))
    block_size = keys.count("block_size", 8 if is_speculators else 0)
    if block_size < 2:
        raise CheckpointError(f"{where}: block_size must be at least 2, not {block_size}")
    is_causal = keys.flag("causal", False)
    if is_speculators:
        is_causal = not keys.flag("sliding_window_non_causal", False)
    options = BlockOptions(
        block_size=block_size,
        mask_token_id=_mask_token(keys, where),
        from_anchor=predicts_next,
        is_window_causal=is_causal,
        markov_rank=rank,
        markov_kind=kind,
        num_target_layers=keys.count("num_target_layers", 0) or None,
        default_layers="speculators" if is_speculators else "evenly",
    )
    return "DSPARK" if rank else "DFLASH", options


def read_target_layers(raw: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    """Returns the target layers whose input (the residual stream) is read, None where
    config.json names none.

    The speculators library names the layer that a stream enters. All others name the layer that it
    leaves, from 0 on; -1 is the embedding.
    """
    keys = _Keys(raw, where)
    field, shift = "target_layer_ids", 1
    if raw.get("speculators_model_type"):
        field, shift = "aux_hidden_state_layer_ids", 0
    ids = keys.get(field)
    if ids is None:
        ids = keys.get("dspark_target_layer_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise CheckpointError(f"{where}: {field} must be a list of integers, not {ids!r}")
    return tuple(layer + shift for layer in ids)


def stored_names(directory: Path) -> frozenset[str]:
    """Returns names of the tensors in a directory's safetensors files; empty where none can be
    read.
    """
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size > _MAX_HEADER_BYTES:
                    return frozenset()
                names |= json.loads(file.read(size)).keys()
        except (OSError, ValueError, struct.error, AttributeError):
            return frozenset()  # the loader says what is wrong
    return frozenset(names)


class _Keys:
    """Reads keys that stand at the top or inside `dflash_config` or `dspark_config`."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where
        self._nested: list[Mapping[str, Any]] = []
        for name in ("dflash_config", "dspark_config"):
            nested = raw.get(name) or {}
            if not isinstance(nested, Mapping):
                raise CheckpointError(f"{where}: {name} is not an object")
            self._nested.append(nested)

    def get(self, key: str) -> Any:
        for part in (*self._nested, self._raw):
            if part.get(key) is not None:
                return part[key]
        return None

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else Reader({key: value}, self._where).flag(key, default)

    def count(self, key: str, default: int) -> int:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise CheckpointError(
                f"{self._where}: {key} must be a whole number up to {MAX_SIZE}, not {value!r}"
            )
        return value


def _refuse(keys: _Keys, tensors: Collection[str], where: str) -> str:
    """Raises for kinds that are not served; else returns `dspark` or `dflash`, as config.json
    calls it.
    """
    names = keys.get("architectures")
    given = str(names[0]) if isinstance(names, list) and names else ""
    kind = str(keys.get("speculators_model_type") or "")
    projector = str(keys.get("projector_type") or "").lower()
    refused = ""
    if kind == "dflash2" or keys.get("conv_kernel_size") or keys.get("selector_rank"):
        refused = "DFlash2"
    elif kind == "domino" or projector == "domino" or "Domino" in given:
        refused = "Domino"
    elif given == "DFlash2DraftModel":
        refused = "DFlash2"
    for tensor in sorted(tensors):
        for part, name in _REFUSED_TENSORS.items():
            if not refused and part in tensor:
                refused = f"{name} (tensor {tensor})"
    if refused:
        raise CheckpointError(f"{where}: {refused} is not served; DFLASH, DSPARK and PEAGLE are")
    if projector not in ("", "dspark", "dflash"):
        raise CheckpointError(f"{where}: projector_type {projector!r} is not supported")
    if kind:
        return kind
    is_dspark = projector == "dspark" or "DSpark" in given or keys.get("dspark_config")
    return "dspark" if is_dspark else "dflash"


def _mask_token(keys: _Keys, where: str) -> int:
    for key in _MASK_TOKEN_KEYS:
        value = keys.get(key)
        if value is not None:
            if type(value) is not int or value < 0:
                raise CheckpointError(f"{where}: {key} must be a token id, not {value!r}")
            return value
    raise CheckpointError(f"{where}: mask_token_id is missing")
