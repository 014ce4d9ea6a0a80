"""The gateway's metrics: requests by outcome, client-side latencies, tokens, requests in flight."""

from foredraft.telemetry import metrics

requests = metrics.counter(
    "foredraft_gateway_requests_total",
    "Continuations by how they ended: stop, length, abort, cancelled, or the kind of error.",
    ["outcome"],
)
http_answers = metrics.counter(
    "foredraft_gateway_http_answers_total",
    "Answers over HTTP by status, those to probes and for pages among them.",
    ["status"],
)
encoding_kills = metrics.counter(
    "foredraft_gateway_encoding_kills_total",
    "Encoding processes ended because a prompt took too much of what is named, or failed.",
    ["why"],
)
key_tokens = metrics.counter(
    "foredraft_gateway_key_tokens_total",
    "Tokens of each API key: of prompts, and of outputs.",
    ["key", "kind"],
)
refused = metrics.counter(
    "foredraft_gateway_refused_requests_total",
    "Requests refused at the gate, and connections: no known key, or over the limit that is named,"
    " and whose key it was.",
    ["limit", "key"],
)
connections = metrics.gauge("foredraft_gateway_connections", "Open connections of HTTP clients.")
evicted = metrics.counter(
    "foredraft_gateway_evicted_connections_total",
    "Connections that sent nothing, or no whole request, and were closed to make room for others.",
)
first_token_seconds = metrics.histogram(
    "foredraft_gateway_time_to_first_token_seconds",
    "From the arrival of a request to its first token.",
    metrics.REQUEST_BUCKETS,
)
inter_token_seconds = metrics.histogram(
    "foredraft_gateway_inter_token_latency_seconds",
    "Between tokens of a continuation; n tokens that come together count as n times an n-th of the"
    " gap.",
    metrics.TOKEN_BUCKETS,
)
end_to_end_seconds = metrics.histogram(
    "foredraft_gateway_end_to_end_seconds",
    "From the arrival of a request to the end of a continuation.",
    metrics.REQUEST_BUCKETS,
)
prompt_tokens = metrics.counter(
    "foredraft_gateway_prompt_tokens_total", "Prompt tokens of ended continuations."
)
cached_tokens = metrics.counter(
    "foredraft_gateway_cached_tokens_total", "Of these, found in the prefix cache."
)
output_tokens = metrics.counter(
    "foredraft_gateway_output_tokens_total", "Output tokens up to where each continuation stopped."
)
running_requests = metrics.gauge(
    "foredraft_gateway_running_requests", "Continuations that have got their first token."
)
queued_requests = metrics.gauge(
    "foredraft_gateway_queued_requests", "Continuations that wait for their first token."
)
retries = metrics.counter(
    "foredraft_gateway_retries_total", "Continuations started again because a verifier was lost."
)
routed = metrics.counter(
    "foredraft_gateway_routed_requests_total",
    "Requests by why they went where, with several verifiers: prefix (its beginning is cached"
    " there), load (nowhere; the least busy one), busy (the one that has more of it is much"
    " busier).",
    ["reason"],
)
stored_responses = metrics.gauge(
    "foredraft_gateway_stored_responses",
    "Responses kept for previous_response_id and GET /v1/responses.",
)
stored_response_bytes = metrics.gauge(
    "foredraft_gateway_stored_response_bytes", "Bytes that they take."
)
verifiers = metrics.gauge("foredraft_gateway_verifiers", "Verifiers that can be used now.")
# The endpoint picker of Kubernetes' inference extension chooses by these two.
waiting_requests = metrics.gauge(
    "foredraft_gateway_waiting_requests",
    "Requests waiting in the verifiers, as they said last.",
)
kv_usage = metrics.gauge(
    "foredraft_gateway_kv_usage_ratio",
    "Part of the verifiers' KV pages that running requests hold, as they said last.",
)
