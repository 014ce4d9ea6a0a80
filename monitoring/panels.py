"""Panels of the two Grafana dashboards, with their queries.

`generate.py` turns them into Grafana's JSON.
"""

from dataclasses import dataclass

# `{@}` in a query stands for the selection of the dashboard's namespaces.
SELECTOR = 'namespace=~"$namespace"'


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and what its series are called, in Grafana's `{{label}}` form."""

    expr: str
    legend: str

    @property
    def promql(self) -> str:
        """The expression as Grafana takes it."""
        return self.expr.replace("@", SELECTOR)

    def concrete(self, interval: str, namespace: str = ".*") -> str:
        """The expression with Grafana's variables filled in, for Prometheus itself."""
        return self.promql.replace("$__rate_interval", interval).replace("$namespace", namespace)


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph.

    Attributes:
        title: Above the graph.
        queries: Its series.
        unit: Grafana's name of the unit.
        help: What the graph tells, and what is good.
        kind: Grafana's type: timeseries, stat or heatmap.
    """

    title: str
    queries: tuple[Query, ...]
    unit: str
    help: str
    kind: str = "timeseries"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of graphs. `name` is the file's and, with a prefix, Grafana's uid."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def _quantiles(histogram: str) -> tuple[Query, ...]:
    rate = f"sum by (le) (rate({histogram}_bucket{{@}}[$__rate_interval]))"
    return tuple(
        Query(f"histogram_quantile({part}, {rate})", f"p{round(part * 100)}")
        for part in (0.5, 0.9, 0.99)
    )


def _mean(histogram: str, legend: str) -> Query:
    rates = (f"sum(rate({histogram}_{part}{{@}}[$__rate_interval]))" for part in ("sum", "count"))
    return Query(" / ".join(rates), legend)


def _ratio(above: str, below: str, labels: str, legend: str) -> Query:
    rates = (f"sum by ({labels}) (rate({name}{{@}}[$__rate_interval]))" for name in (above, below))
    return Query(" / ".join(rates), legend)


def _rate(counter: str, legend: str, labels: str = "") -> Query:
    by = f" by ({labels}) " if labels else ""
    return Query(f"sum{by}(rate({counter}{{@}}[$__rate_interval]))", legend)


def _above_zero(query: Query) -> Query:
    return Query(f"{query.expr} > 0", query.legend)


SERVICE = Dashboard(
    "service",
    "Foredraft: service",
    (
        Panel(
            "Requests",
            (
                # Most kinds of errors never come.
                _above_zero(_rate("foredraft_gateway_requests_total", "{{outcome}}", "outcome")),
            ),
            "reqps",
            "Continuations per second by how they ended. stop and length are good.",
        ),
        Panel(
            "Tokens",
            (
                _rate("foredraft_generation_tokens_total", "generated"),
                _rate("foredraft_prompt_tokens_total", "prompt"),
            ),
            "short",
            "Tokens per second, over all verifiers.",
        ),
        Panel(
            "Time to first token",
            _quantiles("foredraft_gateway_time_to_first_token_seconds"),
            "s",
            "From a request's arrival at the gateway. Grows with prompts, and when the queue does.",
        ),
        Panel(
            "Between tokens",
            _quantiles("foredraft_gateway_inter_token_latency_seconds"),
            "s",
            "Tokens that come together share the gap before them.",
        ),
        Panel(
            "Whole requests",
            _quantiles("foredraft_gateway_end_to_end_seconds"),
            "s",
            "From arrival to the end of a continuation.",
        ),
        Panel(
            "Queue and batch",
            (
                Query("sum(foredraft_queue_depth{@})", "waiting"),
                Query("sum(foredraft_running_sequences{@})", "running"),
            ),
            "short",
            "Requests that wait in the verifiers, and sequences in their batches.",
        ),
        Panel(
            "Wait for admission",
            _quantiles("foredraft_queue_seconds"),
            "s",
            "From submission to a verifier to admission into its batch.",
        ),
        Panel(
            "KV pages",
            (
                Query(
                    "sum(foredraft_kv_pages_used{@}) / sum(foredraft_kv_pages{@})",
                    "held by requests",
                ),
                Query(
                    "sum(foredraft_kv_pages_cached{@}) / sum(foredraft_kv_pages{@})",
                    "cached prefixes",
                ),
            ),
            "percentunit",
            "Cached pages give way to requests; held ones only when a sequence is preempted.",
        ),
        Panel(
            "Prefix cache hits",
            (
                Query(
                    "sum(rate(foredraft_prefix_cache_hit_tokens_total{@}[$__rate_interval]))"
                    " / sum(rate(foredraft_prompt_tokens_total{@}[$__rate_interval]))",
                    "part of prompt tokens",
                ),
            ),
            "percentunit",
            "Prompt tokens that were not computed again.",
        ),
        Panel(
            "Trouble",
            (
                _rate("foredraft_gateway_retries_total", "retries"),
                _rate("foredraft_preemptions_total", "preemptions"),
                Query('count(ALERTS{alertname=~"Foredraft.*", alertstate="firing"})', "alerts"),
            ),
            "short",
            "Requests started again because a verifier was lost, sequences that gave pages back,"
            " firing alerts.",
        ),
        Panel(
            "Memory",
            (
                Query(
                    'process_resident_memory_bytes{@, job=~".*foredraft.*"}',
                    "{{job}} {{instance}}",
                ),
            ),
            "bytes",
            "Resident memory of each process. Flat once the caches are full.",
        ),
        Panel(
            "CPU",
            (
                Query(
                    'rate(process_cpu_seconds_total{@, job=~".*foredraft.*"}[$__rate_interval])',
                    "{{job}} {{instance}}",
                ),
            ),
            "short",
            "Cores in use by each process.",
        ),
    ),
)

SPECULATION = Dashboard(
    "speculation",
    "Foredraft: speculation",
    (
        Panel(
            "Accept length",
            (
                _ratio(
                    "foredraft_emitted_tokens_total",
                    "foredraft_verifies_total",
                    "algorithm",
                    "{{algorithm}}",
                ),
                Query(
                    "foredraft_draft_self_test_accept_length_tokens{@} > 0",
                    "{{algorithm}} when attached",
                ),
            ),
            "short",
            "Tokens per pass of the target and sequence; 1 is plain decoding. The self-test's, once"
            " it ran, beside it.",
        ),
        Panel(
            "Accepted part",
            (
                _ratio(
                    "foredraft_accepted_tokens_total",
                    "foredraft_draft_tokens_total",
                    "algorithm",
                    "{{algorithm}}",
                ),
            ),
            "percentunit",
            "Accepted of the drafted tokens. Trees draft more than can be accepted, so compare"
            " chains with chains.",
        ),
        Panel(
            "Accepted by depth",
            (
                Query(
                    "sum by (algorithm, position)"
                    " (rate(foredraft_accepted_tokens_per_position_total{@}[$__rate_interval]))"
                    " / on (algorithm) group_left sum by (algorithm)"
                    " (rate(foredraft_drafts_total{@}[$__rate_interval]))",
                    "{{algorithm}} {{position}}",
                ),
            ),
            "percentunit",
            "Trees whose path was accepted down to this depth. Where it nears 0, steps are wasted.",
        ),
        Panel(
            "Accept lengths",
            (
                Query(
                    "sum by (le)"
                    " (increase(foredraft_accept_length_tokens_bucket{@}[$__rate_interval]))",
                    "{{le}}",
                ),
            ),
            "short",
            "Distribution of tokens per verification.",
            kind="heatmap",
        ),
        Panel(
            "Drafted",
            (
                Query(
                    "sum(rate(foredraft_draft_tokens_total{@}[$__rate_interval]))"
                    " / sum(rate(foredraft_verifies_total{@}[$__rate_interval]))",
                    "tokens per verification",
                ),
                Query(
                    "sum(rate(foredraft_drafts_total{@}[$__rate_interval]))"
                    " / sum(rate(foredraft_verifies_total{@}[$__rate_interval]))",
                    "part of verifications with a tree",
                ),
            ),
            "short",
            "Drafting stops by itself where it does not pay, so both fall under a full batch.",
        ),
        Panel(
            "Speculation turned off by requests",
            (
                _ratio(
                    "foredraft_speculation_off_verifies_total",
                    "foredraft_verifies_total",
                    "algorithm",
                    "{{algorithm}}",
                ),
            ),
            "percentunit",
            "Part of verifications whose request asked for plain decoding; these lower the accept"
            " length, not the draft.",
        ),
        Panel(
            "Draft tokens",
            (
                _rate("foredraft_draft_tokens_total", "drafted {{algorithm}}", "algorithm"),
                _rate("foredraft_accepted_tokens_total", "accepted {{algorithm}}", "algorithm"),
            ),
            "short",
            "Per second, over all verifiers.",
        ),
        Panel(
            "Draft available",
            (
                Query("sum(foredraft_draft_available{@})", "attached"),
                Query("count(foredraft_draft_available{@})", "verifiers"),
            ),
            "short",
            "Verifiers that have their draft. Below the number of verifiers, some decode plainly.",
        ),
        Panel(
            "Draft failures",
            (
                _rate("foredraft_draft_failures_total", "failed steps"),
                _rate("foredraft_draft_invalid_nodes_total", "invalid nodes"),
                _rate("foredraft_draft_attaches_total", "attaches"),
            ),
            "short",
            "Per second. Attaches while nothing is deployed are restarts.",
        ),
        Panel(
            "A step of the engine",
            (
                _mean("foredraft_draft_wait_seconds", "schedule and wait for the draft"),
                _mean("foredraft_target_forward_seconds", "target forward"),
                _mean("foredraft_verify_seconds", "verify and commit"),
                _mean("foredraft_step_seconds", "whole step"),
            ),
            "s",
            "Mean seconds of each part. Drafting pays while its wait is small against the forward.",
        ),
        Panel(
            "Ranks in a step",
            (
                Query(
                    "sum by (rank, part) (rate(foredraft_rank_seconds_total{@}[$__rate_interval]))"
                    " / scalar(sum(rate(foredraft_step_seconds_count{@}[$__rate_interval])))",
                    "rank {{rank}} {{part}}",
                ),
            ),
            "s",
            "What a step takes each rank. The slowest waits least; on GPUs all_reduce includes the"
            " wait.",
        ),
        Panel(
            "Step, tail",
            (
                *_quantiles("foredraft_step_seconds")[-1:],
                Query(
                    _quantiles("foredraft_draft_wait_seconds")[-1].expr,
                    "p99 of the wait for the draft",
                ),
            ),
            "s",
            "A tail near --draft-step-timeout means that drafts hang.",
        ),
        Panel(
            "In the draft",
            (
                Query(
                    "sum by (stage)"
                    " (rate(foredraft_drafter_stage_seconds_sum{@}[$__rate_interval])) / sum by"
                    " (stage) (rate(foredraft_drafter_stage_seconds_count{@}[$__rate_interval]))",
                    "{{stage}}",
                ),
            ),
            "s",
            "Mean seconds a step: taking committed tokens in, drafting trees.",
        ),
        Panel(
            "Trie",
            (Query("sum(foredraft_drafter_trie_nodes{@})", "nodes"),),
            "short",
            "Nodes of the n-gram tries; at most --speculative-ngram-capacity.",
        ),
    ),
)

DASHBOARDS = (SERVICE, SPECULATION)
