"""The verifier's metrics.

Drafts, draft tokens and accepted tokens are counted as vLLM counts them.
"""

from collections.abc import Sequence

from prometheus_client import Counter

from foredraft.telemetry.metrics import (
    LENGTH_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    counter,
    gauge,
    histogram,
    observe_many,
)

BY_ALGORITHM = ("algorithm",)
# How long a busy engine keeps counts and levels to itself: a client library's lock for each costs
# more than the rest.
PUBLISH_SECONDS = 0.05

DRAFTS = counter("foredraft_drafts_total", "Draft trees verified.", BY_ALGORITHM)
DRAFT_TOKENS = counter("foredraft_draft_tokens_total", "Drafted tokens verified.", BY_ALGORITHM)
ACCEPTED_TOKENS = counter(
    "foredraft_accepted_tokens_total", "Drafted tokens accepted.", BY_ALGORITHM
)
ACCEPTED_BY_POSITION = counter(
    "foredraft_accepted_tokens_per_position_total",
    "Drafted tokens accepted, by depth in the tree from 0.",
    ("algorithm", "position"),
)
VERIFIES = counter(
    "foredraft_verifies_total",
    "Verifications of one sequence, with or without a tree. Mean accept length is emitted tokens"
    " over these.",
    BY_ALGORITHM,
)
OFF_VERIFIES = counter(
    "foredraft_speculation_off_verifies_total",
    "Of these verifications, those of requests that turned speculation off.",
    BY_ALGORITHM,
)
EMITTED_TOKENS = counter(
    "foredraft_emitted_tokens_total", "Tokens that verifications gave.", BY_ALGORITHM
)
ACCEPT_LENGTH = histogram(
    "foredraft_accept_length_tokens",
    "Tokens that one verification gave, the target's own included.",
    LENGTH_BUCKETS,
    BY_ALGORITHM,
)
LOSSY = counter(
    "foredraft_lossy_verifies_total",
    "Verifications in which a threshold below 1 accepted what the rule did not choose.",
    BY_ALGORITHM,
)
INVALID_NODES = counter(
    "foredraft_draft_invalid_nodes_total", "Drafted nodes that could not be used.", BY_ALGORITHM
)
DRAFT_FAILURES = counter(
    "foredraft_draft_failures_total",
    "Draft steps that failed: late, broken off, or nonsense.",
    BY_ALGORITHM,
)
DRAFT_ATTACHES = counter(
    "foredraft_draft_attaches_total", "Times a draft was attached.", BY_ALGORITHM
)
DRAFT_SEQUENCES = gauge(
    "foredraft_draft_sequences",
    "With several drafts: sequences that a draft was chosen for.",
    BY_ALGORITHM,
)
DRAFT_CHANGES = counter(
    "foredraft_draft_changes_total",
    "With several drafts: times a sequence was given to this draft instead of another.",
    BY_ALGORITHM,
)
MIXED_STEPS = counter(
    "foredraft_mixed_draft_steps_total",
    "Engine steps that verified proposals of more than one draft; no step is started behind them"
    " before their outcome.",
)
DRAFT_AVAILABLE = gauge("foredraft_draft_available", "1 while a draft is attached.", BY_ALGORITHM)
TRANSPORT = gauge(
    "foredraft_draft_transport_info",
    "Drafts that are attached through a transport.",
    ("transport",),
)
ARENA_BYTES = gauge(
    "foredraft_arena_bytes", "Memory shared with drafts for hidden states and steps."
)
SELF_TEST_ACCEPT_LENGTH = gauge(
    "foredraft_draft_self_test_accept_length_tokens",
    "Mean tokens per verification over the built-in prompts when the draft was attached.",
    BY_ALGORITHM,
)
DRAFT_SECONDS = histogram("foredraft_draft_seconds", "A draft's own time in a step.", STEP_BUCKETS)
DRAFTS_AHEAD = counter(
    "foredraft_drafts_ahead_total",
    "Steps that waited for no proposals: what a draft was asked for before, while the target"
    " computed, went far enough.",
)
DRAFT_WAIT_SECONDS = histogram(
    "foredraft_draft_wait_seconds", "Scheduling and the wait for the draft in a step.", STEP_BUCKETS
)
FORWARD_SECONDS = histogram(
    "foredraft_target_forward_seconds",
    "The target's forward in a step that is not overlapped: with the choice of tokens where a"
    " decode step is captured, until it was started where a GPU computes prompts.",
    STEP_BUCKETS,
)
VERIFY_SECONDS = histogram(
    "foredraft_verify_seconds",
    "Choosing tokens, walking trees and committing in a step that is not overlapped, and the wait"
    " for a forward that was only started.",
    STEP_BUCKETS,
)
SHARED_KEY_STEPS = counter(
    "foredraft_shared_key_steps_total",
    "Engine steps that read the keys of a common beginning once for several sequences.",
)
STEP_SECONDS = histogram("foredraft_step_seconds", "A whole engine step.", STEP_BUCKETS)
RANK_SECONDS = counter(
    "foredraft_rank_seconds_total",
    "With several ranks: seconds of each by part: products (all that it computes itself),"
    " all_reduce (collectives, from when the last rank of its host begins), waiting (for that"
    " rank). GPUs that reach each other's memory count by their own timer, in forwards up to the"
    " newest: all_reduce from when a rank has sent its numbers until all have come, so with the"
    " wait; products is the rest from the embedding to the logits. NCCL's sums are not counted.",
    ("rank", "part"),
)
OVERLAPPED_STEPS = counter(
    "foredraft_overlapped_steps_total",
    "Engine steps behind which the next one was started before their outcome was known.",
)
DRAINED_STEPS = counter(
    "foredraft_drained_steps_total",
    "Engine steps that could be overlapped, but whose outcome had to be known before the next one"
    " was started, by why.",
    ("reason",),
)
LATE_MASKS = counter(
    "foredraft_late_grammar_masks_total",
    "Verifications of one sequence for which the host made a grammar's masks while the forward of"
    " their step ran.",
)
AWAITED_MASKS = counter(
    "foredraft_awaited_grammar_steps_total",
    "Engine steps whose forward was over before the masks of their grammars were made: the GPU"
    " waited.",
)
SLOW_GRAMMARS = counter(
    "foredraft_slow_grammar_verifications_total",
    "Verifications of one sequence without its draft tree, as its grammar takes too long to follow"
    " through one.",
)
QUEUE_SECONDS = histogram(
    "foredraft_queue_seconds", "From submission to admission.", REQUEST_BUCKETS
)
PROMPT_TOKENS = counter("foredraft_prompt_tokens_total", "Prompt tokens of admitted requests.")
CACHED_TOKENS = counter(
    "foredraft_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache."
)
GENERATION_TOKENS = counter("foredraft_generation_tokens_total", "Output tokens.")
REQUESTS = counter("foredraft_verifier_requests_total", "Requests that ended.", ("outcome",))
BROKEN_LOGITS = counter(
    "foredraft_broken_logits_total",
    "Requests that ended with an error because the target's logits were NaN or infinite.",
)
PREEMPTIONS = counter(
    "foredraft_preemptions_total", "Times a sequence gave its pages back to resume later."
)
GRAMMAR_COMPILE_SECONDS = histogram(
    "foredraft_grammar_compile_seconds",
    "From a grammar that is not cached to one that can be followed.",
    REQUEST_BUCKETS,
)
GRAMMAR_CACHE_HITS = counter(
    "foredraft_grammar_cache_hits_total", "Requests whose grammar was compiled already."
)
GRAMMARS_REFUSED = counter(
    "foredraft_grammars_refused_total",
    "Grammars that are wrong (invalid) or take too much to compile (bound).",
    ("why",),
)
RUNNING = gauge("foredraft_running_sequences", "Sequences in the batch.")
WAITING = gauge("foredraft_queue_depth", "Requests waiting in the verifier.")
PAGES_USED = gauge("foredraft_kv_pages_used", "KV pages held by running sequences.")
PAGES_CACHED = gauge("foredraft_kv_pages_cached", "KV pages that only the prefix cache holds.")
PAGES = gauge("foredraft_kv_pages", "KV pages in the pool.")


