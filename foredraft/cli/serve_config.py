"""Flags of `foredraft serve`: what they ask for, checked and resolved before any process starts."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.cli.ports import choose_ports
from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.api_keys import configured
from foredraft.config.options import flag_of, option
from foredraft.config.quantization import count_gpus, has_gpu
from foredraft.config.services import DraftConfig, GatewayConfig, VerifyConfig
from foredraft.config.speculation import each_draft
from foredraft.config.speculation_checks import check_transport
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
    on_cpu = is_on_cpu(config)
    config.check_quantization(on_cpu)
    check_transport(config.require_transport, on_cpu)
    config.nodes()
    if not on_cpu:
        config.check_gpus(len(_visible_cards(os.environ)) or None)
        draft_card(config, os.environ)
    if config.speculative_draft_ahead and on_cpu:
        raise ConfigError("--speculative-draft-ahead needs a GPU")
    choose_ports(wanted_ports(config))
    _check_files(config)
    paths = [("model_path", config.model_path)]
    paths += [(_DRAFT_MODEL, one.speculative_draft_model_path) for one in each_draft(config)]
    for name, path in paths:
        try:
            is_missing = _looks_like_path(path) and not Path(path).expanduser().exists()
        except OSError as error:
            raise ConfigError(f"{flag_of(name)} {path}: {error.strerror}") from None
        if is_missing and not is_repository(path):
            raise ConfigError(f"{flag_of(name)} {path}: no such directory or file")
    return config


def is_on_cpu(config: ServeConfig) -> bool:
    """Returns whether the models run on the CPU."""
    return config.device == "cpu" or (config.device == "auto" and not has_gpu())


def _check_files(config: ServeConfig) -> None:
    """Reads the gateway's files, so that a wrong file is reported before anything is loaded."""
    config.check_hosts()
    public_identity(config)
    configured(config, warns=False)
    if config.chat_template:
        from foredraft.text.chat_template import read_template  # brings Jinja

        read_template(config.chat_template)


def resolve_models(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces model names and .gguf files by directories, fetching or converting them once; that
    may take minutes.

    Returns:
        The values with local directories; the served name is still the requested model's.

    Raises:
        CheckpointError: A model cannot be had.
        ConfigError: The flags do not fit the target, or a draft is not for it.
    """
    config = ServeConfig(**values)
    # Services get directories, which have no revisions.
    resolved = {
        name: value for name, value in values.items() if name not in ("revision", _DRAFT_REVISION)
    }
    path = config.model_path
    target = resolve_model_path(path, config.revision)
    model = ModelConfig.from_dir(target)
    config.check_context(model.max_position_embeddings)
    config.check_shares(model.shared_sizes, model.why_not_shared)
    resolved["model_path"] = str(target)
    if not config.tokenizer_path:  # the gateway loads it while the verifier starts
        resolved["tokenizer_path"] = str(target)
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


def wanted_ports(config: ServeConfig) -> dict[str, tuple[str, int]]:
    """Returns the host and port of each field that names a port; 0 stands for a free one."""
    return {
        name: (getattr(config, host), getattr(config, name)) for name, host in _PORT_HOSTS.items()
    }


def draft_card(config: ServeConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that shows drafts the GPU of --draft-device alone; none without the
    flag.

    Raises:
        ConfigError: There is no such GPU.
    """
    number = config.draft_device
    if number is None:
        return {}
    cards = _visible_cards(environment) or list(map(str, range(number + 1)))
    if number >= len(cards):
        raise ConfigError(
            f"--draft-device {number} must be below {len(cards)}, the number of visible GPUs"
        )
    return {"CUDA_VISIBLE_DEVICES": cards[number]}


def _visible_cards(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs that services see; none where that is not known."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible else list(map(str, range(count_gpus())))


def _looks_like_path(path: str) -> bool:
    return "/" in path or path.endswith(".gguf")
