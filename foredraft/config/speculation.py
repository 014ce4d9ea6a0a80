"""Flags of speculation, and checks that their combination can be served."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from foredraft.config.algorithms import ALGORITHMS, Algorithm
from foredraft.config.by_name import check_names, is_by_name, value_of
from foredraft.config.options import flag_of, option
from foredraft.errors import ConfigError

# Fields that may hold NAME=VALUE for each of several algorithms.
BY_NAME = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_token_map",
)


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Flags of speculation; verifier and draft get the same."""

    speculative_algorithm: str = option(
        "NGRAM",
        "How tokens are drafted: NONE, NGRAM, STANDALONE, EAGLE (EAGLE-2; NEXTN is another name of"
        " it), EAGLE3, MTP, or a block in one forward: DFLASH, DSPARK or PEAGLE. Several may be"
        " given with commas between them, as in EAGLE3,NGRAM: each sequence is drafted for by the"
        " best one.",
        choices=tuple(ALGORITHMS),
        joined=True,
        aliases=("--speculative-algo",),
    )
    speculative_draft_model_path: str = option(
        "",
        "Draft model of STANDALONE, or head of any other algorithm but NGRAM; `foredraft serve`"
        " finds out the algorithm, and the target where the files name it. Without a head MTP takes"
        " the target's own layers, and so does EAGLE. Where several algorithms have a model,"
        " NAME=PATH for each, with commas between them.",
        aliases=("--speculative-draft-model", "--speculative-draft"),
    )
    speculative_draft_model_revision: str = option("", "Like --revision, for the draft model.")
    speculative_draft_load_format: str = option(
        "auto", "Like --load-format, for the draft model.", choices=("auto", "dummy")
    )
    speculative_num_steps: int | None = option(
        None,
        "Depth of the draft tree (heads: 5 for a Llama target, else 3; blocks: what one proposes;"
        " STANDALONE: 3; NGRAM: --speculative-num-draft-tokens - 1).",
    )
    speculative_eagle_topk: int | None = option(
        None,
        "Children per node and beams per level of a model's draft tree (heads of a Llama target on"
        " a GPU: 4; 1: a chain).",
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "Rows that the target verifies per step, the root included (heads of a Llama target: 8, on"
        " a CPU 6; STANDALONE: 4; NGRAM: 12).",
    )
    speculative_token_map: str = option(
        "",
        "FR-Spec: file of the token ids that EAGLE, MTP or STANDALONE may draft (.pt, .json or"
        " .safetensors), on the hub as organisation/name/file, or foredraft-demo-token-map.",
    )
    enable_multi_layer_eagle: bool = option(
        False,
        "MTP: one module of the head for each depth, instead of its first for all; drafts chains.",
    )
    speculative_draft_model_quantization: str = option(
        "unquant",
        "Weights of the draft in memory, quantized while loading, scales per output: int8 (on the"
        " CPU it saves memory, not time), or fp8 on GPUs from sm_89 on, whose activations are"
        " rounded to fp8 too.",
        choices=("unquant", "int8", "fp8"),
    )
    speculative_attention_mode: str = option(
        "prefill",
        "Which attention backend verifies drafts. Prefill and decode have the same one here, so"
        " both values mean the same.",
        choices=("prefill", "decode"),
    )
    enable_torch_compile: bool = option(
        False,
        "Taken from SGLang's command lines, and changes nothing: decode steps are captured as CUDA"
        " graphs with fused kernels anyway.",
    )
    torch_compile_max_bs: int | None = option(
        None,
        "Taken with --enable-torch-compile, and changes nothing; --cuda-graph-max-bs bounds what is"
        " captured.",
    )
    speculative_draft_sampling: str = option(
        "coupled", "Order of drafted children at temperature > 0.", choices=("topk", "coupled")
    )
    speculative_accept_threshold_single: float = option(
        1.0, "LOSSY below 1: accept a drafted token whose target probability reaches this."
    )
    speculative_accept_threshold_acc: float = option(
        1.0, "LOSSY below 1: raise the acceptance of drafted tokens to min(1, P/acc)."
    )
    speculative_ngram_min_match_window_size: int = option(1, "Shortest suffix that is matched.")
    speculative_ngram_max_match_window_size: int | None = option(
        None, "Longest suffix that is matched (12)."
    )
    speculative_ngram_min_bfs_breadth: int = option(1, "Children taken at the deepest level.")
    speculative_ngram_max_bfs_breadth: int = option(10, "Children taken next to the root.")
    speculative_ngram_branch_length: int | None = option(
        None, "Tokens of a window inserted in the trie (18)."
    )
    speculative_ngram_max_trie_depth: int | None = option(
        None, "SGLang's newer name of the window: sets match window and branch length together."
    )
    speculative_ngram_match_type: str = option(
        "BFS", "Expand matches by recency (BFS) or by frequency (PROB).", choices=("BFS", "PROB")
    )
    speculative_ngram_scope: str = option(
        "key",
        "Whose text feeds whose drafts: one request, one API key, or all.",
        choices=("request", "key", "server"),
    )
    speculative_ngram_capacity: int = option(
        10_000_000, "Nodes of the trie at most; the least recently used go first."
    )
    speculative_ngram_override: bool = option(
        False,
        "N-grams over a model's draft: for a sequence and step whose newest text was seen before,"
        " what followed it then is verified in place of the model's proposal.",
    )
    speculative_ngram_override_min_match: int = option(
        4, "Shortest match with which --speculative-ngram-override proposes, in tokens."
    )

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
    def algorithms(self) -> tuple[str, ...]:
        """Returns the algorithms, one for each draft; only NONE where nothing is drafted."""
        return tuple(self.speculative_algorithm.split(","))

    @property
    def traits(self) -> Algorithm:
        """Returns what is declared of the algorithm; for several, what is declared of none."""
        return ALGORITHMS.get(self.speculative_algorithm, ALGORITHMS["NONE"])

    @property
    def ngram_window(self) -> tuple[int, int]:
        """Returns (longest matched suffix, inserted window)."""
        depth = self.speculative_ngram_max_trie_depth
        if depth is not None:
            return depth, depth
        return (
            self.speculative_ngram_max_match_window_size or 12,
            self.speculative_ngram_branch_length or 18,
        )

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


