"""Refuses flags of speculation that cannot be served together, and names them."""

from collections.abc import Sequence

from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.by_name import is_by_name
from foredraft.config.options import flag_of
from foredraft.config.speculation_flags import SpeculationFlags
from foredraft.errors import ConfigError

# Drafting ahead needs KV for each level of each outcome, in every slot: with 8 levels for 224
# tokens, with 32 for 3,200.
MOST_STEPS_AHEAD = 8


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


def check_transport(required: str, on_cpu: bool) -> None:
    """Raises ConfigError for a --require-transport that no draft of this target can have."""
    if required == "cuda_ipc" and on_cpu:
        raise ConfigError(
            "--require-transport cuda_ipc: the target runs on a CPU, so there is no memory of a"
            " GPU to share; leave the flag out, or take shm"
        )


def check_speculation(config: SpeculationFlags) -> None:
    """Raises ConfigError, naming the flags, for a combination that cannot be served."""
    _check_model(config)
    _check_weights(config)
    _check_thresholds(config)
    _check_sizes(config)
    if not config.traits.why_no_steps:
        _check_tree(config)
    if config.speculative_algorithm == "NGRAM" or config.speculative_ngram_override:
        _check_ngram(config)
    _check_override(config)
    _check_ahead(config)


def _check_model(config: SpeculationFlags) -> None:
    """Checks the flags that say what kind of model drafts."""
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


def _check_weights(config: SpeculationFlags) -> None:
    """Checks the flags that say where weights come from, and their form."""
    algorithm, traits = config.speculative_algorithm, config.traits
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


def _check_thresholds(config: SpeculationFlags) -> None:
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"{flag_of(name)} must be in (0, 1], not {getattr(config, name)}")


def _check_sizes(config: SpeculationFlags) -> None:
    """Checks the sizes of trees, each by itself; `_check_tree` checks that they go together."""
    algorithm, why_not = config.speculative_algorithm, config.traits.why_no_steps
    for name, most in (("speculative_num_steps", 255), ("speculative_eagle_topk", 64)):
        value = getattr(config, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{flag_of(name)} must be in [1, {most}], not {value}")
        if value is not None and why_not:
            raise ConfigError(
                f"{flag_of(name)} has no use with --speculative-algorithm {algorithm}: {why_not}"
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


def _check_tree(config: SpeculationFlags) -> None:
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


def _check_override(config: SpeculationFlags) -> None:
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


def _check_ahead(config: SpeculationFlags) -> None:
    """Checks that a draft can follow outcomes that are not verified yet."""
    if config.speculative_draft_ahead and (reason := why_not_ahead(config)):
        raise ConfigError(f"--speculative-draft-ahead {reason}")


def why_not_ahead(config: SpeculationFlags) -> str:
    """Returns why a draft cannot follow outcomes that are not verified yet; empty if it can."""
    if not config.traits.has_model or config.traits.reads_hidden:
        return (
            "is for STANDALONE, which reads tokens alone, not --speculative-algorithm"
            f" {config.speculative_algorithm}"
        )
    if (config.speculative_eagle_topk or 1) > 1:
        return "drafts chains: --speculative-eagle-topk must be 1"
    if (config.speculative_num_steps or 0) > MOST_STEPS_AHEAD:
        return f"drafts chains of at most {MOST_STEPS_AHEAD} tokens: lower --speculative-num-steps"
    if config.speculative_ngram_override:
        return "does not go with --speculative-ngram-override, whose steps go through the host"
    return ""


def _check_ngram(config: SpeculationFlags) -> None:
    depth = config.speculative_ngram_max_trie_depth
    if depth is not None:
        for name in ("speculative_ngram_max_match_window_size", "speculative_ngram_branch_length"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"--speculative-ngram-max-trie-depth and {flag_of(name)} name the"
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
    least, most = config.speculative_ngram_min_bfs_breadth, config.speculative_ngram_max_bfs_breadth
    if not 1 <= least <= most <= 256:
        raise ConfigError(
            "--speculative-ngram-min-bfs-breadth must be in [1,"
            " --speculative-ngram-max-bfs-breadth], which must be at most 256"
        )
    if not 1000 <= config.speculative_ngram_capacity < 2**31:
        raise ConfigError("--speculative-ngram-capacity must be in [1000, 2147483647] nodes")
