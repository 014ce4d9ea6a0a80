"""The configuration of speculation: checked flags, for one draft or for several."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.by_name import check_names, is_by_name, value_of
from foredraft.config.options import flag_of
from foredraft.config.speculation_checks import check_speculation, check_together
from foredraft.config.speculation_flags import SpeculationFlags

# Fields that may hold NAME=VALUE for each of several algorithms.
BY_NAME = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_token_map",
)


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(SpeculationFlags):
    """Configuration of speculation; verifier and draft get the same.

    Raises:
        ConfigError: The flags cannot be served together.
    """

    def __post_init__(self) -> None:
        names = ["EAGLE" if name == "NEXTN" else name for name in self.algorithms]
        object.__setattr__(self, "speculative_algorithm", ",".join(names))
        for field in BY_NAME:
            check_names(flag_of(field), getattr(self, field), names)
        if len(names) == 1:
            for field in BY_NAME:
                object.__setattr__(self, field, value_of(getattr(self, field), names[0]))
            check_speculation(self)
        else:
            check_together(names, self.speculative_draft_model_path)
            each_draft(self)  # checks them one by one

    @property
    def tree_limits(self) -> tuple[int, int, int]:
        """Returns (steps, topk, draft tokens) with the algorithm's defaults filled in; for
        several drafts the largest of each.
        """
        if len(self.algorithms) > 1:
            return largest_limits([one.tree_limits for one in each_draft(self)])
        if self.speculative_algorithm == "NONE":
            return 0, 0, 1
        if self.speculative_algorithm == "NGRAM":
            tokens = self.speculative_num_draft_tokens or 12
            return tokens - 1, self.speculative_ngram_max_bfs_breadth, tokens
        if self.speculative_num_steps is None:
            return 3, 1, 4
        steps, topk = self.speculative_num_steps, self.speculative_eagle_topk or 1
        return steps, topk, self.speculative_num_draft_tokens or steps + 1


C = TypeVar("C", bound=SpeculationConfig)


def largest_limits(limits: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Returns the largest steps, topk and draft tokens of several drafts' (steps, topk, draft
    tokens).
    """
    steps, topk, tokens = zip(*limits, strict=True)
    return max(steps), max(topk), max(tokens)


def each_draft(config: C) -> list[C]:
    """Returns the configuration of each draft as if it were the only one.

    Raises:
        ConfigError: It cannot be served.
    """
    if len(config.algorithms) == 1:
        return [config]
    return [
        dataclasses.replace(config, speculative_algorithm=name, **_own_fields(config, name))
        for name in config.algorithms
    ]


def _own_fields(config: SpeculationConfig, name: str) -> dict[str, Any]:
    """Returns the fields that a draft beside others has of its own."""
    traits = ALGORITHMS[name]
    if not traits.has_model:
        return {
            **dict.fromkeys(BY_NAME, ""),
            "speculative_num_steps": None,
            "speculative_eagle_topk": None,
            "speculative_draft_model_quantization": "unquant",
            "enable_multi_layer_eagle": False,
            "speculative_ngram_override": False,
            "speculative_draft_ahead": False,
        }
    fields: dict[str, Any] = {field: value_of(getattr(config, field), name) for field in BY_NAME}
    # A value without names goes only to algorithms that use it; without any of these, a later check
    # refuses the flag.
    all_traits = [ALGORITHMS[one] for one in config.algorithms]
    is_for_all = not is_by_name(config.speculative_token_map)
    if not traits.may_map_tokens and is_for_all and any(one.may_map_tokens for one in all_traits):
        fields["speculative_token_map"] = ""
    if not traits.may_have_modules and any(one.may_have_modules for one in all_traits):
        fields["enable_multi_layer_eagle"] = False
    if traits.reads_hidden and "STANDALONE" in config.algorithms:
        fields["speculative_draft_ahead"] = False  # the flag is STANDALONE's
    return fields


def with_tree_defaults(config: C, architecture: str, on_cpu: bool = False) -> C:
    """Fills in the tree of a head where no flag gives one.

    For a Llama target (5, 4, 8), as SGLang does; on a CPU, where every row costs time, its chain
    (5, 1, 6) alone; the verifier's controller drafts as much of it as pays.

    Args:
        architecture: Architecture of the target.
        on_cpu: Whether the models run on the CPU, where the flags leave it open.
    """
    traits = config.traits
    if not traits.reads_hidden or traits.is_block or config.speculative_num_steps is not None:
        return config
    if architecture != "LlamaForCausalLM" or config.enable_multi_layer_eagle:
        return config
    on_cpu = on_cpu or getattr(config, "device", "auto") == "cpu"
    return dataclasses.replace(
        config,
        speculative_num_steps=5,
        speculative_eagle_topk=1 if on_cpu else 4,
        speculative_num_draft_tokens=6 if on_cpu else 8,
    )
