"""The configuration of each service. Flags carry SGLang's names where SGLang has them."""

import re
from dataclasses import dataclass

from foredraft.config.common import LogConfig, MetricsConfig, ServiceTlsConfig, TargetConfig
from foredraft.config.options import option
from foredraft.config.quantization import QuantizationConfig
from foredraft.config.ranks import RanksConfig
from foredraft.config.speculation import SpeculationConfig
from foredraft.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@A-Z]+")
_MOST_MB = 10**9  # as bytes they fit the 64 bits of a process's limits
MAX_KEY_LIMIT = 10**12  # floats hold it exactly
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(
    LogConfig,
    MetricsConfig,
    ServiceTlsConfig,
    TargetConfig,
    SpeculationConfig,
    RanksConfig,
    QuantizationConfig,
):
    """The verifier."""

    listen: str = option(
        "127.0.0.1:50052", "Address of the verifier's gRPC: host:port or unix:/path.", internal=True
    )
    draft: tuple[str, ...] = option(
        (),
        "Address of the draft service; none when empty. With several algorithms NAME=ADDRESS for"
        " each of them.",
        internal=True,
    )
    context_length: int | None = option(
        None, "Longest sequence in tokens, with its output; the model's when absent.", least=2
    )
    page_size: int | None = option(
        None, "Tokens per KV page; 16 on a GPU, 32 on the CPU when absent.", least=1
    )
    mem_fraction_static: float | None = option(
        None,
        "Part of the memory: of a GPU's, for weights, KV and steps of target and draft (0.85); of a"
        " CPU's, as it is after loading, for KV (0.4).",
        aliases=("--mem-fraction",),
        least=0.01,
        most=1,
    )
    max_total_tokens: int | None = option(
        None, "Tokens in the KV pool, instead of a memory fraction.", least=2
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of the target's keys and values in the cache; auto is that of the weights. fp8_e4m3"
        " and fp8_e5m2 hold twice as many tokens as 16 bits, rounded, with the scales of the"
        " checkpoint where it has any.",
        choices=KV_CACHE_DTYPES,
    )
    quantization_param_path: str = option(
        "",
        "JSON file with a scale for each layer's keys and values, for --kv-cache-dtype fp8_e4m3 or"
        " fp8_e5m2, instead of the checkpoint's.",
    )
    exactness: str = option(
        "strict",
        "On a GPU in 16 bits: strict computes every row in one order of its own, so that no text"
        " depends on drafts, batches, chunks or cached prefixes; off takes the fastest kernels, and"
        " texts may part where two tokens are nearly equal.",
        choices=("strict", "off"),
    )
    attention_backend: str = option(
        "auto",
        "What computes the target's attention. auto is our C code on a CPU, and triton on a GPU"
        " with a kernel of its own for prompts on Hopper cards, which triton leaves out. flashinfer"
        " computes prompts on a GPU, with --exactness off and compiled kernels, where auto takes"
        " it; sdpa is PyTorch's on a CPU.",
        choices=("auto", "flashinfer", "triton", "sdpa"),
    )
    max_running_requests: int = option(48, "Sequences in a batch at most.", least=1)
    max_queued_requests: int = option(
        512, "Requests that may wait; more are refused with RESOURCE_EXHAUSTED.", least=1
    )
    chunked_prefill_size: int | None = option(
        None,
        "Prompt tokens computed per step at most, over all requests; when absent, 8,192 on a GPU of"
        " 60 GiB or more, 4,096 from 35 GiB on, 2,048 below, 512 on a CPU. On a GPU rows of running"
        " streams count too. Fewer let these wait less for prompts, and prompts wait longer.",
        least=1,
    )
    max_decode_delay_ms: float = option(
        0.0,
        "Milliseconds that prompts may add to a step beside running streams: a step then computes"
        " as many prompt tokens as fit, 64 at least. 0 sets no bound: prompts are read fastest, and"
        " streams wait for whole chunks.",
        least=0,
    )
    disable_radix_cache: bool = option(False, "Do not share prefixes between requests.")
    disable_overlap_schedule: bool = option(
        False, "On a GPU, wait for the outcome of a step before the next one is started."
    )
    speculative_adaptive: bool = option(
        True,
        "Draft and verify in each step as much as pays, or nothing; otherwise always the whole"
        " tree.",
    )
    simulate_accept_length: float | None = option(
        None,
        "For benchmarks with --load-format dummy: replace what is accepted, so that a verification"
        " gives this many tokens on average. The text is meaningless.",
        least=1,
    )
    draft_wait: float = option(
        60.0, "Seconds to wait at start for the draft before serving without it.", least=0
    )
    draft_step_timeout: float = option(
        1.0, "Seconds after which a draft counts as dead in a step.", least=0.001
    )
    draft_refill_tokens: int = option(
        2048,
        "Tokens per step that a draft may catch up on; cached tokens computed again to give a draft"
        " their hidden states.",
        least=0,
    )
    skip_draft_self_test: bool = option(
        False,
        "Do not measure a draft's accept length on a few built-in prompts when it is attached.",
    )
    arena_mb: int | None = option(
        None,
        "Most MiB of memory for hidden states on their way to the draft; when absent, 64 on a CPU,"
        " and on a GPU 64 for each 1,024 tokens of --chunked-prefill-size.",
        least=1,
    )
    draft_projection: str = option(
        "auto",
        "Where a draft's projection of the target's hidden states is computed: by the draft, or by"
        " the verifier with the draft's weights, so that fewer numbers travel. auto: by the draft"
        " on the target's GPU, else by the verifier.",
        choices=("auto", "verifier", "draft"),
    )
    require_transport: str = option(
        "any",
        "Attach a draft only if its hidden states can go this way: memory of the GPU, shared"
        " memory, inside messages.",
        choices=("any", "cuda_ipc", "shm", "inline"),
    )
    grammar_timeout: float = option(
        5.0,
        "Seconds that compiling a JSON schema, a regex or another grammar may take.",
        least=0.001,
    )
    grammar_memory_mb: int = option(
        512, "MiB that compiling a grammar may take.", least=1, most=_MOST_MB
    )
    drain_timeout: float = option(
        30.0, "Seconds that running requests get to finish on SIGTERM.", least=0
    )

    def draft_addresses(self) -> dict[str, str]:
        """Returns the drafts' addresses by algorithm, in order; empty where nothing is drafted.

        Raises:
            ConfigError: Drafts and algorithms do not fit each other.
        """
        given = [address for address in self.draft if address]
        names = self.algorithms
        if not given or names == ("NONE",):
            return {}
        found: dict[str, str] = {}
        for text in given:
            name, _, address = text.partition("=")
            if name.upper() == "EAGLE" and names == ("MTP",):
                name = "MTP"  # the algorithm of EAGLE with a head of MTP layers
            if name.upper() not in names:
                name, address = names[0], text
                if len(names) > 1:
                    raise ConfigError(
                        f"--draft {text}: must be NAME=ADDRESS, NAME one of {', '.join(names)}"
                    )
            if name.upper() in found:
                raise ConfigError(f"--draft {text}: {name.upper()} has an address already")
            if not address or address in found.values():
                why = "another draft is there" if address else "no address"
                raise ConfigError(f"--draft {text}: {why}")
            found[name.upper()] = address
        if missing := [name for name in names if name not in found]:
            raise ConfigError(f"--draft: no address for {', '.join(missing)}")
        return {name: found[name] for name in names}

    def check_context(self, num_positions: int) -> None:
        """Raises ConfigError for a longest sequence that the target has too few positions for."""
        if self.context_length is not None and self.context_length > num_positions:
            raise ConfigError(
                f"--context-length {self.context_length} is more than the model's {num_positions}"
                " positions"
            )


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LogConfig, MetricsConfig, ServiceTlsConfig, TargetConfig, SpeculationConfig):
    """The draft."""

    listen: str = option(
        "127.0.0.1:50053", "Address of the draft's gRPC: host:port or unix:/path.", internal=True
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(LogConfig, ServiceTlsConfig):
    """The gateway."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", filled=True)
    port: int = option(30000, "HTTP port.", least=0, most=65535)
    allowed_host: tuple[str, ...] = option(
        (),
        "Name that HTTP requests may call the server by (their Host), `*.name` for all under one,"
        " `*` for any; may be given several times. Addresses and localhost always may. Without it"
        " every name may, save where the server listens on this machine's own addresses and has no"
        " keys.",
    )
    allowed_origin: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server from a browser (CORS), such as"
        " https://chat.example.com, `*` for any; may be given several times.",
    )
    grpc_port: int = option(50051, "Port of the public gRPC.", least=0, most=65535)
    verifier: tuple[str, ...] = option(
        ("127.0.0.1:50052",),
        "Address of a verifier, or dns:name:port for every address of a name; may be given several"
        " times.",
        internal=True,
    )
    grpc_socket: str = option(
        "",
        "unix:/path for the public gRPC beside its port, without TLS: for who supervises this"
        " process.",
        internal=True,
    )
    dashboard_metrics: tuple[str, ...] = option(
        (),
        "host:port of a verifier's or a draft's /metrics, whose figures /dashboard shows; may be"
        " given several times.",
        internal=True,
    )
    tokenizer_path: str = option(
        "",
        "Tokenizer: a directory or organisation/name on the hub; the verifier's model's when"
        " empty.",
    )
    chat_template: str = option(
        "", "File with a Jinja chat template, instead of the tokenizer's own."
    )
    api_key: str = option(
        "",
        "Key that clients must send as `Authorization: Bearer KEY`. Others can read a command line:"
        " prefer the variable, or --api-key-file.",
        secret=True,
        filled=True,
    )
    api_key_file: str = option(
        "",
        "File of keys, a `name secret` on each line, and the key's own limits if it has any, such"
        " as `concurrent=8 requests=60 tokens=100000`; `#` at the start or after a space begins a"
        " comment. Read again when it changes.",
        filled=True,
    )
    protect_metrics: bool | None = option(
        None,
        "Ask for a key for /metrics and the dashboard's figures too, which name the keys; where"
        " there are keys when absent. /health stays open.",
    )
    ssl_certfile: str = option(
        "",
        "PEM file with the certificate chain of the HTTP and gRPC ports, which speak TLS then."
        " Changed files are taken without a restart.",
        filled=True,
    )
    ssl_keyfile: str = option("", "PEM file of its private key.", filled=True)
    ssl_ca_certs: str = option(
        "",
        "PEM file of authorities; clients must show a certificate of theirs then (mutual TLS).",
        filled=True,
    )
    key_concurrent_requests: int = option(
        0,
        "Requests that a key may have running; 0 is no limit. Without keys it holds for all.",
        least=0,
        most=MAX_KEY_LIMIT,
    )
    key_requests_per_minute: int = option(
        0, "Requests a minute of a key; 0 is no limit.", least=0, most=MAX_KEY_LIMIT
    )
    key_tokens_per_minute: int = option(
        0,
        "Tokens a minute of a key, prompts and outputs; 0 is no limit.",
        least=0,
        most=MAX_KEY_LIMIT,
    )
    max_concurrent_requests: int = option(
        2048, "Requests that run or wait here at most; more are refused with 429.", least=1
    )
    max_connections: int = option(
        4096,
        "Connections of HTTP, and of gRPC, at a time; fewer where the system allows fewer files."
        " Where all are in use, the HTTP connection that has sent no whole request for longest"
        " gives way.",
        least=1,
    )
    max_connections_per_address: int = option(
        2048,
        "HTTP connections of one address at a time. Raise it where all clients come through one"
        " proxy.",
        least=1,
    )
    max_queue_seconds: float = option(
        0.0,
        "Seconds that a request may wait for its first token; over it 503. 0 leaves it to its"
        " deadline.",
        least=0,
    )
    max_prompt_tokens: int = option(
        0, "Longest prompt; 0 leaves it to the context length.", least=0
    )
    max_output_tokens: int = option(
        0, "Most tokens of one continuation; 0 leaves it to the context length.", least=0
    )
    tokenizer_processes: int = option(
        2,
        "Processes that tokenize and render chat templates; up to four more while prompts take"
        " long.",
        least=1,
    )
    tokenizer_timeout: float = option(
        10.0, "Seconds that tokenizing a prompt or rendering its template may take.", least=0.001
    )
    tokenizer_memory_mb: int = option(
        1024,
        "MiB that tokenizing a prompt or rendering its template may take, on top of the tokenizer.",
        least=1,
        most=_MOST_MB,
    )
    client_timeout: float = option(
        30.0,
        "Seconds that a client may take to send a request's head, to send its body, and to take"
        " something of an answer.",
        least=0.001,
    )
    max_body_bytes: int = option(8 * 2**20, "Largest HTTP body or gRPC message.", least=1)
    request_timeout: float = option(
        600.0, "Seconds after which a request ends with DEADLINE.", least=0.001
    )
    reasoning_parser: str = option(
        "",
        "How the model writes reasoning, which chat answers then have in `reasoning_content`: qwen3"
        " (`<think>`, where it thinks), deepseek-r1 (always), gpt-oss (channels). Without it"
        " reasoning is part of the text.",
        choices=("", "qwen3", "deepseek-r1", "gpt-oss"),
    )
    tool_call_parser: str = option(
        "",
        "How the model writes calls of tools: hermes (qwen25 is the same), llama3, mistral,"
        " qwen3_coder, gpt-oss. Without it the chat template tells.",
        choices=("", "hermes", "qwen25", "llama3", "mistral", "qwen3_coder", "gpt-oss"),
    )
    response_store_mb: int = option(
        256,
        "MiB of responses kept in memory for `previous_response_id` and `GET /v1/responses`; 0"
        " keeps none. Where there are too many, the oldest go of the key that has most.",
        least=0,
    )
    response_lifetime: float = option(
        3600.0, "Seconds that a response is kept for that.", least=0.001
    )
    drain_timeout: float = option(
        30.0, "Seconds that running requests get to finish on SIGTERM.", least=0
    )

    def check_hosts(self) -> None:
        """Raises ConfigError for an --allowed-host or --allowed-origin that no request has."""
        for host in self.allowed_host:
            if host != "*" and not _HOST.fullmatch(host.removeprefix("*.")):
                raise ConfigError(
                    f"--allowed-host {host}: must be *, a name or *.name, without scheme and port"
                )
        for origin in self.allowed_origin:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origin {origin}: must be * or scheme://host or scheme://host:port,"
                    " in small letters and without a path"
                )