def check_together(algorithms: Sequence[str], model_path: str) -> None:
    """Raises ConfigError for algorithms that cannot draft beside each other, or models that are not
    told apart.
    """
    given = "--speculative-algorithm " + ",".join(algorithms)
    if "NONE" in algorithms:
        raise ConfigError(f"{given}: NONE goes with no other")
    if len(set(algorithms)) < len(algorithms):
        raise ConfigError(f"{given}: each may be given once")
    models = [name for name in algorithms if ALGORITHMS[name].has_model]
    if len(models) > 1 and model_path and not is_by_name(model_path):
        raise ConfigError(
            f"--speculative-draft-model-path {model_path}: {' and '.join(models)} have a model"
            " each; give NAME=PATH for each, with commas between them"
        )


def check_speculation(config: SpeculationConfig) -> None:
    """Raises ConfigError, naming the flags, for a combination that cannot be served."""
    algorithm, traits = config.speculative_algorithm, config.traits
    if traits.needs_files and not config.speculative_draft_model_path:
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path"
        )
    if config.speculative_token_map and not traits.may_map_tokens:
        reason = "its head brings its own map (d2t)" if traits.reads_hidden else "no model drafts"
        raise ConfigError(
            f"--speculative-token-map cannot go with --speculative-algorithm {algorithm}: {reason}"
        )
    if config.enable_multi_layer_eagle and not traits.may_have_modules:
        raise ConfigError(
            f"--enable-multi-layer-eagle is for MTP layers, not --speculative-algorithm {algorithm}"
        )
    if config.enable_multi_layer_eagle and (config.speculative_eagle_topk or 1) > 1:
        raise ConfigError(
            "--enable-multi-layer-eagle drafts chains: --speculative-eagle-topk must be 1"
        )
    quantization = config.speculative_draft_model_quantization
    if quantization == "fp8" and getattr(config, "device", "auto") == "cpu":
        raise ConfigError(
            "--speculative-draft-model-quantization fp8 does not go with --device cpu: a CPU has no"
            " products of 8-bit floats; int8 works"
        )
    if quantization != "unquant" and not traits.has_model:
        raise ConfigError(
            "--speculative-draft-model-quantization has no use with --speculative-algorithm"
            f" {algorithm}: no model drafts"
        )
    if not traits.has_model and config.speculative_draft_model_path:
        raise ConfigError(
            f"--speculative-draft-model-path has no use with --speculative-algorithm {algorithm}"
        )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be in (0, 1], not {getattr(config, name)}"
            )
    unused = {
        "NONE": "nothing is drafted",
        "NGRAM": (
            "--speculative-num-draft-tokens and --speculative-ngram-max-bfs-breadth shape its trees"
        ),
    }
    for name, most in (("speculative_num_steps", 255), ("speculative_eagle_topk", 64)):
        value = getattr(config, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be in [1, {most}], not {value}")
        if value is not None and algorithm in unused:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no use with --speculative-algorithm {algorithm}:"
                f" {unused[algorithm]}"
            )
    tokens = config.speculative_num_draft_tokens
    if tokens is not None and not 2 <= tokens <= 256:
        raise ConfigError(
            f"--speculative-num-draft-tokens must be in [2, 256], the root included, not {tokens}"
        )
    if tokens is not None and algorithm == "NONE":
        raise ConfigError(
            "--speculative-num-draft-tokens has no use with --speculative-algorithm NONE: nothing"
            " is drafted"
        )
    if traits.has_model:
        _check_tree(config)
    if algorithm == "NGRAM" or config.speculative_ngram_override:
        _check_ngram(config)
    _check_override(config)


