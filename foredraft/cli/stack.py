"""Runs one gateway, one verifier and its drafts on this machine: flags, sockets, ports, models.

Shows nothing.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foredraft.cli.leftovers import of_the_dead
from foredraft.cli.mps import Mps
from foredraft.cli.ports import bind_free
from foredraft.cli.supervisor import Service, Supervisor
from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.api_keys import configured
from foredraft.config.options import flag_of, option, to_flags, variable_of
from foredraft.config.quantization import count_gpus, has_gpu
from foredraft.config.services import DraftConfig, GatewayConfig, VerifyConfig
from foredraft.config.speculation import each_draft
from foredraft.errors import ConfigError
from foredraft.models.config import ModelConfig
from foredraft.models.hub import is_repository
from foredraft.models.provenance import trained_for
from foredraft.models.registry import resolve_model_path
from foredraft.models.speculation import find_algorithm, resolve
from foredraft.rpc.tls import public_identity

# Fields that name a port, and the fields that name where it is bound.
_PORT_HOSTS = {
    "port": "host",
    "grpc_port": "host",
    "verify_metrics_port": "metrics_host",
    "draft_metrics_port": "metrics_host",
}
# Fields in which a draft beside others differs from what `serve` was given.
_DRAFT_FIELDS = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_token_map",
    "speculative_draft_model_quantization",
    "enable_multi_layer_eagle",
)
_DRAFT_MODEL, _DRAFT_REVISION = "speculative_draft_model_path", "speculative_draft_model_revision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(GatewayConfig, VerifyConfig, DraftConfig):
    """Configuration of `foredraft serve`: every service's flags but those that wire them
    together, and some of its own.
    """

    verify_metrics_port: int = option(0, "Port of the verifier's /metrics; 0 takes a free one.")
    draft_metrics_port: int = option(
        0, "Port of the (first) draft's /metrics; 0 takes a free one, as further drafts do."
    )
    draft_device: int | None = option(
        None,
        "Number of the GPU that drafts run on, among those in CUDA_VISIBLE_DEVICES, from 0; the"
        " target's first when absent.",
        least=0,
    )
    mps: bool = option(
        False,
        "Run verifier and draft under a private daemon of NVIDIA's Multi-Process Service, which"
        " saves about 0.16 ms per hand-over where both use one GPU. A draft that faults there, or"
        " gets SIGKILL at work, then takes the verifier along; both start anew.",
    )


def settle_draft(values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Fills in algorithm and target from a draft's files, where no flag gives them.

    Args:
        values: Fields of ServeConfig that were set.

    Returns:
        The fields, and a line for the log about what was filled in; empty for nothing.

    Raises:
        CheckpointError: The draft cannot be fetched, or is of an unknown kind.
    """
    settled = dict(values)
    given = values.get(_DRAFT_MODEL)
    if not given or "speculative_algorithm" in values or "=" in given:
        return settled, ""
    draft = resolve_model_path(given, values.get(_DRAFT_REVISION, ""), bins=True)
    settled["speculative_algorithm"] = find_algorithm(draft)
    found = f"by its files a draft for {settled['speculative_algorithm']}"
    if "model_path" not in values and (target := trained_for(draft)):
        settled["model_path"] = target
        found += f", of the target {target}"
    return settled, f"{flag_of(_DRAFT_MODEL)} {given}: {found}"


def check(values: Mapping[str, Any]) -> ServeConfig:
    """Builds every service's configuration and tries the ports, before any process starts.

    Args:
        values: Fields of ServeConfig that were set.

    Raises:
        ConfigError: It names the flags at fault.
    """
    config = ServeConfig(**values)
    for name in _PORT_HOSTS:
        if not 0 <= getattr(config, name) <= 65535:
            raise ConfigError(f"{flag_of(name)} must be in [0, 65535], not {getattr(config, name)}")
    if config.mps and config.tensor_parallel_size > 1:
        raise ConfigError(
            "--mps does not go with --tensor-parallel-size: its daemon is for one card; leave"
            " it out"
        )
    on_cpu = config.device == "cpu" or (config.device == "auto" and not has_gpu())
    config.check_quantization(on_cpu)
    config.nodes()
    if not on_cpu:
        config.check_gpus(config.algorithms)
        _draft_card(config, os.environ)
    _choose_ports(config)
    _check_files(config)
    paths = [("model_path", config.model_path)]
    paths += [(_DRAFT_MODEL, one.speculative_draft_model_path) for one in each_draft(config)]
    for name, path in paths:
        is_missing = _looks_like_path(path) and not Path(path).expanduser().exists()
        if is_missing and not is_repository(path):
            raise ConfigError(f"{flag_of(name)} {path}: no such directory or file")
    return config


