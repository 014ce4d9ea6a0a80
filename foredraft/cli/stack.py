"""Runs one gateway, one verifier and its drafts on this machine: processes, sockets, environments.

Shows nothing.
"""

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foredraft.cli.leftovers import of_the_dead
from foredraft.cli.mps import Mps
from foredraft.cli.ports import choose_ports
from foredraft.cli.serve_config import ServeConfig, check, draft_card, is_on_cpu, wanted_ports
from foredraft.cli.supervisor import Service, Supervisor
from foredraft.config.options import to_flags, variable_of
from foredraft.config.services import DraftConfig, GatewayConfig, VerifyConfig
from foredraft.config.speculation import each_draft
from foredraft.config.speculation_checks import why_not_ahead

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
    "speculative_draft_ahead",
)


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
        services, urls = _rank_services(values, config, directory)
        shared = _environment(environment, values)
    else:
        services, urls = _all_services(values, config, directory, daemon)
        several = len(config.algorithms) > 1
        shared = _environment(environment, values, has_several_drafts=several)
    return LocalStack(
        directory,
        services,
        daemon,
        urls=urls,
        on_line=on_line,
        environment=shared | daemon.variables,
    )


def _rank_services(
    values: Mapping[str, Any], config: ServeConfig, directory: Path
) -> tuple[list[Service], dict[str, str]]:
    """Returns the one service of a host that runs only ranks, and host 0's address.

    Gateway, verifier and drafts run on host 0.
    """
    listen = _socket(directory, "verify")
    command = _command("verify_service", VerifyConfig, values, listen=listen, draft=("",))
    service = Service(name="verify", command=command, health=listen, stop_seconds=5)
    nodes = config.nodes()
    return [service], {"host 0": f"{nodes.host}:{nodes.port}"}


def _all_services(
    values: Mapping[str, Any], config: ServeConfig, directory: Path, daemon: Mps
) -> tuple[list[Service], dict[str, str]]:
    """Returns gateway, verifier and drafts, and the addresses that they are reached at."""
    drafts = _drafts(config)
    ports, draft_ports = _ports(config, drafts)
    if config.mps and daemon.start() and config.device == "auto":
        # A GPU may be out of reach for a moment after a fault: what restarts then must not fall
        # back to the CPU.
        values = {**values, "device": "cuda"}
    host, metrics_host = reachable_host(config.host), reachable_host(config.metrics_host)
    scheme = "https" if config.ssl_certfile else "http"
    pages = {name: f"{metrics_host}:{port}" for name, port in draft_ports.items()}
    pages = {"verify": f"{metrics_host}:{ports['verify_metrics_port']}", **pages}
    urls = {
        "http": f"{scheme}://{host}:{ports['port']}",
        "grpc": f"{host}:{ports['grpc_port']}",
        "metrics": f"{scheme}://{host}:{ports['port']}/metrics",
        **{f"{name}_metrics": f"http://{page}/metrics" for name, page in pages.items()},
    }
    gateway = _gateway(values, config, directory, ports, tuple(pages.values()))
    verifier = _verifier(values, config, directory, ports["verify_metrics_port"], drafts)
    services = [gateway, verifier]
    for name, one in drafts.items():
        # What a draft beside others has of its own, even where it is nothing.
        fields = _DRAFT_FIELDS if len(drafts) > 1 else ("speculative_draft_ahead",)
        own = {field: getattr(one, field) for field in fields}
        card = draft_card(config, {**os.environ, **daemon.variables})
        services.append(_draft(values, directory, name, draft_ports[name], own, card))
    return services, urls


def _gateway(
    values: Mapping[str, Any],
    config: ServeConfig,
    directory: Path,
    ports: Mapping[str, int],
    metrics_pages: tuple[str, ...],
) -> Service:
    listen = _socket(directory, "gateway")
    command = _command(
        "gateway",
        GatewayConfig,
        values,
        port=ports["port"],
        grpc_port=ports["grpc_port"],
        grpc_socket=listen,
        verifier=(_socket(directory, "verify"),),
        dashboard_metrics=metrics_pages,
    )
    return Service(
        name="gateway",
        command=command,
        health=listen,
        stop_seconds=config.drain_timeout + 5,
        environment=_secrets(GatewayConfig, values),
    )


def _verifier(
    values: Mapping[str, Any],
    config: ServeConfig,
    directory: Path,
    metrics_port: int,
    drafts: Mapping[str, ServeConfig],
) -> Service:
    listen = _socket(directory, "verify")
    command = _command(
        "verify_service",
        VerifyConfig,
        values,
        listen=listen,
        draft=_addresses(drafts, directory),
        metrics_port=metrics_port,
    )
    return Service(
        name="verify", command=command, health=listen, stop_seconds=config.drain_timeout + 5
    )


def _draft(
    values: Mapping[str, Any],
    directory: Path,
    name: str,
    metrics_port: int,
    own: Mapping[str, Any],
    card: Mapping[str, str],
) -> Service:
    """Returns a draft's service.

    Args:
        own: Fields in which it differs from `values`.
        card: Environment of its own.
    """
    listen = _socket(directory, name)
    command = _command(
        "draft_service", DraftConfig, values, **own, listen=listen, metrics_port=metrics_port
    )
    return Service(
        name=name,
        command=command,
        health=listen,
        max_deaths=None,
        hang_checks=3,
        stop_seconds=5,
        environment=card,
    )


def _environment(
    given: Mapping[str, str] | None, values: Mapping[str, Any], has_several_drafts: bool = False
) -> dict[str, str]:
    """Returns the environment that all services share."""
    # Only the service that needs a secret gets it.
    hidden = {*_secret_names(ServeConfig), *_emptied_names(ServeConfig, values)}
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
    for name in (*_secret_names(config), *_emptied_names(config, values)):
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
    number = config.draft_device
    if number is not None and number >= config.ranks_per_host() and not is_on_cpu(config):
        drafts = [
            dataclasses.replace(one, speculative_draft_ahead=not why_not_ahead(one))
            if one.speculative_draft_ahead is None
            else one
            for one in drafts
        ]
    if len(drafts) == 1:
        return {"draft": drafts[0]}
    return {f"draft-{one.speculative_algorithm.lower()}": one for one in drafts}


def _ports(
    config: ServeConfig, drafts: Mapping[str, ServeConfig]
) -> tuple[dict[str, int], dict[str, int]]:
    """Chooses all ports.

    Returns:
        The ports by their fields, and the ports of the drafts' metrics by the drafts' names.
    """
    wanted = wanted_ports(config)
    # A flag names the first draft's.
    more = list(drafts)[1:]
    ports = choose_ports(wanted | dict.fromkeys(more, (config.metrics_host, 0)))
    names = dict(zip(drafts, ("draft_metrics_port", *more), strict=False))
    return ports, {name: ports[field] for name, field in names.items()}


def _socket(directory: Path, name: str) -> str:
    return f"unix:{directory}/{name}.sock"


def _addresses(drafts: Mapping[str, ServeConfig], directory: Path) -> tuple[str, ...]:
    """Returns the addresses of the drafts for the verifier's flag."""
    if len(drafts) < 2:
        return tuple(_socket(directory, name) for name in drafts) or (
            "",
        )  # whatever a variable says
    return tuple(
        f"{one.speculative_algorithm}={_socket(directory, name)}" for name, one in drafts.items()
    )


def _emptied_names(config: type, values: Mapping[str, Any]) -> list[str]:
    """Returns the fields whose variable must not count, and which no flag can give without text."""
    return [
        field.name
        for field in dataclasses.fields(config)
        if field.metadata["filled"] and values.get(field.name) == ""
    ]
