"""A verifier of two ranks as it is shipped: what it says of itself, and ranks that die or stand
still under a request.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.cli.serve_config import check, resolve_models
from foredraft.cli.stack import LocalStack
from foredraft.config.options import to_flags
from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from foredraft.rpc.channel import check_health
from foredraft.rpc.lifetime import child_environment
from foredraft.types import SamplingParams
from testing.checkpoints import EOS, make_checkpoint
from testing.engines import Job, running_engine
from testing.quantized_checkpoints import FORMATS, tiny_llama, write
from testing.reference import Reference
from testing.segments import segments
from testing.stack import eventually, long_answer, make_model, running_stack
from verify_service.executor.ranks.board import Board
from verify_service.executor.ranks.messages import Kind, kind_of
from verify_service.startup import load_target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), context_length=4096)


def streamed_errors(url: str, begun: threading.Event) -> list[dict[str, Any]]:
    """Errors that end a stream which has begun, and has far more to say."""
    asked = {"prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    errors = []
    with (
        httpx.Client(base_url=url, timeout=120) as http,
        http.stream("POST", "/v1/completions", json=asked) as reply,
    ):
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                begun.set()
                event = json.loads(line.removeprefix("data: "))
                errors += [event["error"]] if "error" in event else []
    return errors


def num_running(http: httpx.Client) -> int:
    """Number of requests that a gateway's verifiers compute."""
    loads = http.get("/get_server_info").json()["verifiers"].values()
    return sum(load["running"] for load in loads)


def has_verifier(stack: LocalStack) -> bool:
    """Returns whether the stack's verifier has been started and has its ranks."""
    [verifier] = [state.pid for state in stack.states() if state.name == "verify"]
    return verifier is not None and len(workers_of(verifier)) == 1


def workers(stack: LocalStack) -> list[int]:
    """Processes that the stack's verifier has started as ranks."""
    [verifier] = [state.pid for state in stack.states() if state.name == "verify"]
    assert verifier is not None
    return workers_of(verifier)


def workers_of(verifier: int) -> list[int]:
    """Processes that a verifier has started as ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"verify_service.rank" in command and parent == verifier:
                    found.append(int(entry.name))
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended, and was reaped by whoever it belongs to."""
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_two_ranks_answer_and_a_lost_one_ends_the_verifier(model: Path) -> None:
    """The same text as one rank's, also from the verifier that is started after a rank has died or
    stood still.
    """
    with running_stack(model, speculative_algorithm="NONE") as stack:
        expected = long_answer(stack.urls["http"])
    lines: list[str] = []
    with running_stack(model, lines, tensor_parallel_size=2) as stack:
        url = stack.urls["http"]
        assert long_answer(url) == expected
        info = httpx.get(f"{url}/get_server_info", timeout=60).json()
        assert info["tp_size"] == 2
        for number, told in (
            (signal.SIGKILL, "was ended by SIGKILL"),
            (signal.SIGSTOP, "has shown no sign of life for 8 s"),
        ):
            eventually(lambda: has_verifier(stack))
            [worker] = workers(stack)
            [verifier] = [state.pid for state in stack.states() if state.name == "verify"]
            assert verifier is not None
            sentence = f"rank 1 of 2 (pid {worker}) {told}: ending this verifier"
            with (
                httpx.Client(base_url=url, timeout=60) as http,
                concurrent.futures.ThreadPoolExecutor(2) as pool,
            ):
                begun = threading.Event()
                streamed = pool.submit(streamed_errors, url, begun)
                assert begun.wait(120)
                # Under way; it is not streamed, so the gateway asks again, and nobody sees the
                # loss.
                asked = pool.submit(long_answer, url)
                eventually(lambda: num_running(http) == 2 or asked.done())  # noqa: B023
                os.kill(worker, number)
                eventually(lambda: is_gone(verifier) and is_gone(worker))  # noqa: B023
                assert asked.result() == expected
                [error] = streamed.result()
                assert (error["code"], error["retryable"]) == ("unavailable", True)
            assert not segments(verifier)
            assert any(sentence in line for line in lines)
            assert not [line for line in lines if "Traceback" in line or "Error" in line]
        eventually(lambda: has_verifier(stack))
        [worker] = workers(stack)
    eventually(lambda: is_gone(worker))


