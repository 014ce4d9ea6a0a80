"""`foredraft bench serve` against the real stack, and against a server of another make."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.bench import peers
from foredraft.bench.http_client import HttpClient
from foredraft.bench.load import LoadGenerator, Stage, StageResult
from foredraft.bench.prompts import Prompt
from foredraft.bench.records import Record
from foredraft.bench.statistics import summarize
from foredraft.bench.stream import AnswerReader
from foredraft.cli import bench
from foredraft.cli.serve_config import resolve_models
from testing.peer_server import PeerServer
from testing.stack import make_model, running_stack


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The bundled model, drafted from n-grams."""
    with running_stack(Path(resolve_models({})["model_path"])) as services:
        yield dict(services.urls)


@pytest.fixture(scope="module")
def url(urls: dict[str, str]) -> str:
    return urls["http"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = bench.main(["serve", "--disable-tqdm", *argv])
    caught = capsys.readouterr()
    return code, caught.out + caught.err


def test_ranks_are_told_by_parts_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.jsonl"
    argv = ["--num-prompts", "3", "--output-len", "24", "--max-concurrency", "1"]
    model = make_model(tmp_path / "model")
    with running_stack(model, speculative_algorithm="NONE", tensor_parallel_size=2) as services:
        url = services.urls["http"]
        code, text = run(capsys, "--base-url", url, *argv, "--output-file", str(output))
        figures = httpx.get(f"{url}/dashboard/figures", timeout=60).json()["metrics"]
    assert code == 0, text
    (found,) = lines(output)
    parts = {"products", "all_reduce", "waiting"}
    assert {rank: set(own) for rank, own in found["rank_step_ms"].items()} == {
        "0": parts,
        "1": parts,
    }
    for rank, own in found["rank_step_ms"].items():
        assert f"rank {rank} in a step: " in text
        # A step of this model has some milliseconds, on a busy machine too.
        assert 0 < own["products"] < 10_000
        assert 0 < own["all_reduce"] < 10_000
    # Not all of the same steps: those of the warm-up are among the latter.
    whole = figures["step_seconds_sum"] / figures["step_seconds_count"]
    assert sum(found["rank_step_ms"]["0"].values()) < 20e3 * whole


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openai", "openai-chat", "native"])
def test_ten_prompts_at_the_real_stack(
    url: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.jsonl"
    argv = ["--base-url", url, "--backend", backend, "--num-prompts", "10", "--output-len", "12"]
    argv += ["--max-concurrency", "4", "--goodput", "ttft:60000", "--output-file", str(output)]
    code, text = run(capsys, *argv, "--output-details", "--plot", str(tmp_path / "plot.png"))
    assert code == 0, text
    (found,) = lines(output)
    assert (found["completed"], found["failures"]) == (10, {})
    assert found["total_output_tokens"] == 120 == sum(found["output_lens"])
    assert found["total_input_tokens"] > 20
    assert found["exact_token_times"] is True
    assert found["accept_length"] >= 1
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 0 < found["median_ttft_ms"] <= found["median_e2e_latency_ms"]
    assert sum(count for gaps in found["itls"] for _, count in gaps) <= 120 - 10
    assert "10 of 10 requests" in text
    assert "accept length" in text
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openai", "native"])
def test_accept_length_is_the_servers_own(url: str, backend: str) -> None:
    async def ask() -> tuple[Record, bytes]:
        client = HttpClient(url)
        peer = await peers.discover(client, backend)
        prompt = Prompt("one two three one two three one two")
        body = peer.body(prompt, 24, 0.0, ignore_eos=True, extra={})
        record, raw = Record(0, 0.0, 0.0), b""
        reader = AnswerReader(record)

        def on_body(now: float, data: bytes) -> None:
            nonlocal raw
            raw += data
            reader.feed(now, data)

        await client.post(peer.path, body, on_body)
        reader.finish()
        client.close()
        return record, raw

    record, raw = asyncio.run(ask())
    told = re.findall(rb'accept_length":([0-9.]+)', raw)
    assert summarize(StageResult(Stage(1), [record], 1.0)).accept_length == pytest.approx(
        float(told[-1])
    )
    assert record.output_tokens == 24


@pytest.mark.parametrize("backend", ["openai", "vllm-chat"])
def test_a_foreign_server(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.jsonl"
    with PeerServer().running() as peer:
        argv = ["--base-url", peer.url, "--backend", backend, "--num-prompts", "10"]
        code, text = run(
            capsys,
            *argv,
            "--output-len",
            "5",
            "--max-concurrency",
            "2",
            "--output-file",
            str(output),
        )
    assert code == 0, text
    (found,) = lines(output)
    assert found["completed"] == 10
    assert found["total_output_tokens"] == 50
    assert found["model"] == "words-1"
    assert found["accept_length"] is None
    # The server's own pauses are the least that can be measured.
    assert found["median_ttft_ms"] >= 50
    assert found["median_e2e_latency_ms"] >= 50 + 4 * 10 - 1
    # What a busy client reads late it reads together; the last token comes no earlier for that.
    assert found["mean_ttft_ms"] + 4 * found["mean_itl_ms"] >= 50 + 4 * 10 - 1
    assert "apportioned" in text


def test_random_prompts_have_the_wanted_number_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.jsonl"
    for dataset in (["random", "--random-input-len", "90"], ["generated-shared-prefix"]):
        with PeerServer(0.0, 0.0).running() as peer:
            argv = ["--base-url", peer.url, "--num-prompts", "6", "--output-len", "1"]
            argv += ["--dataset-name", *dataset, "--output-file", str(output), "--output-details"]
            code, text = run(capsys, *argv)
            assert code == 0, text
        prompts = [body["prompt"] for body in peer.bodies[-6:]]
        assert len(set(prompts)) == 6
    found, _ = lines(output)
    assert found["input_lens"] == [90] * 6


@pytest.mark.slow
def test_cached_prompts_are_told_where_another_seed_has_others(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--base-url", url, "--num-prompts", "6", "--output-len", "2", "--max-concurrency", "1"]
    note = "another --seed gives prompts that it has not seen"
    words = [*argv, "--seed", "71", "--dataset-name", "random"]
    assert note not in run(capsys, *words)[1]
    assert note in run(capsys, *words)[1]
    shared = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2"]
    _, text = run(capsys, *argv, "--seed", "72", *shared)
    assert " from the cache" in text
    assert "(0 from the cache" not in text
    assert note not in text, "prompts of one run share their begins"


def test_latency_counts_from_when_a_request_was_due() -> None:
    """A server that works on one request at a time: who is due while it works waits, whether sent
    or not.
    """

    async def ask(url: str, limit: int | None) -> StageResult:
        client = HttpClient(url)
        peer = await peers.discover(client, "openai")

        def request() -> tuple[Prompt, bytes]:
            return Prompt("a"), peer.body(Prompt("a"), 1, 0.0, ignore_eos=False, extra={})

        stage = Stage(8, rate=1000.0, max_concurrency=limit)
        result = await LoadGenerator(client, peer, request).run(stage)
        client.close()
        return result

    for limit in (None, 1):
        with PeerServer(first=0.2, slots=1).running() as peer:
            result = asyncio.run(ask(peer.url, limit))
        waits = sorted(record.ttft or 0.0 for record in result.records)
        # All were due within a few milliseconds, so the last waited for all before it.
        for place, wait in enumerate(waits):
            assert wait >= 0.2 * (place + 1) - 0.03
        if limit is None:
            # They were sent then, too: the client does not wait for answers.
            assert max(peer.arrived) - min(peer.arrived) < waits[-1] * 3 / 4


def test_failures_are_counted_and_kept_out_of_latencies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.jsonl"
    with PeerServer(0.0, 0.0).running() as peer:
        peer.fail_every = 4
        argv = ["--base-url", peer.url + "/v1", "--num-prompts", "12", "--output-len", "2"]
        code, text = run(capsys, *argv, "--warmup-requests", "0", "--output-file", str(output))
    assert code == 0
    (found,) = lines(output)
    assert (found["completed"], found["failures"]) == (9, {"HTTP 500": 3})
    assert "out of luck" in text


def test_prompts_of_a_file_are_sent_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["one", "zwei ü", "three\nlines"]
    told = [{"prompt": texts[0]}, {"text": texts[1]}, {"turns": [texts[2], "more"]}]
    path.write_text("\n".join(map(json.dumps, told)))
    with PeerServer(0.0, 0.0).running() as peer:
        argv = ["--base-url", peer.url, "--num-prompts", "6", "--output-len", "1"]
        extra = ["--extra-request-body", '{"temperature": 0.25}']
        code, text = run(
            capsys, *argv, "--dataset-path", str(path), "--warmup-requests", "0", *extra
        )
    assert code == 0, text
    assert sorted(body["prompt"] for body in peer.bodies) == sorted(texts * 2)
    assert {body["temperature"] for body in peer.bodies} == {0.25}
    assert "more than once" in text


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--goodput", "ttft"], "--goodput"),
        (["--output-file", "/no/such/found.jsonl"], "--output-file: /no/such is no folder"),
        (["--plot", "/no/such/plot.png"], "--plot: /no/such is no folder"),
        (["--plot", "plot"], "--plot: plot is no picture; take .png"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["--ramp-up-end-rps", "3"], "--ramp-up-strategy"),
        (["--base-url", "localhost:3"], "--base-url"),
        (["--port", "1"], "`foredraft serve` starts one, --base-url names another"),
        (["--header", "x"], "--header"),
        (["--header", "Authorization=Bearer ключ"], "--header takes NAME=VALUE, ASCII"),
        (["--port", "99999"], "--base-url http://127.0.0.1:99999: Port out of range"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--warmup-requests", "-1"], "--warmup-requests must be at least 0"),
    ],
)
def test_wrong_flags_and_no_server_are_told(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, *argv)
    assert code == 2
    assert reason in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--output-len", "0"],
        ["--dataset-name", "random", "--random-input-len", "0"],
        ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "0"],
    ],
)
def test_lengths_of_nothing_are_told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with PeerServer().running() as peer:
        code, text = run(capsys, "--base-url", peer.url, *argv)
    assert code == 2
    assert f"{argv[-2]} must be at least 1" in text


