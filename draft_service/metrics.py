"""The draft's metrics."""

from foredraft.telemetry.metrics import STEP_BUCKETS, counter, gauge, histogram

BY_ALGORITHM = ("algorithm",)

SESSIONS = gauge("foredraft_drafter_sessions", "Verifiers attached now.", BY_ALGORITHM)
ATTACHES = counter(
    "foredraft_drafter_attaches_total",
    "Verifiers that asked to attach, by whether they could.",
    ("algorithm", "outcome"),
)
STEPS = counter("foredraft_drafter_steps_total", "Engine steps answered.", BY_ALGORITHM)
DEVICE_STEPS = counter(
    "foredraft_drafter_device_steps_total",
    "Engine steps that stayed on the GPU: their tokens and seconds are in no other figure.",
    BY_ALGORITHM,
)
AHEAD_STEPS = counter(
    "foredraft_drafter_ahead_steps_total",
    "Steps on the GPU whose outcomes were prepared for, by whether it was one of them (hit, miss).",
    ("outcome",),
)
REFUSED_STEPS = counter(
    "foredraft_drafter_refused_steps_total",
    "Steps that broke the protocol; each ended its session.",
    BY_ALGORITHM,
)
EXTENDED_TOKENS = counter(
    "foredraft_drafter_extended_tokens_total", "Committed tokens received.", BY_ALGORITHM
)
PROPOSED_TOKENS = counter(
    "foredraft_drafter_proposed_tokens_total", "Tokens proposed to verifiers.", BY_ALGORITHM
)
STAGE_SECONDS = histogram(
    "foredraft_drafter_stage_seconds",
    "Time in a step: extending the state by committed tokens, drafting trees.",
    STEP_BUCKETS,
    ("algorithm", "stage"),
)
TRIE_NODES = gauge("foredraft_drafter_trie_nodes", "Nodes of all n-gram tries.")
NGRAM_OVERRIDES = counter(
    "foredraft_drafter_ngram_overrides_total",
    "Proposals that n-grams made in a model's place.",
)


class DrafterMetrics:
    """The metrics of one algorithm, labels bound."""

    def __init__(self, algorithm: str) -> None:
        self.sessions = SESSIONS.labels(algorithm)
        self.accepted_attaches = ATTACHES.labels(algorithm, "accepted")
        self.refused_attaches = ATTACHES.labels(algorithm, "refused")
        self.steps = STEPS.labels(algorithm)
        self.device_steps = DEVICE_STEPS.labels(algorithm)
        self.refused_steps = REFUSED_STEPS.labels(algorithm)
        self.extended_tokens = EXTENDED_TOKENS.labels(algorithm)
        self.proposed_tokens = PROPOSED_TOKENS.labels(algorithm)
        self.extend_seconds = STAGE_SECONDS.labels(algorithm, "extend")
        self.draft_seconds = STAGE_SECONDS.labels(algorithm, "draft")
