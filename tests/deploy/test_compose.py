"""docker-compose.yml as Docker Compose itself reads it (its loader holds the published schema); no
engine is used.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing import command_lines, tools
from testing.dockerfile import stages

PROFILES = {
    "cpu": {"namespaces", "gateway", "verifier", "draft", "prometheus", "grafana"},
    "gpu": {"namespaces", "gateway", "verifier-gpu", "draft-gpu", "prometheus", "grafana"},
    "gpu,mps": {
        "namespaces",
        "gateway",
        "verifier-gpu",
        "draft-gpu",
        "prometheus",
        "grafana",
        "mps",
    },
}


def _config(profiles: str) -> dict[str, Any]:
    flags = [f"--profile={profile}" for profile in profiles.split(",")]
    # Nothing of the tester's own settings.
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    text = tools.run("docker-compose", *flags, "config", "--format=json", env=environment)
    return json.loads(text)


@pytest.fixture(scope="module", params=PROFILES)
def profiles(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def services(profiles: str) -> dict[str, dict[str, Any]]:
    return _config(profiles)["services"]


def _module(service: dict[str, Any]) -> str:
    return next((word for word in service["command"] or () if word.endswith("_service")), "")


def test_a_key_that_the_schema_does_not_know_is_found(tmp_path: Path) -> None:
    text = (tools.ROOT / "docker-compose.yml").read_text().replace("read_only:", "readonly:")
    (tmp_path / "compose.yml").write_text(text)
    with pytest.raises(pytest.fail.Exception, match="readonly"):
        tools.run("docker-compose", "-f", str(tmp_path / "compose.yml"), "--profile=cpu", "config")


def test_a_profile_has_its_services(profiles: str, services: dict[str, Any]) -> None:
    assert set(services) == PROFILES[profiles]


def test_everything_is_hardened_and_pinned(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        tag = service["image"].rpartition(":")[2]
        assert tag not in ("", "latest"), name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name


def test_images_are_targets_of_the_dockerfile(services: dict[str, Any]) -> None:
    built = {
        service["image"]: service["build"]["target"]
        for service in services.values()
        if "build" in service
    }
    assert set(built.values()) <= set(stages(tools.ROOT / "Dockerfile"))
    ours = {
        service["image"]
        for service in services.values()
        if service["image"].startswith("foredraft")
    }
    assert set(built) == ours


def test_verifier_and_draft_share_what_they_must(services: dict[str, Any]) -> None:
    assert services["namespaces"]["ipc"] == "shareable"
    pair = [service for service in services.values() if _module(service)]
    assert {_module(service) for service in pair} == {"verify_service", "draft_service"}
    for service in pair:
        assert service["ipc"] == service["pid"] == "service:namespaces"
        assert "namespaces" in service["depends_on"]
        assert {"source": "sockets", "target": "/run/foredraft"}.items() <= service["volumes"][
            0
        ].items()


def test_flags_and_variables_are_ones_that_the_code_reads(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = {}
    for name, service in services.items():
        if not service["image"].startswith("foredraft") or name == "mps":
            continue
        entry = ["python", "-m", "gateway"] if name == "gateway" else []
        environment = {key: value or "" for key, value in service.get("environment", {}).items()}
        config = command_lines.check([*entry, *service["command"]], environment, monkeypatch)
        configs[name.removesuffix("-gpu")] = config
    verifier, draft, gateway = (configs[name] for name in ("verifier", "draft", "gateway"))
    assert gateway.verifier == (verifier.listen,)
    assert verifier.draft == (draft.listen,)
    assert verifier.model_path == draft.model_path == "foredraft-demo"
    for name in ("verifier", "draft"):
        service = services[name] if name in services else services[f"{name}-gpu"]
        assert service["healthcheck"]["test"][-1] == configs[name].listen


def test_variables_reach_the_services() -> None:
    flags = ["--profile=cpu", "config", "--format=json"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "FOREDRAFT_MODEL_PATH": "/models/big",
        "FOREDRAFT_SPECULATIVE_ALGORITHM": "STANDALONE",
        "FOREDRAFT_SPECULATIVE_DRAFT_MODEL_PATH": "/models/small",
    }
    services = json.loads(tools.run("docker-compose", *flags, env=environment))["services"]
    for name in ("verifier", "draft"):
        assert (
            services[name]["environment"].items()
            >= {k: v for k, v in environment.items() if k != "PATH"}.items()
        )
    # Who sets a key must not be left with a gateway that asks for none.
    keyed = {"PATH": "/usr/bin:/bin", "FOREDRAFT_API_KEY": "sesame"}
    services = json.loads(tools.run("docker-compose", *flags, env=keyed))["services"]
    assert services["gateway"]["environment"]["FOREDRAFT_API_KEY"] == "sesame"
    assert "FOREDRAFT_API_KEY" not in services["verifier"]["environment"]
    # Nor Prometheus without it.
    whole = json.loads(tools.run("docker-compose", *flags, env=keyed))
    assert whole["configs"]["gateway-key"]["content"] == "sesame"
    [mounted] = whole["services"]["prometheus"]["configs"]
    scraped = yaml.safe_load((tools.ROOT / "monitoring" / "prometheus.yml").read_text())
    [gateway] = [job for job in scraped["scrape_configs"] if "gateway" in job["job_name"]]
    found = Path("/etc/prometheus") / gateway["authorization"]["credentials_file"]
    assert mounted["source"] == "gateway-key"
    assert Path(mounted["target"]) == found


def test_mounted_files_exist(services: dict[str, Any]) -> None:
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume["source"]
