"""Loads draft heads in every published layout of names, from safetensors or .bin files, and
refuses anything unexpected.
"""

import dataclasses
import logging
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from draft_service.models.block_draft import BlockDraft
from draft_service.models.draft_head import DraftHead, SharedWeights
from draft_service.models.eagle import EagleHead
from draft_service.models.eagle3 import Eagle3Head
from draft_service.models.markov import PREFIX as MARKOV
from draft_service.models.mtp import MTPHead
from draft_service.models.peagle import PEagleHead
from foredraft.errors import CheckpointError
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.parameters import Target
from foredraft.models.config import ModelConfig
from foredraft.models.head_config import (
    BLOCK_KINDS,
    EAGLE3_KINDS,
    OWN_VOCABULARY,
    HeadAlgorithm,
    HeadConfig,
)
from foredraft.models.loader import fill_tensors_randomly
from foredraft.models.weights import (
    SafetensorsFile,
    TensorEntry,
    check_finite,
    checkpoint_files,
    first_line,
    weight_files,
)

logger = logging.getLogger(__name__)

# Other names of the same tensors; ours are SGLang's without the leading `model.`.
_RENAMED = (
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
    ("markov_w1.", f"{MARKOV}markov_w1."),  # ModelOpt's
    ("markov_w2.", f"{MARKOV}markov_w2."),
    ("gate_proj.", f"{MARKOV}gate_proj."),
    ("joint_proj.", f"{MARKOV}joint_proj."),
    ("confidence_proj.", "confidence_head.proj."),
)
# Tensors that a head may carry and that are not computed with.
_UNUSED: dict[HeadAlgorithm, tuple[str, ...]] = {
    "EAGLE": ("lm_head.weight",),  # a copy of the target's
    "EAGLE3": ("verifier_norm.weight", "verifier_lm_head.weight"),
    "MTP": ("lm_head.weight",),
    "PEAGLE": ("verifier_norm.weight", "verifier_lm_head.weight"),
    "DFLASH": ("verifier_norm.weight", "verifier_lm_head.weight"),
    "DSPARK": ("verifier_norm.weight", "verifier_lm_head.weight"),
}
_EMBEDDING = "embed_tokens.weight"


def load_head(
    path: str | os.PathLike[str],
    algorithm: HeadAlgorithm,
    target: ModelConfig,
    shared: SharedWeights,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    multi_layer: bool = False,
) -> DraftHead:
    """Loads a head for a target.

    Args:
        path: Directory with config.json and weights; the target's own for MTP layers in it.
        algorithm: Algorithm that the head must implement.
        shared: The target's embedding and LM head; with a token map for FR-Spec.
        load_format: `auto` reads weights; `dummy` makes random ones from config.json alone.
        multi_layer: Whether MTP keeps every module, one for each depth, instead of only the first.

    Raises:
        CheckpointError: The head has another kind or another target, or tensors are missing,
            unexpected or misshaped; what it is, is named.
    """
    directory = Path(path)
    config = HeadConfig.from_dir(directory, algorithm)
    try:
        config.check_target(target)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    num_modules = config.layer.num_layers if algorithm == "MTP" else 1
    if algorithm == "MTP" and not multi_layer and num_modules > 1:
        config = dataclasses.replace(config, layer=_first_layer(config.layer))
    if load_format == "dummy":
        head = _make(config, shared, target.num_layers, dtype, device, {})
        fill_tensors_randomly(head.tensors())
        _set_token_map(head, _dummy_map(head), directory)
        return head
    with CheckpointTensors(directory) as tensors:
        names = _own_names(tensors, algorithm, directory)
        layout = {name: tensors.entries[stored].shape for name, stored in names.items()}
        if algorithm != "MTP":
            config = config.with_biases(layout)
        if _has_targets_depth(config, target, names):
            config = dataclasses.replace(config, layer=_first_layer(config.layer))
        head = _make(config, shared, target.num_layers, dtype, device, layout)
        _fill(head, tensors, names, num_modules, directory)
        if _EMBEDDING in names:
            _own_embedding(head, tensors, names[_EMBEDDING], directory)
        if algorithm in BLOCK_KINDS:
            _share_equal_lm_head(head, shared, directory)
        if algorithm in OWN_VOCABULARY:
            _set_token_map(head, _stored_map(head, tensors, names, directory), directory)
    return head


