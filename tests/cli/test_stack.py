"""Services that `foredraft serve` would start: flags, ports, directories and models."""

import os
import re
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import serve_config, stack
from foredraft.cli.serve import Terminal
from foredraft.errors import CheckpointError, ConfigError
from foredraft.models.registry import resolve_model_path
from testing.checkpoints import make_checkpoint

FREE = {"port": 0, "grpc_port": 0}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # pytest's own directories are too long for sockets.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def commands(**values: object) -> dict[str, tuple[str, ...]]:
    supervisor = stack.make_supervisor(FREE | values)
    supervisor.stop()
    return {service.name: service.command for service in supervisor.services}


def test_services_are_wired_by_sockets_in_a_private_directory(runtime: Path) -> None:
    supervisor = stack.make_supervisor(FREE)
    [directory] = runtime.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    by_name = {service.name: service for service in supervisor.services}
    assert list(by_name) == ["gateway", "verify", "draft"]
    verify = f"unix:{directory}/verify.sock"
    draft = f"unix:{directory}/draft.sock"
    assert f"--verifier={verify}" in by_name["gateway"].command
    assert {f"--listen={verify}", f"--draft={draft}"} <= set(by_name["verify"].command)
    assert f"--listen={draft}" in by_name["draft"].command
    assert by_name["draft"].max_deaths is None
    supervisor.stop()
    assert not directory.exists()


def test_each_service_gets_its_own_flags() -> None:
    by_name = commands(
        model_path="/",
        log_level="debug",
        max_running_requests=3,
        request_timeout=9.0,
        draft_metrics_port=0,
    )
    assert {name for name, command in by_name.items() if "--log-level=debug" in command} == {
        "gateway",
        "verify",
        "draft",
    }
    assert {name for name, command in by_name.items() if "--model-path=/" in command} == {
        "verify",
        "draft",
    }
    assert "--max-running-requests=3" in by_name["verify"]
    assert "--max-running-requests=3" not in by_name["draft"]
    assert "--request-timeout=9.0" in by_name["gateway"]


def test_without_drafting_there_is_no_draft() -> None:
    by_name = commands(speculative_algorithm="NONE")
    assert list(by_name) == ["gateway", "verify"]
    assert "--draft=" in by_name["verify"]


def test_a_further_host_of_ranks_has_a_verifier_process_alone() -> None:
    where = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.5:50054"}
    by_name = commands(device="cpu", tensor_parallel_size=4, **where)
    assert list(by_name) == ["verify"]
    assert "--node-rank=1" in by_name["verify"]
    assert "--draft=" in by_name["verify"]


@pytest.mark.parametrize("rank", [0, 1])
def test_services_share_no_secret(rank: int) -> None:
    nodes = {"nnodes": 2, "node_rank": rank, "dist_init_addr": "10.0.0.5:50054"}
    given = {"FOREDRAFT_API_KEY": "secret", "HOME": "/"}
    values = FREE | {"device": "cpu", "tensor_parallel_size": 4, **nodes}
    supervisor = stack.make_supervisor(values, environment=given)
    supervisor.stop()
    assert supervisor._environment["HOME"] == "/"
    assert "FOREDRAFT_API_KEY" not in supervisor._environment


@pytest.mark.parametrize(("visible", "card"), [("", "1"), ("4,6", "6")])
def test_drafts_see_the_card_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch, visible: str, card: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    supervisor = stack.make_supervisor(FREE | {"draft_device": 1})
    supervisor.stop()
    cards = [one.environment.get("CUDA_VISIBLE_DEVICES") for one in supervisor.services]
    assert cards == [None, None, card]


def test_a_draft_s_card_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_config, "count_gpus", lambda: 2)
    for visible in ("", "0,2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(
            ConfigError, match="--draft-device 2 must be below 2, the number of vis"
        ):
            serve_config.check(FREE | {"device": "cuda", "draft_device": 2})


def test_drafting_ahead_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_config, "count_gpus", lambda: 2)
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "org/draft"}
    wanted = draft | {"speculative_draft_ahead": True}
    with pytest.raises(ConfigError, match="--speculative-draft-ahead needs a GPU"):
        serve_config.check(FREE | {"device": "cpu"} | wanted)
    for card in ({}, {"draft_device": 1}):
        serve_config.check(FREE | {"device": "cuda"} | card | wanted)


