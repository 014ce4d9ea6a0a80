"""The verifier's metrics. Drafts, draft tokens and accepted tokens are counted as vLLM counts them."""

import collections

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
    "Verifications of one sequence, with or without a tree. Mean accept length is emitted tokens over these.",
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
DRAFT_AVAILABLE = gauge("foredraft_draft_available", "1 while a draft is attached.", BY_ALGORITHM)
TRANSPORT = gauge(
    "foredraft_draft_transport_info", "1 for the transport of hidden states in use.", ("transport",)
)
ARENA_BYTES = gauge("foredraft_arena_bytes", "Memory shared with the draft for hidden states.")
SELF_TEST_ACCEPT_LENGTH = gauge(
    "foredraft_draft_self_test_accept_length_tokens",
    "Mean tokens per verification over the built-in prompts when the draft was attached.",
    BY_ALGORITHM,
)
DRAFT_SECONDS = histogram("foredraft_draft_seconds", "A draft's own time in a step.", STEP_BUCKETS)
DRAFT_WAIT_SECONDS = histogram(
    "foredraft_draft_wait_seconds", "Scheduling and the wait for the draft in a step.", STEP_BUCKETS
)
FORWARD_SECONDS = histogram(
    "foredraft_target_forward_seconds", "The target's forward in a step.", STEP_BUCKETS
)
VERIFY_SECONDS = histogram(
    "foredraft_verify_seconds",
    "Choosing tokens, walking trees and committing in a step.",
    STEP_BUCKETS,
)
STEP_SECONDS = histogram("foredraft_step_seconds", "A whole engine step.", STEP_BUCKETS)
QUEUE_SECONDS = histogram(
    "foredraft_queue_seconds", "From submission to admission.", REQUEST_BUCKETS
)
PROMPT_TOKENS = counter("foredraft_prompt_tokens_total", "Prompt tokens of admitted requests.")
CACHED_TOKENS = counter(
    "foredraft_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache."
)
GENERATION_TOKENS = counter("foredraft_generation_tokens_total", "Output tokens.")
REQUESTS = counter("foredraft_verifier_requests_total", "Requests that ended.", ("outcome",))
PREEMPTIONS = counter(
    "foredraft_preemptions_total", "Times a sequence gave its pages back to resume later."
)
RUNNING = gauge("foredraft_running_sequences", "Sequences in the batch.")
WAITING = gauge("foredraft_queue_depth", "Requests waiting in the verifier.")
PAGES_USED = gauge("foredraft_kv_pages_used", "KV pages held by running sequences.")
PAGES_CACHED = gauge("foredraft_kv_pages_cached", "KV pages that only the prefix cache holds.")
PAGES = gauge("foredraft_kv_pages", "KV pages in the pool.")


class SpeculationMetrics:
    """The metrics of one algorithm, with their label filled in."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self.invalid_nodes = INVALID_NODES.labels(algorithm)
        self.failures = DRAFT_FAILURES.labels(algorithm)
        self.attaches = DRAFT_ATTACHES.labels(algorithm)
        self.available = DRAFT_AVAILABLE.labels(algorithm)
        self.self_test_accept_length = SELF_TEST_ACCEPT_LENGTH.labels(algorithm)
        self._drafts = DRAFTS.labels(algorithm)
        self._draft_tokens = DRAFT_TOKENS.labels(algorithm)
        self._accepted_tokens = ACCEPTED_TOKENS.labels(algorithm)
        self._verifies = VERIFIES.labels(algorithm)
        self._emitted = EMITTED_TOKENS.labels(algorithm)
        self._accept_length = ACCEPT_LENGTH.labels(algorithm)
        self._lossy = LOSSY.labels(algorithm)
        self._by_position: list[Counter] = []
        self._pending: list[tuple[int, int]] = []
        self._num_lossy = self._num_generated = 0

    def verified(self, num_nodes: int, num_accepted: int, is_lossy: bool) -> None:
        """Notes one verification of one sequence."""
        self._pending.append((num_nodes, num_accepted))
        self._num_lossy += is_lossy

    def generated(self, num_tokens: int) -> None:
        """Notes output tokens of one sequence."""
        self._num_generated += num_tokens

    def flush(self) -> None:
        """Counts what was noted. Once a step: a counter's lock for every sequence would take longer than the rest."""
        if self._num_generated:
            GENERATION_TOKENS.inc(self._num_generated)
            self._num_generated = 0
        pending, self._pending = self._pending, []
        if not pending:
            return
        by_length = collections.Counter(num_accepted for _, num_accepted in pending)
        num_accepted = sum(accepted * count for accepted, count in by_length.items())
        self._verifies.inc(len(pending))
        self._emitted.inc(num_accepted + len(pending))
        for accepted, count in by_length.items():
            observe_many(self._accept_length, accepted + 1, count)
        if self._num_lossy:
            self._lossy.inc(self._num_lossy)
            self._num_lossy = 0
        nodes = [num_nodes for num_nodes, _ in pending if num_nodes]
        if not nodes:
            return
        self._drafts.inc(len(nodes))
        self._draft_tokens.inc(sum(nodes))
        self._accepted_tokens.inc(num_accepted)
        while len(self._by_position) < max(by_length):
            position = str(len(self._by_position))
            self._by_position.append(ACCEPTED_BY_POSITION.labels(self._algorithm, position))
        deeper = 0
        for depth in range(max(by_length), 0, -1):
            deeper += by_length[depth]
            self._by_position[depth - 1].inc(deeper)