class CheckpointTensors:
    """Reads all tensors of a directory's weight files, one by one.

    Reads safetensors, else .bin without running code in it.

    Attributes:
        entries: Tensors by their name in the file; `begin` and `end` are meaningless for .bin
            files.

    Raises:
        CheckpointError: There are no weights, or they are broken or hold more than tensors.
    """

    def __init__(self, directory: Path) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._files: list[SafetensorsFile] = []
        self._where: dict[str, SafetensorsFile | torch.Tensor] = {}
        bins = weight_files(directory, "pytorch_model.bin")
        has_safetensors = any(directory.glob("*.safetensors"))
        if bins and not has_safetensors:
            for path in bins:
                for name, tensor in _load_bin(path).items():
                    entry = TensorEntry(name, tensor.dtype, tuple(tensor.shape), 0, 0)
                    self._add(path, name, entry, tensor)
            return
        try:
            for path in checkpoint_files(directory):
                file = SafetensorsFile(path)
                self._files.append(file)
                for name, entry in file.entries.items():
                    self._add(path, name, entry, file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "CheckpointTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def copy_to(self, name: str, target: torch.Tensor) -> None:
        """Copies a tensor to memory of the same shape, converting its type."""
        source = self._where[name]
        if isinstance(source, torch.Tensor):
            target.copy_(source)
        else:
            source.copy_to(self.entries[name], Target.whole(target))

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.__exit__(None, None, None)

    def _add(
        self, path: Path, name: str, entry: TensorEntry, source: SafetensorsFile | torch.Tensor
    ) -> None:
        if name in self.entries:
            raise CheckpointError(f"{path}: tensor {name} is there twice")
        self.entries[name], self._where[name] = entry, source


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of torch before 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, which could be code; it is not loaded"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in loaded.items()
    ):
        raise CheckpointError(f"{path}: not a dictionary of tensors")
    return loaded


def _own_names(
    tensors: CheckpointTensors, algorithm: HeadAlgorithm, directory: Path
) -> dict[str, str]:
    """Maps our names to names in the file, for all tensors of the head."""
    stored = {name: name.removeprefix("model.") for name in tensors.entries}
    if algorithm == "MTP" and any(name.startswith("layers.") for name in stored.values()):
        # A target's checkpoint: everything but the modules is the target's affair.
        stored = {name: own for name, own in stored.items() if own.startswith("mtp_layers.")}
    names: dict[str, str] = {}
    for name, own in stored.items():
        for prefix, ours in _RENAMED:
            if own.startswith(prefix):
                own = ours + own.removeprefix(prefix)
        # Rotary frequencies follow from the configuration.
        if own.endswith("rotary_emb.inv_freq"):
            continue
        if own in names:
            raise CheckpointError(f"{directory}: tensors {names[own]} and {name} are the same")
        names[own] = name
    return names


def _make(
    config: HeadConfig,
    shared: SharedWeights,
    num_target_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: Mapping[str, tuple[int, ...]],
) -> DraftHead:
    if config.algorithm in BLOCK_KINDS:
        return BlockDraft(config, shared, num_target_layers, dtype, device, layout)
    if config.algorithm in EAGLE3_KINDS:
        make = PEagleHead if config.algorithm == "PEAGLE" else Eagle3Head
        return make(config, shared, num_target_layers, dtype, device, layout)
    if config.algorithm == "MTP":
        return MTPHead(config, shared, num_target_layers, dtype, device)
    # EAGLE's own code takes a missing key for a bias; published heads without one have no such
    # tensor either.
    bias = config.fc_bias if config.fc_bias is not None else not layout or "fc.bias" in layout
    return EagleHead(config, shared, num_target_layers, dtype, device, bias)


@torch.no_grad()
def _fill(
    head: DraftHead,
    tensors: CheckpointTensors,
    names: Mapping[str, str],
    num_modules: int,
    directory: Path,
) -> None:
    """Fills every tensor of the head from exactly one of the checkpoint; none may be left over."""
    targets = head.tensors()
    algorithm = head.config.algorithm
    known = {_EMBEDDING, *_UNUSED[algorithm]}
    if algorithm in OWN_VOCABULARY:
        known |= {"d2t", "t2d"}
    beyond = tuple(f"mtp_layers.{index}." for index in range(head.num_modules, num_modules))
    unexpected = [
        stored
        for name, stored in names.items()
        if name not in targets and name not in known and not name.startswith(beyond)
    ]
    missing = [name for name in targets if name not in names]
    # Modules that are not kept have to be there all the same.
    first = [name for name in targets if name.startswith("mtp_layers.0.")]
    missing += [
        name
        for prefix in beyond
        for name in (prefix + own.removeprefix("mtp_layers.0.") for own in first)
        if name not in names
    ]
    if unexpected or missing:
        parts = [
            f"{what} tensor {', '.join(sorted(found)[:4])}"
            + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            for what, found in (("missing", missing), ("unexpected", unexpected))
            if found
        ]
        raise CheckpointError(f"{directory}: not this kind of head: {'; '.join(parts)}")
    for name, target in targets.items():
        entry = tensors.entries[names[name]]
        if entry.shape != tuple(target.shape):
            raise CheckpointError(
                f"{directory}: tensor {names[name]} has shape {list(entry.shape)}, config.json and"
                f" the target ask for {list(target.shape)}"
            )
        if not entry.dtype.is_floating_point:
            raise CheckpointError(f"{directory}: tensor {names[name]} has type {entry.dtype}")
        tensors.copy_to(names[name], target)
        check_finite(target, names[name], directory)