@pytest.mark.parametrize(
    ("flags", "are_ahead"),
    [
        ({"speculative_algorithm": "STANDALONE", "draft_device": 1}, [True]),
        ({"speculative_algorithm": "STANDALONE", "draft_device": 0}, [None]),
        ({"speculative_algorithm": "STANDALONE"}, [None]),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "draft_device": 1,
                "tensor_parallel_size": 2,
            },
            [None],
        ),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "draft_device": 1,
                "tensor_parallel_size": 2,
                "nnodes": 2,
                "dist_init_addr": "10.0.0.5:50054",
            },
            [True],
        ),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "draft_device": 1,
                "speculative_draft_ahead": False,
            },
            [False],
        ),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "draft_device": 1,
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 2,
                "speculative_num_draft_tokens": 6,
            },
            [False],
        ),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "draft_device": 1,
                "speculative_num_steps": 9,
            },
            [False],
        ),
        ({"speculative_algorithm": "STANDALONE,NGRAM", "draft_device": 1}, [True, False]),
        ({"speculative_algorithm": "NGRAM", "draft_device": 1}, [False]),
    ],
)
def test_drafts_on_cards_of_their_own_draft_ahead(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], are_ahead: list[bool | None]
) -> None:
    monkeypatch.setattr(serve_config, "count_gpus", lambda: 2)
    if "STANDALONE" in flags["speculative_algorithm"]:
        flags = {**flags, "speculative_draft_model_path": "foredraft-demo-draft"}
    supervisor = stack.make_supervisor(FREE | {"device": "cuda"} | flags)
    supervisor.stop()
    found: list[bool | None] = []
    for service in supervisor.services[2:]:
        given = [flag for flag in service.command if "draft-ahead" in flag]
        found.append(given[0] == "--speculative-draft-ahead" if given else None)
    assert found == are_ahead


def test_each_of_several_drafts_is_a_service() -> None:
    supervisor = stack.make_supervisor(
        FREE
        | {
            "speculative_algorithm": "EAGLE3,NGRAM",
            "speculative_draft_model_path": "foredraft-demo-eagle3",
            "speculative_num_steps": 3,
        }
    )
    supervisor.stop()
    by_name = {service.name: service for service in supervisor.services}
    assert list(by_name) == ["gateway", "verify", "draft-eagle3", "draft-ngram"]
    for name, algorithm, model in (
        ("draft-eagle3", "EAGLE3", "foredraft-demo-eagle3"),
        ("draft-ngram", "NGRAM", ""),
    ):
        service = by_name[name]
        assert f"--speculative-algorithm={algorithm}" in service.command
        assert f"--speculative-draft-model-path={model}" in service.command
        assert f"--draft={algorithm}={service.health}" in by_name["verify"].command
        assert service.max_deaths is None
    pages = [supervisor.urls[f"{name}_metrics"] for name in ("verify", *list(by_name)[2:])]
    assert len(set(pages)) == 3
    shown = [flag for flag in by_name["gateway"].command if flag.startswith("--dashboard-metrics=")]
    assert [f"http://{flag.partition('=')[2]}/metrics" for flag in shown] == pages


def test_each_of_several_models_goes_to_its_own_draft() -> None:
    values = FREE | {
        "speculative_algorithm": "EAGLE3,STANDALONE,NGRAM",
        "speculative_draft_model_path": (
            "standalone=foredraft-demo-draft,EAGLE3=foredraft-demo-eagle3"
        ),
    }
    resolved = serve_config.resolve_models(values)
    supervisor = stack.make_supervisor(resolved)
    supervisor.stop()
    head, small = map(resolve_model_path, ("foredraft-demo-eagle3", "foredraft-demo-draft"))
    by_name = {service.name: service.command for service in supervisor.services}
    for name, path in (("verify", f"EAGLE3={head},STANDALONE={small}"), ("draft-eagle3", head)):
        assert f"--speculative-draft-model-path={path}" in by_name[name]
    assert f"--speculative-draft-model-path={small}" in by_name["draft-standalone"]
    assert "--speculative-draft-model-path=" in by_name["draft-ngram"]


def test_free_ports_are_chosen_and_shown() -> None:
    supervisor = stack.make_supervisor(FREE)
    supervisor.stop()
    ports = [url.removesuffix("/metrics").rpartition(":")[2] for url in supervisor.urls.values()]
    assert len(set(ports)) == 4
    assert "0" not in ports
    assert supervisor.urls["metrics"] == supervisor.urls["http"] + "/metrics"