def test_a_rank_0_that_stands_still_is_named_by_another(model: Path, tmp_path: Path) -> None:
    """No supervisor is there to kill it earlier or later."""
    address, log = f"unix:{tmp_path}/verify.sock", tmp_path / "log"
    flags = {"model_path": str(model), "device": "cpu", "num_threads": 1, "listen": address}
    command = [sys.executable, "-m", "verify_service"]
    command += to_flags(flags | {"tensor_parallel_size": 2, "speculative_algorithm": "NONE"})
    with log.open("wb") as file:
        verifier = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=child_environment()
        )
    try:
        eventually(lambda: check_health(address) == "SERVING", 600)
        [worker] = workers_of(verifier.pid)
        verifier.send_signal(signal.SIGSTOP)
        assert verifier.wait(600) == -signal.SIGKILL
        eventually(lambda: is_gone(worker), 600)
    finally:
        verifier.kill()
        verifier.wait()
    lines = log.read_text().splitlines()
    told = f"rank 0 of 2 (pid {verifier.pid}) has shown no sign of life for 8 s: ending this"
    assert [told in line for line in lines].count(True) == 1
    assert not [line for line in lines if "Traceback" in line]


def test_workers_go_with_a_verifier_that_is_killed(model: Path) -> None:
    with running_stack(model, speculative_algorithm="NONE", tensor_parallel_size=2) as stack:
        [worker] = workers(stack)
        [verifier] = [state.pid for state in stack.states() if state.name == "verify"]
        assert verifier is not None
        os.kill(verifier, signal.SIGKILL)
        eventually(lambda: is_gone(worker))


