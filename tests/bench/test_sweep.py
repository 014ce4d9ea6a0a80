"""The search for the best speculation: its grid, its choice, its memory, and a real one on a tiny
model.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.bench import prompts
from foredraft.bench.load import Stage, StageResult
from foredraft.bench.records import Record
from foredraft.bench.statistics import summarize
from foredraft.bench.sweep import (
    PLAIN_AGAIN,
    Case,
    Figures,
    Results,
    Setting,
    equals,
    grid,
    num_requests,
    run,
)
from foredraft.cli import bench
from foredraft.config.speculation import SpeculationConfig
from foredraft.errors import ConfigError, ForedraftError
from testing.peer_server import PeerServer
from testing.stack import eventually, make_model, running_stack

CASES = [Case(1, 0.0), Case(4, 1.0)]
SETTINGS = [
    Setting("NONE"),
    Setting("NGRAM", num_draft_tokens=4),
    Setting("NGRAM", num_draft_tokens=8),
]


def figures(rate: float) -> Figures:
    return Figures(rate, 1.0, 1.5, 0.4, 0.01, 0.02)


class Bench:
    """Servers and measurements that are counted; each rate follows from what is measured."""

    def __init__(self, broken: str = "") -> None:
        self.opened: list[str] = []
        self.measured: list[tuple[str, str]] = []
        self._broken = broken

    @contextlib.contextmanager
    def open(self, setting: Setting) -> Iterator[str]:
        self.opened.append(setting.name)
        if setting.name == self._broken:
            raise ForedraftError("it does not start\n  listening\n  cannot start: no GPU")
        yield f"http://{setting.name}"

    def measure(self, url: str, setting: Setting, case: Case) -> Figures:
        assert url == f"http://{setting.name}"
        self.measured.append((setting.name, case.name))
        return figures(10 + (setting.num_draft_tokens or 0) * case.batch_size)


def test_the_grid_holds_every_tree_that_has_a_sense_once() -> None:
    drafts = {"NGRAM": "", "EAGLE3": "head", "STANDALONE": "small"}
    settings = grid(drafts, [1, 3], [1, 2], [4, 64])
    assert settings[0] == Setting("NONE")
    assert len(set(settings)) == len(settings)
    for setting in settings:
        SpeculationConfig(**setting.values)
    heads = [(s.num_steps, s.topk, s.num_draft_tokens) for s in settings if s.algorithm == "EAGLE3"]
    # 1/2 makes two candidates and 3/2 ten: 4 and 64 rows are too many for the one, 64 for the
    # other.
    assert heads == [(1, 1, 2), (3, 1, 4), (3, 2, 4)]
    assert [s.num_draft_tokens for s in settings if s.algorithm == "NGRAM"] == [4, 64]


def test_flags_are_those_of_serve() -> None:
    assert (
        Setting("EAGLE3", "head", 3, 1, 4).flags
        == "--speculative-algorithm EAGLE3 --speculative-draft-model-path head"
        " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    path, conditions = tmp_path / "found.json", {"model": "m", "flags": ("a", 1)}
    first = Bench()
    going = run(SETTINGS, CASES, Results.open(path, conditions), first.open, first.measure)
    for _ in range(3):
        next(going)
    going.close()
    assert len(first.measured) == 3
    second = Bench()
    results = Results.open(path, conditions)
    list(run(SETTINGS, CASES, results, second.open, second.measure))
    assert second.opened == [SETTINGS[1].name, SETTINGS[2].name, "NONE again"]
    every = [(one.name, case.name) for one in (*SETTINGS, PLAIN_AGAIN) for case in CASES]
    assert first.measured + second.measured == every
    third = Bench()
    assert (
        list(run(SETTINGS, CASES, Results.open(path, conditions), third.open, third.measure)) == []
    )
    assert third.opened == []
    assert Results.open(path, conditions).found == results.found


def test_a_setting_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    broken = Bench(SETTINGS[1].name)
    results = Results.open(path, {})
    found = list(run(SETTINGS, CASES, results, broken.open, broken.measure))
    assert [figures is None for _, _, figures in found] == [False] * 2 + [True] * 2 + [False] * 4
    assert results.errors == {SETTINGS[1].key: "it does not start: cannot start: no GPU"}
    assert json.loads(path.read_text())["errors"] == results.errors
    healthy = Bench()
    list(run(SETTINGS, CASES, Results.open(path, {}), healthy.open, healthy.measure))
    assert healthy.opened == [SETTINGS[1].name, "NONE again"]


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    Results(path, {"model": "a", "seed": 1}).write()
    with pytest.raises(ConfigError, match="another model, seed"):
        Results.open(path, {"model": "b"})
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not the results of a sweep"):
        Results.open(path, {})


def test_the_best_is_that_of_the_geometric_mean(tmp_path: Path) -> None:
    results = Results(tmp_path / "x", {})
    rates = {SETTINGS[0]: (10, 40), SETTINGS[1]: (30, 20), SETTINGS[2]: (18, 41)}
    for setting, pair in rates.items():
        results.found[setting.key] = {
            case.name: figures(rate) for case, rate in zip(CASES, pair, strict=True)
        }
    ranking = results.ranking(SETTINGS, CASES)
    assert [setting for setting, _ in ranking] == [SETTINGS[2], SETTINGS[1], SETTINGS[0]]
    assert ranking[0][1] == pytest.approx(math.sqrt(18 / 10 * 41 / 40))
    assert ranking[1][1] == pytest.approx(math.sqrt(30 / 10 * 20 / 40))
    assert equals(ranking) == []
    assert equals([(SETTINGS[0], 1.0), (SETTINGS[1], 0.98), (SETTINGS[2], 0.9)]) == [SETTINGS[1]]
    assert results.drift(CASES) is None
    results.found[PLAIN_AGAIN.key] = {CASES[0].name: figures(9), CASES[1].name: figures(60)}
    assert results.drift(CASES) == (0.9, 1.5)
    del results.found[SETTINGS[2].key][CASES[0].name]
    assert [setting for setting, _ in results.ranking(SETTINGS, CASES)] == [
        SETTINGS[1],
        SETTINGS[0],
    ]


def test_figures_need_every_answer() -> None:
    failed = Record(0, 0.0, 0.0, 1.0, error="timeout")
    summary = summarize(StageResult(Stage(1), [failed], 1.0))
    with pytest.raises(ForedraftError, match="timeout"):
        Figures.of([summary])


def test_cases_share_no_prompt_of_a_file(tmp_path: Path) -> None:
    """A server keeps its n-grams from case to case."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(11)))
    sources = [prompts.from_file(path, 3, (case, 4)) for case in range(4)]
    assert sorted(source.size or 0 for source in sources) == [2, 3, 3, 3]
    taken = {source.take().text for source in sources for _ in range(source.size or 0)}
    assert len(taken) == 11
    path.write_text('{"prompt": "one"}\n' * 3)
    with pytest.raises(ConfigError, match="3 prompts are too few for 4 cases"):
        prompts.from_file(path, 3, (0, 4))


