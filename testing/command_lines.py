"""Checks a command line found in a manifest against the parsers of the code itself."""

from collections.abc import Mapping, Sequence

import pytest

from foredraft.cli import serve
from foredraft.cli.serve_config import ServeConfig
from foredraft.config.options import given_values, parse, variable_of
from foredraft.config.services import DraftConfig, GatewayConfig, VerifyConfig
from foredraft.rpc import address
from gateway import discovery

SERVICES = {"gateway": GatewayConfig, "verify_service": VerifyConfig, "draft_service": DraftConfig}
# Variables of other software in the same manifest.
FOREIGN_VARIABLES = {
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "HF_HOME",
    "HF_TOKEN",
    "HOME",
    "POD_NAME",
}


def check(
    argv: Sequence[str], environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> object:
    """Parses a command of ours as the process would, with only these variables; returns its
    configuration.

    Fails the test for an unknown command, flag or variable, or a value that the configuration
    refuses.
    """
    for name, value in environ.items():
        if name.startswith("FOREDRAFT_"):
            monkeypatch.setenv(name, value)
        else:
            assert name in FOREIGN_VARIABLES, f"{name} is read by nothing"
    try:
        return _parsed(list(argv), environ)
    except SystemExit:
        pytest.fail(f"the code refuses {argv} with {dict(environ)}")
    finally:
        for name in environ:
            monkeypatch.delenv(name, raising=False)


def _parsed(argv: list[str], environ: Mapping[str, str]) -> object:
    if argv[:2] == ["python", "-m"] and argv[2] in SERVICES:
        config_class = SERVICES[argv[2]]
        known = {variable_of(name) for name in config_class.__dataclass_fields__}  # type: ignore[attr-defined]
        config = parse(config_class, argv[3:], argv[2], "")
        for target in (
            *getattr(config, "verifier", ()),
            getattr(config, "listen", ""),
            *getattr(config, "draft", ()),
        ):
            if target:
                address.parse(target.removeprefix(discovery.PREFIX))
    elif argv[:2] == ["foredraft", "serve"]:
        known = {variable_of(name) for name in ServeConfig.__dataclass_fields__}
        namespace = serve.make_parser().parse_args(argv[2:])
        config = ServeConfig(**given_values(ServeConfig, namespace))
    else:
        pytest.fail(f"not a command of ours: {argv}")
    unknown = {name for name in environ if name.startswith("FOREDRAFT_")} - known
    assert not unknown, f"{argv[:3]} does not read {sorted(unknown)}"
    return config