class SpeculationMetrics:
    """The metrics of one algorithm, with their label filled in.

    Attributes:
        algorithm: The label.
    """

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self.invalid_nodes = INVALID_NODES.labels(algorithm)
        self.failures = DRAFT_FAILURES.labels(algorithm)
        self.attaches = DRAFT_ATTACHES.labels(algorithm)
        self.available = DRAFT_AVAILABLE.labels(algorithm)
        self.sequences = DRAFT_SEQUENCES.labels(algorithm)
        self.changes = DRAFT_CHANGES.labels(algorithm)
        self.self_test_accept_length = SELF_TEST_ACCEPT_LENGTH.labels(algorithm)
        self._drafts = DRAFTS.labels(algorithm)
        self._draft_tokens = DRAFT_TOKENS.labels(algorithm)
        self._accepted_tokens = ACCEPTED_TOKENS.labels(algorithm)
        self._verifies = VERIFIES.labels(algorithm)
        self._off_verifies = OFF_VERIFIES.labels(algorithm)
        self._emitted = EMITTED_TOKENS.labels(algorithm)
        self._accept_length = ACCEPT_LENGTH.labels(algorithm)
        self._lossy = LOSSY.labels(algorithm)
        self._by_position: list[Counter] = []
        # Not published yet: verifications by accepted tokens, and sums.
        self._by_accepted: list[int] = []
        self._num_trees = self._num_nodes = self._num_lossy = self._num_generated = 0
        self._num_off = 0

    def of(self, draft: str) -> "SpeculationMetrics":
        """Returns the metrics of a draft by name: these, since there is one draft."""
        return self

    def verified(self, num_nodes: int, num_accepted: int, is_lossy: bool) -> None:
        """Notes one verification of one sequence."""
        counts = self._by_accepted
        if num_accepted >= len(counts):
            counts.extend([0] * (num_accepted + 1 - len(counts)))
        counts[num_accepted] += 1
        if num_nodes:
            self._num_trees += 1
            self._num_nodes += num_nodes
        self._num_lossy += is_lossy

    def turned_off(self, num_verifies: int) -> None:
        """Notes a number of verifications of requests that turned speculation off."""
        self._num_off += num_verifies

    def decoded(self, num_tokens: int) -> None:
        """Notes a number of verifications without a tree: each gave a token of another sequence."""
        if num_tokens:
            if not self._by_accepted:
                self._by_accepted.append(0)
            self._by_accepted[0] += num_tokens
            self._num_generated += num_tokens

    def generated(self, num_tokens: int) -> None:
        """Notes output tokens of one sequence."""
        self._num_generated += num_tokens

    def flush(self) -> None:
        """Adds the noted numbers to the metrics."""
        if self._num_generated:
            GENERATION_TOKENS.inc(self._num_generated)
            self._num_generated = 0
        by_accepted, self._by_accepted = self._by_accepted, []
        if not by_accepted:
            return
        num_verified = sum(by_accepted)
        num_accepted = 0
        for accepted, count in enumerate(by_accepted):
            if count:
                num_accepted += accepted * count
                observe_many(self._accept_length, accepted + 1, count)
        self._verifies.inc(num_verified)
        self._emitted.inc(num_accepted + num_verified)
        if self._num_off:
            self._off_verifies.inc(self._num_off)
        if self._num_lossy:
            self._lossy.inc(self._num_lossy)
        if self._num_trees:
            self._drafts.inc(self._num_trees)
            self._draft_tokens.inc(self._num_nodes)
            self._accepted_tokens.inc(num_accepted)
            self._publish_positions(by_accepted)
        self._num_trees = self._num_nodes = self._num_lossy = self._num_off = 0

    def _publish_positions(self, by_accepted: list[int]) -> None:
        while len(self._by_position) < len(by_accepted) - 1:
            position = str(len(self._by_position))
            self._by_position.append(ACCEPTED_BY_POSITION.labels(self.algorithm, position))
        deeper = 0
        for depth in range(len(by_accepted) - 1, 0, -1):
            deeper += by_accepted[depth]
            self._by_position[depth - 1].inc(deeper)


class SeveralMetrics:
    """The metrics of several drafts."""

    def __init__(self, algorithms: Sequence[str]) -> None:
        self._each = {name: SpeculationMetrics(name) for name in algorithms}
        self._first = self._each[algorithms[0]]

    def of(self, draft: str) -> SpeculationMetrics:
        """Returns the metrics of a draft by name."""
        return self._each[draft]

    def generated(self, num_tokens: int) -> None:
        """Notes output tokens of one sequence."""
        self._first.generated(num_tokens)

    def flush(self) -> None:
        """Adds the noted numbers to the metrics."""
        for one in self._each.values():
            one.flush()


AnyMetrics = SpeculationMetrics | SeveralMetrics


def speculation_metrics(algorithms: Sequence[str]) -> AnyMetrics:
    """Creates the metrics of one draft or of several."""
    if len(algorithms) > 1:
        return SeveralMetrics(algorithms)
    return SpeculationMetrics(algorithms[0])