def _check_tree(config: SpeculationConfig) -> None:
    steps, topk, tokens = (
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
    )
    given = [value is not None for value in (steps, topk, tokens)]
    if any(given) and not given[0]:
        raise ConfigError(
            "--speculative-eagle-topk and --speculative-num-draft-tokens need"
            " --speculative-num-steps beside them"
        )
    if steps is None:
        return
    topk = topk or 1
    candidates = topk + (steps - 1) * topk * topk
    if topk > 1 and tokens is None:
        raise ConfigError("--speculative-eagle-topk above 1 needs --speculative-num-draft-tokens")
    if topk == 1 and tokens is not None and tokens != steps + 1:
        raise ConfigError(
            "with --speculative-eagle-topk 1 the chain has --speculative-num-steps + 1 ="
            f" {steps + 1} rows; --speculative-num-draft-tokens {tokens} does not fit"
        )
    if tokens is not None and tokens - 1 > candidates:
        raise ConfigError(
            f"--speculative-num-draft-tokens {tokens} is more than the {candidates + 1} that "
            f"--speculative-num-steps {steps} and --speculative-eagle-topk {topk} can make"
        )


def _check_override(config: SpeculationConfig) -> None:
    if not config.speculative_ngram_override:
        return
    if not config.traits.has_model:
        raise ConfigError(
            "--speculative-ngram-override has no use with --speculative-algorithm"
            f" {config.speculative_algorithm}: no model drafts"
        )
    longest, _ = config.ngram_window
    if not 1 <= config.speculative_ngram_override_min_match <= longest:
        raise ConfigError(
            "--speculative-ngram-override-min-match must be in [1, the longest match of"
            f" {longest}], not {config.speculative_ngram_override_min_match}"
        )


def _check_ngram(config: SpeculationConfig) -> None:
    depth = config.speculative_ngram_max_trie_depth
    if depth is not None:
        for name in ("speculative_ngram_max_match_window_size", "speculative_ngram_branch_length"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"--speculative-ngram-max-trie-depth and --{name.replace('_', '-')} name the"
                    " same thing: give one"
                )
        if depth < 2:
            raise ConfigError("--speculative-ngram-max-trie-depth must be at least 2")
    window, branch = config.ngram_window
    if not 1 <= config.speculative_ngram_min_match_window_size <= window:
        raise ConfigError(
            "--speculative-ngram-min-match-window-size must be in [1,"
            " --speculative-ngram-max-match-window-size]"
        )
    if branch < 2 or window > 64 or branch > 64:
        raise ConfigError("the n-gram windows must be in [2, 64]")
    if (
        not 1
        <= config.speculative_ngram_min_bfs_breadth
        <= config.speculative_ngram_max_bfs_breadth
    ):
        raise ConfigError(
            "--speculative-ngram-min-bfs-breadth must be in [1,"
            " --speculative-ngram-max-bfs-breadth]"
        )
    if config.speculative_ngram_capacity < 1000:
        raise ConfigError("--speculative-ngram-capacity must be at least 1000 nodes")