def _check_files(config: ServeConfig) -> None:
    """Reads the gateway's files, so that a wrong file is reported before anything is loaded."""
    config.check_origins()
    public_identity(config)
    configured(config, warns=False)
    if config.chat_template:
        from foredraft.text.chat_template import read_template  # brings Jinja

        read_template(config.chat_template)


def resolve_models(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces model names and .gguf files by directories, fetching or converting them once; that
    may take minutes.

    Returns:
        The values with local directories, and the served name still that of the model asked for.

    Raises:
        CheckpointError: A model cannot be had.
        ConfigError: The ranks cannot share the target, or a draft is not for it.
    """
    config = ServeConfig(**values)
    # Services get directories, which have no revisions.
    resolved = {
        name: value for name, value in values.items() if name not in ("revision", _DRAFT_REVISION)
    }
    path = config.model_path
    target = resolve_model_path(path, config.revision)
    if config.tensor_parallel_size > 1:
        config.check_shares(ModelConfig.from_dir(target).shared_sizes)
    resolved["model_path"] = str(target)
    if not config.served_model_name:
        resolved["served_model_name"] = (
            Path(path).stem if path.endswith(".gguf") else Path(path).name
        )
    drafts = {}
    for one in each_draft(config):
        if path := one.speculative_draft_model_path:
            name, revision = one.speculative_algorithm, one.speculative_draft_model_revision
            drafts[name] = str(
                resolve_model_path(path, revision, bins=ALGORITHMS[name].reads_hidden)
            )
    if sum(ALGORITHMS[name].has_model for name in config.algorithms) > 1:
        resolved[_DRAFT_MODEL] = ",".join(f"{name}={path}" for name, path in drafts.items())
    elif drafts:
        [resolved[_DRAFT_MODEL]] = drafts.values()
    for one in each_draft(ServeConfig(**resolved)):
        resolve(one)
    return resolved


def make_supervisor(
    values: Mapping[str, Any],
    *,
    on_line: Callable[[str, str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Supervisor:
    """Creates a supervisor of one gateway, one verifier and a draft for each algorithm other
    than NONE.

    Its `urls` are `http`, `grpc` (host:port), `metrics`, `verify_metrics` and `draft_metrics`, with
    several drafts `draft-ALGORITHM_metrics` for each. The sockets' directory goes with
    `LocalStack.stop`.

    Args:
        values: Fields of ServeConfig that were set.
        on_line: Called with (service, line) for every line that a service logs, from several
            threads.
        environment: Environment of the services; by default this process's own.

    Raises:
        ConfigError: The combination cannot be served.
    """
    config = check(values)
    directory, daemon = make_runtime_directory(), Mps()
    try:
        return _stack(values, config, directory, daemon, on_line, environment)
    except BaseException:  # for example a signal: nothing else would end the daemon
        daemon.stop()
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _stack(
    values: Mapping[str, Any],
    config: ServeConfig,
    directory: Path,
    daemon: Mps,
    on_line: Callable[[str, str], None] | None,
    environment: Mapping[str, str] | None,
) -> "LocalStack":
    if config.nodes().rank:
        return _further_host(values, config, directory, daemon, on_line, environment)
    drafts = _drafts(config)
    sockets = {name: f"unix:{directory}/{name}.sock" for name in ("gateway", "verify", *drafts)}
    ports = _choose_ports(config, len(drafts) - 1)
    if config.mps and daemon.start() and config.device == "auto":
        # A GPU may be out of reach for a moment after a fault: what restarts then must not fall
        # back to the CPU.
        values = {**values, "device": "cuda"}
    host, metrics_host = reachable_host(config.host), reachable_host(config.metrics_host)
    draft_ports = [
        ports["draft_metrics_port"],
        *(ports[f"draft {i}"] for i in range(1, len(drafts))),
    ]
    pages = {
        name: f"{metrics_host}:{port}" for name, port in zip(drafts, draft_ports, strict=False)
    }
    metrics_pages = [f"{metrics_host}:{ports['verify_metrics_port']}", *pages.values()]
    services = [
        Service(
            name="gateway",
            command=_command(
                "gateway",
                GatewayConfig,
                values,
                port=ports["port"],
                grpc_port=ports["grpc_port"],
                grpc_socket=sockets["gateway"],
                verifier=(sockets["verify"],),
                dashboard_metrics=tuple(metrics_pages),
            ),
            health=sockets["gateway"],
            stop_seconds=config.drain_timeout + 5,
            environment=_secrets(GatewayConfig, values),
        ),
        Service(
            name="verify",
            command=_command(
                "verify_service",
                VerifyConfig,
                values,
                listen=sockets["verify"],
                draft=_addresses(drafts, sockets),
                metrics_port=ports["verify_metrics_port"],
            ),
            health=sockets["verify"],
            stop_seconds=config.drain_timeout + 5,
        ),
    ]
    scheme = "https" if config.ssl_certfile else "http"
    urls = {
        "http": f"{scheme}://{host}:{ports['port']}",
        "grpc": f"{host}:{ports['grpc_port']}",
        "metrics": f"{scheme}://{host}:{ports['port']}/metrics",
        "verify_metrics": f"http://{metrics_pages[0]}/metrics",
    }
    for (name, one), port in zip(drafts.items(), draft_ports, strict=False):
        command = _command(
            "draft_service",
            DraftConfig,
            values,
            # What a draft beside others has of its own, even where it is nothing.
            **({} if len(drafts) == 1 else {field: getattr(one, field) for field in _DRAFT_FIELDS}),
            listen=sockets[name],
            metrics_port=port,
        )
        services.append(
            Service(
                name=name,
                command=command,
                health=sockets[name],
                max_deaths=None,
                hang_checks=3,
                stop_seconds=5,
                environment=_draft_card(config, {**os.environ, **daemon.variables}),
            )
        )
        urls[f"{name}_metrics"] = f"http://{pages[name]}/metrics"
    shared = _environment(environment, len(drafts) > 1)
    return LocalStack(
        directory,
        services,
        daemon,
        urls=urls,
        on_line=on_line,
        environment=shared | daemon.variables,
    )


def _further_host(
    values: Mapping[str, Any],
    config: ServeConfig,
    directory: Path,
    daemon: Mps,
    on_line: Callable[[str, str], None] | None,
    environment: Mapping[str, str] | None,
) -> "LocalStack":
    """Creates the stack of a host that runs only ranks: gateway, verifier and drafts run on
    host 0.
    """
    listen = f"unix:{directory}/verify.sock"
    command = _command("verify_service", VerifyConfig, values, listen=listen, draft=("",))
    service = Service(name="verify", command=command, health=listen, stop_seconds=5)
    nodes = config.nodes()
    urls = {"host 0": f"{nodes.host}:{nodes.port}"}
    shared = _environment(environment)
    return LocalStack(directory, [service], daemon, urls=urls, on_line=on_line, environment=shared)


def _environment(
    given: Mapping[str, str] | None, has_several_drafts: bool = False
) -> dict[str, str]:
    """Returns the environment that all services share."""
    # Only the service that needs a secret gets it.
    hidden = set(_secret_names(ServeConfig))
    if has_several_drafts:
        # What is there for one of them would be read by the others.
        hidden.update(_DRAFT_FIELDS)
    names = {variable_of(name) for name in hidden}
    shared = os.environ if given is None else given
    return {
        **{name: value for name, value in shared.items() if name not in names},
        "PYTHONUNBUFFERED": "1",
    }


class LocalStack(Supervisor):
    """A supervisor that removes its sockets' directory, and ends its MPS daemon, when it
    stopped.
    """

    def __init__(
        self, directory: Path, services: list[Service], daemon: Mps, **arguments: Any
    ) -> None:
        super().__init__(services, **arguments)
        self.directory = directory
        self._daemon = daemon

    def stop(self) -> None:
        super().stop()
        self._daemon.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def make_runtime_directory() -> Path:
    """Creates a directory of mode 0700 for sockets, under $XDG_RUNTIME_DIR or the temporary
    directory.

    Removes those that dead supervisors left behind.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    # A socket's path has 107 bytes; ours take 40 of them.
    if not os.access(base, os.W_OK) or len(os.fsencode(base)) > 60:
        base = Path("/tmp")
    for old in of_the_dead(base, "foredraft-"):
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"foredraft-{os.getpid()}-", dir=base))