@pytest.mark.parametrize(
    "bad", ['{"question": "not known"}', '{"messages": []}', '{"messages": "a text"}']
)
def test_a_file_that_holds_no_prompts_is_told(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{bad}\n')
    with PeerServer().running() as peer:
        code, text = run(capsys, "--base-url", peer.url, "--dataset-path", str(path))
    assert code == 2
    assert "line 2: " in text
    assert "messages" in text


def test_commands_are_taught(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    assert "speculative" in capsys.readouterr().out
    assert bench.main(["serv"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


def test_two_servers_under_one_load(url: str, tmp_path: Path) -> None:
    """`benchmarks.http_load`: several processes, real answers, and a table that an earlier run
    joins.
    """
    kept = tmp_path / "kept.jsonl"
    argv = [sys.executable, "-m", "benchmarks.http_load", "--concurrency", "3", "--requests", "2"]
    argv += [
        "--processes",
        "2",
        "--prompt-words",
        "5",
        "--output-tokens",
        "8",
        "--append",
        str(kept),
    ]
    for name in ("one", "two"):
        done = subprocess.run(
            [*argv, "--server", f"{name}={url}"], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
    first, second = lines(kept)
    assert (first["server"], second["server"]) == ("one", "two")
    assert first["failed"] == 0
    assert 5 <= first["prompt_tokens"] <= 60
    ratio = first["tokens_per_second"] / second["tokens_per_second"]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("| 3 | ")
    assert last.endswith(f" {ratio:.2f} |")


def test_streams_over_grpc_beside_http(urls: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    argv = [sys.executable, "-m", "benchmarks.http_load", "--concurrency", "3", "--requests", "2"]
    argv += ["--processes", "2", "--prompt-words", "5", "--output-tokens", "8"]
    argv += ["--server", f"http={urls['http']}", "--server", f"grpc=grpc://{urls['grpc']}"]
    done = subprocess.run(
        [*argv, "--append", str(kept)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for found in lines(kept):
        assert found["failed"] == 0
        assert 5 <= found["prompt_tokens"] <= 60
        assert 0 < found["ttft_p50"] <= found["ttft_max"]
        assert found["tokens_per_second"] > 0
    refused = subprocess.run(
        [*argv, "--system-words", "5"], capture_output=True, text=True, timeout=240
    )
    assert refused.returncode == 2
    assert "--system-words: conversations are sent over HTTP" in refused.stderr


CONVERSATIONS = ["--concurrency", "2", "--processes", "2", "--prompt-words", "3"]
CONVERSATIONS += ["--output-tokens", "4", "--system-words", "30"]


def conversations(url: str, *argv: str) -> str:
    command = [sys.executable, "-m", "benchmarks.http_load", "--server", f"one={url}"]
    done = subprocess.run(
        [*command, *CONVERSATIONS, *argv], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_turn_of_a_conversation_has_the_ones_before() -> None:
    """`benchmarks.http_load --system-words` against a server of another make."""
    with PeerServer(0.0, 0.0).running() as peer:
        conversations(peer.url, "--requests", "3")
    # The unmeasured load of one turn each, then two conversations of three turns.
    talks = [body["messages"] for body in peer.bodies]
    assert [len(talk) for talk in talks[:2]] == [2, 2]
    measured = talks[2:]
    assert sorted(len(talk) for talk in measured) == [2, 2, 4, 4, 6, 6]
    (system,) = {talk[0]["content"] for talk in measured}
    assert (measured[0][0]["role"], len(system.split())) == ("system", 30)
    assert system != talks[0][0]["content"]  # the first load left nothing of use in a cache
    whole = [talk for talk in measured if len(talk) == 6]
    assert whole[0][1] != whole[1][1]
    for talk in whole:
        assert [message["role"] for message in talk[1:]] == ["user", "assistant"] * 2 + ["user"]
        assert talk[2]["content"] == talk[4]["content"] == "word " * 4
        assert talk[:2] in measured
        assert talk[:4] in measured


def test_conversations_find_what_was_said_in_the_cache(url: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    text = conversations(url, "--requests", "3", "--append", str(kept))
    (found,) = lines(kept)
    assert (found["failed"], found["load"]["system_words"]) == (0, 30)
    # The second and third turns find almost all that was said before them.
    assert 0.5 < found["cached_tokens"] / found["prompt_tokens"] < 1
    assert found["later_ttft_p50"] > 0
    assert "TTFT p50 of later turns" in text


def test_the_ceiling_of_a_gateway(tmp_path: Path) -> None:
    """`benchmarks.gateway_ceiling`: every chunk is counted, on each front."""
    kept = tmp_path / "kept.jsonl"
    command = [sys.executable, "-m", "benchmarks.gateway_ceiling", "--streams", "6"]
    command += ["--seconds", "1", "--chunks-per-second", "300", "--out", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = lines(kept)
    assert [one["load"]["front"] for one in found] == ["completions", "chat", "grpc"]
    for one in found:
        assert one["load"]["chunks"] == 50
        # A late gateway joins chunks, and HTTP may end an answer with an event that has no token.
        assert 0.9 < one["tokens_in_a_chunk"] <= 50
        assert 1 < one["microseconds"] < 100_000
        assert one["ceiling"] == pytest.approx(1e6 / one["microseconds"])
