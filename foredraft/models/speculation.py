"""Completes the flags of speculation for a target, once its config.json is read.

Torch-free: verifier and draft both call it.
"""

import dataclasses
import logging
from pathlib import Path
from typing import TypeVar

from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.common import TargetConfig
from foredraft.config.speculation import SpeculationConfig, with_tree_defaults
from foredraft.errors import CheckpointError, ConfigError
from foredraft.models.block_config import is_block_draft, stored_names
from foredraft.models.config import ModelConfig
from foredraft.models.config_reader import read_json
from foredraft.models.families import FAMILIES
from foredraft.models.head_config import HeadConfig
from foredraft.models.head_kinds import architecture_name
from foredraft.models.kept_fingerprints import kept_fingerprint
from foredraft.models.registry import resolve_model_path

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=SpeculationConfig)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenIds:
    """Identifies the mapping from a model's ids to tokens.

    Attributes:
        vocab_size: Number of ids; 0 where any number will do.
        fingerprint: Fingerprint of the tokenizer; empty where it is not known.
    """

    vocab_size: int
    fingerprint: str


def check_tokens(name: str, draft: TokenIds, target: TokenIds, may_pad: bool) -> None:
    """Raises ConfigError when a draft's ids stand for other tokens than the target's.

    Args:
        name: Name of the draft, as a sentence begins.
        may_pad: Whether draft and target may pad the same tokens to different vocabularies.
    """
    are_known = bool(draft.fingerprint and target.fingerprint)
    if are_known and draft.fingerprint != target.fingerprint:
        raise ConfigError(
            f"{name} has another tokenizer than the target, so its ids mean other tokens: take a"
            " draft with the target's tokenizer, or --speculative-algorithm NGRAM"
        )
    may_differ = not draft.vocab_size or (may_pad and are_known)
    if draft.vocab_size != target.vocab_size and not may_differ:
        raise ConfigError(
            f"{name} has a vocabulary of {draft.vocab_size} tokens and the target one of"
            f" {target.vocab_size}: take a draft made for this target, or --speculative-algorithm"
            " NGRAM"
        )


def find_algorithm(draft: Path) -> str:
    """Returns the algorithm that a directory's draft is for, by its configuration and tensors.

    Raises:
        CheckpointError: There is no draft that is known.
    """
    raw, names = read_json(draft / "config.json"), stored_names(draft)
    name = architecture_name(raw)
    is_model = isinstance(name, str) and name in FAMILIES
    if names and not _holds_head(draft) and is_model:
        return "STANDALONE"
    has_map = bool({"d2t", "model.d2t"} & names) or raw.get("draft_vocab_size") is not None
    return HeadConfig.algorithm_of(draft, "EAGLE3" if has_map else "EAGLE")


def _holds_head(draft: Path) -> bool:
    """Returns whether a draft's files have the tensors or keys of a head or block drafter."""
    own = {name.removeprefix("model.") for name in stored_names(draft)}
    is_head = any(name in ("fc.weight", "fusion_fc.weight") for name in own)
    is_head |= any(name.startswith("mtp_layers.") for name in own)
    return is_head or is_block_draft(read_json(draft / "config.json"))


def resolve(config: C, on_cpu: bool = False) -> C:
    """`complete` for a configuration that names its target; reads nothing unless a model drafts.

    Raises:
        CheckpointError: A model cannot be had.
        ConfigError: See `complete`; or a draft in a directory here is for another algorithm or
            another target.
    """
    if config.speculative_algorithm == "STANDALONE":
        _check_standalone(config)
    if not config.traits.reads_hidden:
        return config
    assert isinstance(config, TargetConfig)
    target = ModelConfig.from_dir(resolve_model_path(config.model_path, config.revision))
    path = None
    if config.speculative_draft_model_path:
        path = resolve_model_path(
            config.speculative_draft_model_path,
            config.speculative_draft_model_revision,
            bins=True,
        )
    completed = complete(config, target, path, on_cpu)
    if path is not None:
        _check_head(completed, path, target)
    return completed