def reachable_host(host: str) -> str:
    """Returns the host at which this machine reaches a server that listens on `host`, in the
    form of a URL.
    """
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _command(
    module: str, config: type, values: Mapping[str, Any], **wiring: Any
) -> tuple[str, ...]:
    names = {field.name for field in dataclasses.fields(config)}
    own = {name: value for name, value in values.items() if name in names}
    for name in _secret_names(config):
        own.pop(name, None)
    return (sys.executable, "-m", module, *to_flags({**own, **wiring}))


def _secret_names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.metadata["secret"]]


def _secrets(config: type, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns environment variables for values that must not be visible on a command line."""
    return {variable_of(name): values[name] for name in _secret_names(config) if values.get(name)}


def _drafts(config: ServeConfig) -> dict[str, ServeConfig]:
    """Returns the configuration of each draft as if it were the only one, by the name of its
    service.
    """
    drafts = [one for one in each_draft(config) if one.speculative_algorithm != "NONE"]
    if len(drafts) == 1:
        return {"draft": drafts[0]}
    return {f"draft-{one.speculative_algorithm.lower()}": one for one in drafts}


def _draft_card(config: ServeConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable by which drafts see the GPU of --draft-device alone."""
    number = config.draft_device
    if number is None:
        return {}
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    cards = visible.split(",") if visible else list(map(str, range(count_gpus() or number + 1)))
    if number >= len(cards):
        raise ConfigError(
            f"--draft-device {number} must be below {len(cards)}, the number of visible GPUs"
        )
    return {"CUDA_VISIBLE_DEVICES": cards[number]}


def _addresses(drafts: Mapping[str, ServeConfig], sockets: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the addresses of the drafts for the verifier's flag."""
    if len(drafts) < 2:
        return tuple(sockets[name] for name in drafts) or ("",)  # whatever a variable says
    return tuple(f"{one.speculative_algorithm}={sockets[name]}" for name, one in drafts.items())


def _choose_ports(config: ServeConfig, num_more: int = 0) -> dict[str, int]:
    """Returns the requested ports, if they are free, and free ones for 0.

    They are left for the services to take.

    Args:
        num_more: Free ports for metrics beside, named "draft 1" and so on.
    """
    chosen: dict[str, int] = {}
    more = {f"draft {i + 1}": "metrics_host" for i in range(num_more)}
    hosts = {**_PORT_HOSTS, **more}
    ports = {name: 0 if name in more else getattr(config, name) for name in hosts}
    with contextlib.ExitStack() as probes:
        for name in sorted(hosts, key=lambda name: ports[name] == 0):
            port = ports[name]
            for other in chosen:
                if port and chosen[other] == port:
                    raise ConfigError(f"{flag_of(other)} and {flag_of(name)} are both {port}")
            host = getattr(config, hosts[name])
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = probes.enter_context(socket.socket(family))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                if port:
                    probe.bind((host, port))
                chosen[name] = port or bind_free(probe, host)
            except OSError as error:
                reason = error.strerror or error
                if error.errno == errno.EADDRINUSE:
                    reason = f"{reason}; give another port, or 0 for any free one"
                raise ConfigError(f"{flag_of(name)} {port} on {host}: {reason}") from error
    return chosen


def _looks_like_path(path: str) -> bool:
    return "/" in path or path.endswith(".gguf")