def test_a_port_in_use_is_refused_before_anything_starts(busy_port: int, runtime: Path) -> None:
    with pytest.raises(ConfigError, match=f"--port {busy_port} on 127.0.0.1"):
        stack.make_supervisor({"port": busy_port})
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 4242, "grpc_port": 4242}, "--port and --grpc-port are both 4242"),
        ({"port": 70000}, "--port must be in"),
        ({"model_path": "/nowhere/model"}, "--model-path /nowhere/model: no such"),
        ({"model_path": "nowhere.gguf"}, "--model-path nowhere.gguf: no such"),
        ({"speculative_algorithm": "STANDALONE"}, "--speculative-draft-model-path"),
        ({"quantization": "fp8", "device": "cpu"}, "--quantization fp8 does not go with a CPU"),
        (
            {"quantization_group_size": "64"},
            "--quantization-group-size 64 has no use with --quantization unquant: give",
        ),
        (
            {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "./nowhere"},
            r"--speculative-draft-model-path \./nowhere: no such",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_config.check(FREE | values)


def test_a_model_directory_is_served_under_its_name(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "Some-Model-1.5B")
    values = {"model_path": str(directory), "port": 1}
    found = {"served_model_name": "Some-Model-1.5B", "tokenizer_path": str(directory)}
    assert serve_config.resolve_models(values) == values | found
    named = values | {"served_model_name": "chat", "tokenizer_path": "elsewhere"}
    assert serve_config.resolve_models(named) == named


def test_a_model_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no-such-model"):
        serve_config.resolve_models({"model_path": "no-such-model"})


def test_directories_of_dead_supervisors_are_removed(runtime: Path) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    dead = runtime / f"foredraft-{done.pid}-abc"
    alive = runtime / f"foredraft-{os.getpid()}-abc"
    other = runtime / "foredraft-notes-abc"
    for directory in (dead, alive, other):
        directory.mkdir()
    made = stack.make_runtime_directory()
    assert {path.name for path in runtime.iterdir()} == {alive.name, other.name, made.name}


def test_a_base_too_long_for_sockets_is_not_used(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = runtime / ("x" * 90)
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    made = stack.make_runtime_directory()
    try:
        assert len(str(made / "verify.sock")) < 100
    finally:
        made.rmdir()


@pytest.mark.parametrize(
    ("listen", "reachable"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("10.0.0.8", "10.0.0.8"),
        ("box.example", "box.example"),
    ],
)
def test_urls_lead_back_to_this_machine(listen: str, reachable: str) -> None:
    assert stack.reachable_host(listen) == reachable


@pytest.mark.parametrize("given", [{}, {"api_key": "a"}, {"api_key_file": "keys"}])
def test_the_first_request_shows_where_a_key_goes(
    given: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    urls = {"http": "http://127.0.0.1:1", "grpc": "127.0.0.1:2"}
    Terminal().ready(urls, serve_config.ServeConfig(model_path="/models/tiny", **given))
    shown = capsys.readouterr().out
    assert "curl http://127.0.0.1:1/v1/completions" in shown
    assert ("Authorization: Bearer KEY" in shown) == bool(given)


@pytest.mark.parametrize(
    ("flag", "text", "says"),
    [
        ("api_key_file", None, "--api-key-file .*: No such file"),
        ("api_key_file", "one\n", "--api-key-file .*, line 1: needs a name and a secret"),
        ("chat_template", None, "--chat-template .*: No such file"),
        ("chat_template", "{% if %}", "--chat-template .*"),
        ("ssl_certfile", None, "--ssl-certfile and --ssl-keyfile are needed together"),
    ],
)
def test_wrong_files_are_found_before_anything_is_loaded(
    tmp_path: Path, flag: str, text: str | None, says: str
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        serve_config.check({**FREE, flag: str(path)})


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "HTTPS://chat"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=f"--allowed-origin {origin}: must be"):
        serve_config.check({**FREE, "allowed_origin": ("https://chat.example:8443", "*", origin)})


@pytest.mark.parametrize(
    "host",
    ["https://llm.example", "llm.example:30000", "llm.example/v1", "*llm.example", "a b", "*."],
)
def test_a_host_that_no_request_has_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--allowed-host {re.escape(host)}: must be"):
        serve_config.check({**FREE, "allowed_host": ("*", "*.b.example", "LLM.Example", host)})


def test_a_wrong_certificate_is_named(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.write_text("")
    for key in (missing, empty):
        with pytest.raises(
            ConfigError,
            match=f"{key}: No such file" if key == missing else f"{key}: one of them is not",
        ):
            serve_config.check({**FREE, "ssl_certfile": str(empty), "ssl_keyfile": str(key)})