def test_lines_of_prompts_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85three"}\r\n', encoding="utf-8-sig")
    assert [prompt.text for prompt in prompts.read_file(path)] == ["one\u2028two\x85three"]


def test_requests_come_in_whole_batches() -> None:
    assert [num_requests(batch, 8) for batch in (1, 3, 8, 32)] == [8, 9, 16, 64]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def broken_draft(tmp_path: Path) -> Path:
    """A folder of a model that cannot be served."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def sweep(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    small = ["--batch-size", "1", "--temperature", "0", "--num-prompts", "2", "--output-len", "8"]
    code = bench.main(["speculative", "--disable-tqdm", *small, *argv])
    caught = capsys.readouterr()
    return code, caught.out + caught.err


@pytest.mark.slow
def test_a_real_sweep_goes_on_and_names_flags(
    model: Path,
    broken_draft: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "no header holds\nit")  # services of its own need none
    path = tmp_path / "found.json"
    argv = ["--model-path", str(model), "--algorithm", "NGRAM", "--output-file", str(path)]
    behind = ["--", "--num-threads", "1", "--max-total-tokens", "4096", "--device", "cpu"]
    code, text = sweep(capsys, *argv, "--num-draft-tokens", "4", *behind)
    assert code == 0, text
    before = json.loads(path.read_text())["found"]
    assert {name: list(cases) for name, cases in before.items()} == {
        "NONE": ["batch 1, T=0"],
        "NGRAM -/-/4": ["batch 1, T=0"],
        "NONE again": ["batch 1, T=0"],
    }
    assert "plain decoding once more" in text
    assert f"foredraft serve --model-path {model}" in text
    # A draft that cannot be served fails alone; the rest is known.
    broken = ["--draft", f"STANDALONE={broken_draft}", "--algorithm", "NGRAM", "STANDALONE"]
    plot = ["--plot", str(tmp_path / "heat.png")]
    code, text = sweep(capsys, *argv, "--num-draft-tokens", "4", *broken, *plot, *behind)
    assert code == 0, text
    assert "2 known" in text
    assert "STANDALONE 4/1/5" in text
    assert "failed" in text
    after = json.loads(path.read_text())["found"]
    assert {name: after[name] for name in ("NONE", "NGRAM -/-/4")} == {
        name: before[name] for name in ("NONE", "NGRAM -/-/4")
    }
    assert (tmp_path / "heat.png").stat().st_size > 5_000
    code, text = sweep(capsys, *argv, "--seed", "2", *behind)
    assert code == 2
    assert "another seed" in text


@pytest.mark.slow
def test_a_sweep_in_which_every_draft_failed_has_not_found_the_best(
    model: Path, broken_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model-path", str(model), "--output-file", str(tmp_path / "found.json")]
    broken = ["--draft", f"STANDALONE={broken_draft}", "--algorithm", "STANDALONE"]
    behind = ["--", "--num-threads", "1", "--max-total-tokens", "4096", "--device", "cpu"]
    code, text = sweep(capsys, *argv, *broken, *behind)
    assert code == 1
    assert "STANDALONE 4/1/5" in text
    assert "nothing could be compared with plain decoding" in text
    assert "best over all cases" not in text


def test_a_signal_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="fd-", dir="/tmp"))  # short enough for sockets
    command = [sys.executable, "-m", "foredraft.cli.main", "bench", "speculative"]
    command += ["--model-path", str(model), "--output-file", str(tmp_path / "found.json")]
    process = subprocess.Popen(
        [*command, "--", "--num-threads=1", "--max-total-tokens=4096", "--device=cpu"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: any(runtime.glob("*/gateway.sock")))
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == "stopped; the same command goes on from here\n"
        assert not list(runtime.iterdir())
    finally:
        process.kill()
        shutil.rmtree(runtime)


@pytest.mark.slow
def test_a_running_server_is_asked_for_smaller_trees(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    with running_stack(model, speculative_num_draft_tokens=8) as services:
        argv = ["--base-url", f"{services.urls['http']}/v1", "--output-file", str(path)]
        code, text = sweep(capsys, *argv, "--num-draft-tokens", "4", "64")
        for more, reason in (
            (["--algorithm", "EAGLE3"], "the server drafts by NGRAM"),
            (["--draft", "EAGLE3=x"], "--base-url starts no services"),
            (["--", "--device=cpu"], "--base-url starts no services"),
        ):
            code_of_more, said = sweep(capsys, *argv, *more)
            assert code_of_more == 2
            assert reason in said
    assert code == 0, text
    assert list(json.loads(path.read_text())["found"]) == [
        "NONE",
        "NGRAM -/-/4",
        "NGRAM -/-/8",
        "NONE again",
    ]


def test_only_our_own_servers_have_trees(capsys: pytest.CaptureFixture[str]) -> None:
    with PeerServer().running() as peer:
        code, text = sweep(capsys, "--base-url", peer.url)
    assert code == 2
    assert "not a Foredraft server" in text


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--steps", "0"], "--steps"),
        (["--draft", "EAGLE3"], "--draft"),
        (["--output-len", "0"], "--output-len: must be at least 1"),
        (["--repeats", "0"], "--repeats: must be at least 1"),
        (["--num-prompts", "0"], "--num-prompts: must be at least 1"),
        (["--temperature", "nan"], "--temperature: must be at least 0"),
        (["--output-file", "/no/such/found.json"], "--output-file: /no/such is no folder"),
        (["--plot", "/no/such/heat.png"], "--plot: /no/such is no folder"),
        (["--plot", "heat.txt"], "--plot: heat.txt is no picture; take .png"),
        (["--", "--speculative-num-steps", "3"], "--speculative-num-steps"),
        (["--draft", "EAGLE3=/no/such/head"], "--draft EAGLE3: /no/such/head: no such directory"),
        (["--dataset-path", "/no/such/file"], "--dataset-path"),
        (["--draft", "EAGLE3=x", "--algorithm", "DFLASH"], "--draft DFLASH=PATH"),
        (
            [
                "--draft",
                "EAGLE3=x",
                "--algorithm",
                "EAGLE3",
                "--topk",
                "2",
                "--num-draft-tokens",
                "999",
            ],
            "no tree of these sizes",
        ),
    ],
)
def test_wrong_flags_are_told(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = sweep(capsys, *argv)
    assert code == 2
    assert reason in text