def complete(config: C, target: ModelConfig, head: Path | None, on_cpu: bool = False) -> C:
    """Completes a configuration from the models' own files.

    EAGLE is MTP where the head is MTP layers: the target's own when there is no other head. Of
    DFLASH and DSPARK, and of EAGLE3 and PEAGLE, the head's files say which it is. A block's chain
    is as long as the block. The tree is (5, 4, 8) for heads of a Llama target, (5, 1, 6) on a CPU,
    (3, 1, 4) for others, and as deep as there are modules where each depth has its own.

    Args:
        head: Directory of the head; None when the flags name none.
        on_cpu: Whether the models run on the CPU, where the flags leave it open.

    Raises:
        CheckpointError: The head is broken.
        ConfigError: The flags do not fit the models; it names them.
    """
    algorithm = config.speculative_algorithm
    if not config.traits.reads_hidden:
        return config
    if head is None and target.num_mtp_layers == 0:
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path: the target"
            " has no MTP layers"
        )
    if algorithm == "EAGLE" and (head is None or HeadConfig.algorithm_of(head, "EAGLE") == "MTP"):
        algorithm = "MTP"
        config = dataclasses.replace(config, speculative_algorithm=algorithm)
    if head is not None and (algorithm == "EAGLE3" or ALGORITHMS[algorithm].is_block):
        config = _settle_blocks(config, head)
    if not config.enable_multi_layer_eagle:
        return with_tree_defaults(config, target.architecture, on_cpu)
    if algorithm != "MTP":
        raise ConfigError(
            f"--enable-multi-layer-eagle needs MTP layers; {head} is a head for {algorithm}"
        )
    modules = target.num_mtp_layers
    if head is not None:
        modules = HeadConfig.from_dir(head, "MTP").layer.num_layers
    if modules < 2:
        raise ConfigError(
            "--enable-multi-layer-eagle: there is one MTP layer, and no others to use"
        )
    if (config.speculative_num_steps or modules) > modules:
        raise ConfigError(
            f"--enable-multi-layer-eagle: --speculative-num-steps {config.speculative_num_steps} is"
            f" more than the {modules} MTP layers"
        )
    return dataclasses.replace(
        config, speculative_num_steps=config.speculative_num_steps or modules
    )


def _settle_blocks(config: C, head: Path) -> C:
    """Returns the algorithm that a head's files name, and the length of a chain from one
    forward.
    """
    asked = config.speculative_algorithm
    assert asked in ("EAGLE3", "PEAGLE", "DFLASH", "DSPARK")
    found = HeadConfig.algorithm_of(head, asked)  # type: ignore[arg-type]
    families = (("EAGLE3", "PEAGLE"), ("DFLASH", "DSPARK"))
    if found != asked and any(asked in family and found in family for family in families):
        logger.info("%s: by its files a draft for %s, not %s", head.name, found, asked)
        config = dataclasses.replace(config, speculative_algorithm=found)
    if not ALGORITHMS[found].is_block:
        return config
    read = HeadConfig.from_dir(head, found)
    steps, drafted = config.speculative_num_steps, read.num_drafted
    if steps is None:
        return dataclasses.replace(config, speculative_num_steps=drafted)
    if read.block is not None and steps > read.block.num_drafted:
        raise ConfigError(
            f"--speculative-num-steps {steps}: a block of {head.name} proposes {drafted} tokens"
        )
    return config


def _check_head(config: SpeculationConfig, head: Path, target: ModelConfig) -> None:
    """Raises ConfigError for a head that was made for another target, or for a model that is no
    draft.
    """
    name = f"--speculative-draft-model-path {head}"
    algorithm = config.speculative_algorithm
    assert config.traits.reads_hidden
    if find_algorithm(head) == "STANDALONE":
        raise ConfigError(
            f"{name} is a whole model, not a head: draft with it by --speculative-algorithm"
            " STANDALONE"
        )
    read = HeadConfig.from_dir(head, algorithm)  # type: ignore[arg-type]
    try:
        read.check_target(target)
    except CheckpointError as error:
        raise ConfigError(
            f"{name} does not fit the target ({error}): take a head that was trained for this"
            " target, or --speculative-algorithm NGRAM"
        ) from None


def _check_standalone(config: SpeculationConfig) -> None:
    """Raises ConfigError for a draft in a directory here that is a head, or has other tokens;
    elsewhere the draft's service says it.
    """
    draft = Path(config.speculative_draft_model_path).expanduser()
    if not isinstance(config, TargetConfig) or not (draft / "config.json").is_file():
        return
    if _holds_head(draft):
        raise ConfigError(
            f"--speculative-draft-model-path {draft} is a draft for --speculative-algorithm"
            f" {find_algorithm(draft)}, not a whole model as STANDALONE needs"
        )
    target = resolve_model_path(config.model_path, config.revision)
    own, theirs = (
        TokenIds(ModelConfig.from_dir(path).vocab_size, kept_fingerprint(path))
        for path in (draft, target)
    )
    check_tokens(f"--speculative-draft-model-path {draft}", own, theirs, may_pad=True)