@torch.no_grad()
def _own_embedding(
    head: DraftHead, tensors: CheckpointTensors, stored: str, directory: Path
) -> None:
    """Returns the head's own embedding if it differs from the target's.

    Most heads that ship one ship a copy, which would waste memory.
    """
    entry = tensors.entries[stored]
    layer = head.config.layer
    shape = (layer.vocab_size, layer.hidden_size)
    if entry.shape != shape:
        raise CheckpointError(
            f"{directory}: tensor {stored} has shape {list(entry.shape)}, config.json asks for"
            f" {list(shape)}"
        )
    own = Embedding(layer.vocab_size, layer.hidden_size, 1.0, head.dtype, head.device)
    tensors.copy_to(stored, own.weight)
    check_finite(own.weight, stored, directory)
    theirs = head.embedding.weight
    if own.weight.shape != theirs.shape or not torch.equal(
        own.weight, theirs.to(own.weight.device)
    ):
        logger.info("%s has an embedding of its own", directory.name)
        head.embedding = own
        has_lm_head = (
            head.config.algorithm not in OWN_VOCABULARY or "lm_head.weight" in head.tensors()
        )
        if layer.tie_word_embeddings and not has_lm_head:
            head.lm_head = LMHead(0, 0, own, None, head.dtype, head.device)


@torch.no_grad()
def _share_equal_lm_head(head: DraftHead, shared: SharedWeights, directory: Path) -> None:
    """Shares the target's LM head where the head's own is a copy of it, to save memory."""
    own, theirs = head.lm_head.weight, shared.lm_head.weight
    if head.lm_head is shared.lm_head or own.shape != theirs.shape or theirs.is_meta:
        return
    if torch.equal(own, theirs.to(own.device)):
        head.lm_head = shared.lm_head
    else:
        logger.info("%s has an LM head of its own", directory.name)


def _stored_map(
    head: DraftHead, tensors: CheckpointTensors, names: Mapping[str, str], directory: Path
) -> torch.Tensor | None:
    """Returns the target's token of each row of a head's own LM head: row number plus `d2t`."""
    rows, vocab = head.lm_head.weight.shape[0], head.config.layer.vocab_size
    if "d2t" not in names:
        if rows != vocab:
            raise CheckpointError(f"{directory}: missing tensor d2t")
        return None
    entry = tensors.entries[names["d2t"]]
    if entry.shape != (rows,) or entry.dtype.is_floating_point:
        raise CheckpointError(
            f"{directory}: tensor d2t has shape {list(entry.shape)} and type {entry.dtype}, not"
            f" {rows} integers"
        )
    ids = torch.empty(rows, dtype=torch.int64)
    tensors.copy_to(names["d2t"], ids)
    ids += torch.arange(rows)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != rows:
        raise CheckpointError(
            f"{directory}: tensor d2t does not map {rows} rows to different tokens below {vocab}"
        )
    if "t2d" in names:
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[ids] = True
        stored = torch.empty(tensors.entries[names["t2d"]].shape, dtype=torch.bool)
        tensors.copy_to(names["t2d"], stored)
        if stored.shape != mask.shape or not torch.equal(stored, mask):
            raise CheckpointError(f"{directory}: tensors d2t and t2d contradict each other")
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def _dummy_map(head: DraftHead) -> torch.Tensor | None:
    rows = head.lm_head.weight.shape[0]
    is_own = head.config.algorithm in OWN_VOCABULARY and rows != head.config.layer.vocab_size
    return torch.arange(rows) if is_own else None


def _set_token_map(head: DraftHead, token_map: torch.Tensor | None, directory: Path) -> None:
    if head.config.algorithm in OWN_VOCABULARY:
        head.token_map = None if token_map is None else token_map.to(head.device)
    hidden, rows = head.embedding.weight.shape[1], head.config.layer.hidden_size
    if hidden != rows or head.lm_head.weight.shape[1] != rows:
        raise CheckpointError(
            f"{directory}: hidden_size: the head's is {rows}, the target's {hidden}; a head of"
            " another width has to bring embed_tokens and lm_head"
        )


def _has_targets_depth(config: HeadConfig, target: ModelConfig, names: Iterable[str]) -> bool:
    """Returns whether num_hidden_layers is the target's while there is one layer, as in a
    config.json that began as a copy of the target's.

    EAGLE-3's own code makes one layer whatever the key says.
    """
    return (
        config.algorithm in EAGLE3_KINDS
        and config.layer.num_layers == target.num_layers
        and not any(re.match(r"layers\.[1-9]", name) for name in names)
    )


def _first_layer(layer: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        layer, num_layers=1, windows=layer.windows[:1], ropes=layer.ropes[:1]
    )
