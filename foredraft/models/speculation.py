"""What a speculation's flags mean for a target, once its config.json is read. Torch-free: verifier and draft both ask."""

import dataclasses
from pathlib import Path
from typing import TypeVar

from foredraft.config.services import TargetConfig
from foredraft.config.speculation import HEADS, SpeculationConfig, with_tree_defaults
from foredraft.errors import ConfigError
from foredraft.models.config import ModelConfig
from foredraft.models.head_config import HeadConfig
from foredraft.models.registry import resolve_model_path

C = TypeVar("C", bound=SpeculationConfig)


def resolve(config: C, on_cpu: bool = False) -> C:
    """`complete` for a configuration that names its target; reads nothing unless a head drafts.

    Raises:
        CheckpointError: A model cannot be had.
        ConfigError: See `complete`.
    """
    if config.speculative_algorithm not in HEADS:
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
    return complete(config, target, path, on_cpu)


def complete(config: C, target: ModelConfig, head: Path | None, on_cpu: bool = False) -> C:
    """Settles what only the models' own files tell.

    EAGLE is MTP where the head is MTP layers: the target's own when there is no other head. The tree is (5, 4, 8) for
    heads of a Llama target, (5, 1, 6) on a CPU, (3, 1, 4) for others, and as deep as there are modules where each depth has its own.

    Args:
        head: Directory of the head; None when the flags name none.
        on_cpu: Whether the models run on the CPU, where the flags leave it open.

    Raises:
        CheckpointError: The head is broken.
        ConfigError: The flags do not fit the models; it names them.
    """
    algorithm = config.speculative_algorithm
    if algorithm not in HEADS:
        return config
    if head is None and target.num_mtp_layers == 0:
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path: the target has no MTP layers"
        )
    if algorithm == "EAGLE" and (head is None or HeadConfig.algorithm_of(head, "EAGLE") == "MTP"):
        algorithm = "MTP"
        config = dataclasses.replace(config, speculative_algorithm=algorithm)
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
            f"--enable-multi-layer-eagle: --speculative-num-steps {config.speculative_num_steps} is more than the "
            f"{modules} MTP layers"
        )
    return dataclasses.replace(
        config, speculative_num_steps=config.speculative_num_steps or modules
    )