def spied_kinds(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """Returns a list that collects the kinds of rank 0's messages from now on."""
    kinds: list[Kind] = []
    write = Board.write

    def spy(board: Board, message: bytes) -> None:
        kinds.append(kind_of(message))
        write(board, message)

    monkeypatch.setattr(Board, "write", spy)
    return kinds


def test_log_probabilities_and_filters_of_two_ranks_are_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside sequences whose logits are not gathered, in one batch."""
    target = make_checkpoint(tmp_path)
    asked = (
        {"logprobs": 2},
        {},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
        {"temperature": 0.0},
    )
    jobs = [
        Job([5, 6, 7, 8 + i] * 3, SamplingParams(max_new_tokens=12, seed=i, **one))
        for i, one in enumerate(asked)
    ]
    kinds, results = spied_kinds(monkeypatch), []
    for size in (1, 2):
        with running_engine(target, "NONE", tensor_parallel_size=size) as harness:
            results.append(harness.run(jobs))
    assert {Kind.CHOICE, Kind.GATHER, Kind.LOGITS} <= set(kinds)
    for whole, shared in zip(*results, strict=True):
        assert shared.tokens == whole.tokens
        for name in ("logprobs", "prompt_logprobs"):
            own, theirs = getattr(shared, name), getattr(whole, name)
            assert [one.top_tokens for one in own] == [one.top_tokens for one in theirs]
            values = [[one.logprob, *one.top_logprobs] for one in own]
            assert values == [pytest.approx([o.logprob, *o.top_logprobs], abs=1e-4) for o in theirs]


def test_four_ranks_of_which_two_hold_the_same_key_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is the one that the rule gives after those before it, by transformers."""
    target = make_checkpoint(tmp_path)
    jobs = [
        Job([5, 6, 7, 8] * i, SamplingParams(temperature=0.7 * (i % 2), max_new_tokens=24, seed=i))
        for i in range(1, 7)
    ]
    flags = {"speculative_num_draft_tokens": 6, "tensor_parallel_size": 4}
    kinds = spied_kinds(monkeypatch)
    with running_engine(target, "NGRAM", **flags) as harness:
        results = harness.run(jobs)
        harness.check_nothing_left()
    assert Kind.CHOICE in kinds
    assert Kind.GATHER not in kinds, "whole logits crossed, and nothing needs them"
    assert sum(one.finish.accepted_tokens for one in results if one.finish) > 0
    cases = [(job.prompt, one.tokens, job.sampling) for job, one in zip(jobs, results, strict=True)]
    assert Reference(target).check_all(cases, frozenset({EOS})) == 0


def test_ranks_that_cannot_share_a_model_are_refused(model: Path) -> None:
    config = VerifyConfig(model_path=str(model), device="cpu", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 .* its 4 attention heads"):
        load_target(config)


def test_serve_refuses_them_before_anything_starts(model: Path) -> None:
    values = {"model_path": str(model), "tensor_parallel_size": 3}
    with pytest.raises(ConfigError) as refused:
        resolve_models(values)
    assert str(refused.value) == (
        "--tensor-parallel-size 3 does not go with this model: its 4 attention heads cannot be"
        " shared equally; give 1, 2 or 4"
    )


def test_serve_refuses_cut_groups_before_anything_starts(tmp_path: Path) -> None:
    plain = tiny_llama(tmp_path / "plain")
    write(plain, tmp_path / "awq", FORMATS["awq"])
    values = {"model_path": str(tmp_path / "awq"), "tensor_parallel_size": 2}
    resolve_models(values)
    told = (
        "--tensor-parallel-size 4 does not go with this model: mlp.down_proj of layer 0: 64 inputs"
        " a rank are no multiple of 128, which are stored or scaled as one; give 1 or 2"
    )
    with pytest.raises(ConfigError) as refused:
        resolve_models(values | {"tensor_parallel_size": 4})
    assert str(refused.value) == told
    write(plain, tmp_path / "gptq", FORMATS["gptq-order"])
    values = {"model_path": str(tmp_path / "gptq"), "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"o_proj of layer 0: act-order \(desc_act\).*; give 1$"):
        resolve_models(values)
    with pytest.raises(ConfigError, match="act-order"):
        load_target(VerifyConfig(**values, device="cpu"))
    write(plain, tmp_path / "tables", FORMATS["packed-32"], has_vocabulary=True)
    with pytest.raises(ConfigError, match=r"and LM head are not shared by ranks; give 1$"):
        resolve_models({"model_path": str(tmp_path / "tables"), "tensor_parallel_size": 2})


def test_a_context_longer_than_the_model_s_is_refused_before_anything_starts(model: Path) -> None:
    values = {"model_path": str(model), "context_length": 4096}
    resolve_models(values)
    told = "--context-length 4097 is more than the model's 4096 positions"
    for size in (1, 2):
        own = values | {"context_length": 4097, "tensor_parallel_size": size}
        with pytest.raises(ConfigError, match=told):
            resolve_models(own)
        with pytest.raises(ConfigError, match=told):
            load_target(VerifyConfig(**own, device="cpu"))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VerifyConfig(model_path="model", tensor_parallel_size=4)
    config.check_gpus(4)
    told = (
        "--tensor-parallel-size 4 needs as many GPUs, one for each rank, and there are 2: give"
        " fewer ranks, or name more in CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(ConfigError, match=told):
        config.check_gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ConfigError, match=told):
        check({"device": "cuda", "tensor_parallel_size": 4})
    VerifyConfig(model_path="model").check_gpus(1)
    hosts = {"nnodes": 2, "dist_init_addr": "10.0.0.5:50054"}
    config = VerifyConfig(model_path="model", tensor_parallel_size=4, **hosts)
    config.check_gpus(2)
    with pytest.raises(ConfigError, match="4 needs 2 GPUs on each host, one for each rank"):
        config.check_gpus(1)
