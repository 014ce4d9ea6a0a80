"""Loads draft heads in every published layout of names, and refuses anything unexpected."""

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from draft_service.models.block_draft import BlockDraft
from draft_service.models.draft_head import DraftHead, HeadSpec, SharedWeights
from draft_service.models.eagle import EagleHead
from draft_service.models.eagle3 import Eagle3Head
from draft_service.models.head_tensors import CheckpointTensors
from draft_service.models.markov import PREFIX as MARKOV
from draft_service.models.mtp import MTPHead
from draft_service.models.peagle import PEagleHead
from foredraft.errors import CheckpointError
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear
from foredraft.layers.parameters import Target
from foredraft.models.config import ModelConfig
from foredraft.models.head_config import HeadConfig
from foredraft.models.head_kinds import (
    BLOCK_KINDS,
    EAGLE3_KINDS,
    OWN_VOCABULARY,
    HeadAlgorithm,
)
from foredraft.models.loader import (
    DUMMY_STD,
    check_fits,
    fill_tensors_randomly,
    finish_linears,
    may_fill,
)
from foredraft.models.weights import check_finite

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
)
# Beginnings of tensors that a head may carry and that are not computed with.
_VERIFIERS = ("verifier_norm.", "verifier_lm_head.")
# DSpark's prediction of acceptance, and ModelOpt's name of it.
_CONFIDENCE = ("confidence_head.proj.", "confidence_proj.")
_UNUSED: dict[HeadAlgorithm, tuple[str, ...]] = {
    "EAGLE": ("lm_head.",),  # a copy of the target's
    "EAGLE3": _VERIFIERS,
    "MTP": ("lm_head.",),
    "PEAGLE": _VERIFIERS,
    "DFLASH": (*_VERIFIERS, *_CONFIDENCE),
    "DSPARK": (*_VERIFIERS, *_CONFIDENCE),
}
# Ends of tensors that follow from the configuration, or that scale a cache of 8-bit floats, which
# drafts do not have.
_PASSED_OVER = ("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".output_scale")
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
        head = _make(HeadSpec(config, shared, target.num_layers, dtype, device))
        _fill_randomly(head, shared)
        _set_token_map(head, _dummy_map(head), directory)
        return head
    with CheckpointTensors(directory) as tensors:
        names = _own_names(tensors, algorithm, directory)
        layout = {name: tensors.entries[stored].shape for name, stored in names.items()}
        if algorithm != "MTP":
            config = config.with_biases(layout)
        if _has_targets_depth(config, target, names):
            config = dataclasses.replace(config, layer=_first_layer(config.layer))
        head = _make(HeadSpec(config, shared, target.num_layers, dtype, device, layout))
        _fill(head, tensors, names, num_modules, directory)
        if _EMBEDDING in names:
            _own_embedding(head, shared, tensors, names[_EMBEDDING], directory)
        if algorithm in BLOCK_KINDS:
            _share_equal_lm_head(head, shared, directory)
        if algorithm in OWN_VOCABULARY:
            _set_token_map(head, _stored_map(head, tensors, names, directory), directory)
    return head


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
        if own.endswith(_PASSED_OVER) or own.startswith(_UNUSED[algorithm]):
            continue
        if own in names:
            raise CheckpointError(f"{directory}: tensors {names[own]} and {name} are the same")
        names[own] = name
    return names


def _make(spec: HeadSpec) -> DraftHead:
    config, layout = spec.config, spec.layout
    if config.algorithm in BLOCK_KINDS:
        return BlockDraft(spec)
    if config.algorithm in EAGLE3_KINDS:
        make = PEagleHead if config.algorithm == "PEAGLE" else Eagle3Head
        return make(spec)
    if config.algorithm == "MTP":
        return MTPHead(spec)
    # EAGLE's own code takes a missing key for a bias; published heads without one have no such
    # tensor either.
    bias = config.fc_bias if config.fc_bias is not None else not layout or "fc.bias" in layout
    return EagleHead(spec, bias)


@torch.no_grad()
def _fill(
    head: DraftHead,
    tensors: CheckpointTensors,
    names: Mapping[str, str],
    num_modules: int,
    directory: Path,
) -> None:
    """Fills every tensor of the head from exactly one of the checkpoint; none may be left over."""
    targets = head.targets()
    known = {_EMBEDDING}
    if head.config.algorithm in OWN_VOCABULARY:
        known |= {"d2t", "t2d"}
    beyond = tuple(f"mtp_layers.{index}." for index in range(head.num_modules, num_modules))
    others = [name for name in names if name not in targets and not name.startswith(beyond)]
    _check_quantized(head, others, directory)
    unexpected = [names[name] for name in others if name not in known]
    needed = [name for name, target in targets.items() if not target.is_optional]
    missing = [name for name in needed if name not in names]
    # Modules that are not kept have to be there all the same.
    first = [name for name in needed if name.startswith("mtp_layers.0.")]
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
        if name not in names:
            continue
        entry = tensors.entries[names[name]]
        check_fits(directory, names[name], entry, target, "config.json and the target ask")
        tensors.copy_to(names[name], target)
        check_finite(target.memory, names[name], directory)
    finish_linears(head, directory)


def _check_quantized(head: DraftHead, unread: Iterable[str], directory: Path) -> None:
    """Raises CheckpointError where a matrix is quantised that heads keep plain.

    Args:
        unread: Names of tensors without a place in the head.
    """
    quantization = head.config.layer.quantization
    if quantization is None:
        return
    scale = f".{quantization.scheme.scale_name}"
    refused = sorted(name.removesuffix(scale) for name in unread if name.endswith(scale))
    if refused:
        raise CheckpointError(
            f"{directory}: quantised {', '.join(refused[:4])} is not supported: {quantization} is"
            " read for attention's and the MLP's own matrices and the one that joins a row's"
            " inputs; quantise the head again and leave the named ones out (ignore)"
        )


@torch.no_grad()
def _fill_randomly(head: DraftHead, shared: SharedWeights) -> None:
    """Fills the head's own parameters; the target's stay as they are."""
    theirs = {
        id(weight) for one in (shared.embedding, shared.lm_head) for weight in one.parameters()
    }
    own = {name: one for name, one in head.named_parameters() if id(one) not in theirs}
    fill_tensors_randomly(own)
    for module in head.modules():
        if isinstance(module, Linear) and module is not shared.lm_head:
            module.method.fill_randomly(module, DUMMY_STD)


@torch.no_grad()
def _own_embedding(
    head: DraftHead,
    shared: SharedWeights,
    tensors: CheckpointTensors,
    stored: str,
    directory: Path,
) -> None:
    """Gives the head the embedding in its files if it differs from the target's.

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
    if not may_fill(entry.dtype, head.dtype):
        raise CheckpointError(f"{directory}: tensor {stored} has type {entry.dtype}")
    tensors.copy_to(stored, Target.whole(own.weight))
    check_finite(own.weight, stored, directory)
    theirs = head.embedding.weight
    if own.weight.shape != theirs.shape or not torch.equal(
        own.weight, theirs.to(own.weight.device)
    ):
        logger.info("%s has an embedding of its own", directory.name)
        head.embedding = own
        may_be_tied = head.config.algorithm in OWN_VOCABULARY and head.lm_head is shared.lm_head
        if layer.tie_word_embeddings and may_be_tied:
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
    tensors.copy_to(names["d2t"], Target.whole(ids))
    ids += torch.arange(rows)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != rows:
        raise CheckpointError(
            f"{directory}: tensor d2t does not map {rows} rows to different tokens below {vocab}"
        )
    if "t2d" in names:
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[ids] = True
        stored = torch.empty(tensors.entries[names["t2d"]].shape, dtype=torch.bool)
        tensors.copy_to(names["t2d"], Target.whole(stored))
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
