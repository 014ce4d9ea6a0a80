"""The shipped path: three processes under one supervisor, real sockets, real kills."""

import concurrent.futures
import os
import random
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack, make_supervisor
from foredraft.types import SamplingParams
from testing import stack as stacks
from testing.checkpoints import EOS, make_checkpoint
from testing.forked import forked
from testing.reference import Reference
from testing.stack import eventually
from testing.tiny_tokenizers import byte_level, save

ENDS = frozenset({EOS})
VOCAB_SIZE = 600
NUM_TOKENS = 160


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name, noise in (("target", 0.0), ("draft", 0.03)):
        make_checkpoint(
            directory / name, noise=noise, vocab_size=VOCAB_SIZE, max_position_embeddings=1024
        )
        save(byte_level(VOCAB_SIZE), directory / name)
    return directory


@pytest.fixture(scope="module")
def stack(models: Path, request: pytest.FixtureRequest) -> Iterator[LocalStack]:
    """A stack of the parameter's algorithm, for all tests with it."""
    values = {
        "model_path": str(models / "target"),
        "speculative_algorithm": request.param,
        "device": "cpu",
        "num_threads": 1,
        "max_total_tokens": 4096,
        "speculative_adaptive": False,  # no draft pays for a model as small as this
        "draft_step_timeout": 20.0,
        "page_size": 16,
        "port": 0,
        "grpc_port": 0,
    }
    if request.param == "STANDALONE":
        values["speculative_draft_model_path"] = str(models / "draft")
    running = make_supervisor(values, on_line=lambda name, line: print(f"{name}: {line}"))
    if request.param != "STANDALONE":  # one is started as it is shipped
        running.launch = forked
    with running:
        running.wait_healthy()
        yield running


def stub_of(stack: LocalStack) -> inference_pb2_grpc.InferenceServiceStub:
    return inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(stack.urls["grpc"]))


def request_of(prompt: list[int], **sampling: object) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt), return_provenance=True
    )
    for name, value in {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, **sampling}.items():
        setattr(request.sampling, name, value)
    return request


def tokens_of(stream: Iterator[inference_pb2.GenerateResponse]) -> list[int]:
    return [token.id for response in stream for token in response.tokens]


def metric(stack: LocalStack, name: str) -> float:
    """The sum of a metric's samples on the verifier's page."""
    page = urllib.request.urlopen(stack.urls["verify_metrics"], timeout=60).read().decode()
    return stacks.metric(page, name)


def pid_of(stack: LocalStack, name: str) -> int:
    pid = next(state.pid for state in stack.states() if state.name == name)
    assert pid
    return pid


@pytest.mark.parametrize("stack", ["NONE", "NGRAM", "STANDALONE"], indirect=True)
def test_services_give_the_rules_tokens(stack: LocalStack, models: Path) -> None:
    stub, rng, reference = stub_of(stack), random.Random(5), Reference(models / "target")
    prompts = [
        [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 80))] for _ in range(16)
    ]
    samplings = [
        SamplingParams(temperature=0.0, max_new_tokens=40),
        SamplingParams(temperature=0.9, top_p=0.9, seed=77, max_new_tokens=40),
    ]

    def generate(job: tuple[list[int], SamplingParams]) -> list[int]:
        prompt, params = job
        request = request_of(
            prompt,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            max_new_tokens=40,
        )
        return tokens_of(stub.Generate(request))

    jobs = [(prompt, params) for prompt in prompts for params in samplings]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(generate, jobs))
    ties = sum(
        reference.check(prompt, output, params, ENDS)
        for (prompt, params), output in zip(jobs, outputs, strict=True)
    )
    assert ties <= 2
    has_draft = any(state.name == "draft" for state in stack.states())
    assert (metric(stack, "foredraft_accepted_tokens_total") > 0) == has_draft


@pytest.mark.parametrize("stack", ["NGRAM", "STANDALONE"], indirect=True)
def test_killing_the_draft_changes_no_token(stack: LocalStack, models: Path) -> None:
    stub, reference = stub_of(stack), Reference(models / "target")
    params = SamplingParams(temperature=1.0, seed=9, max_new_tokens=900)
    prompt = [7, 8, 9, 7, 8, 9, 7]
    request = request_of(prompt, temperature=1.0, seed=9, max_new_tokens=900, ignore_eos=True)
    attaches = metric(stack, "foredraft_draft_attaches_total")
    tokens: list[int] = []
    killed = False
    for response in stub.Generate(request):
        tokens += [token.id for token in response.tokens]
        if len(tokens) >= 100 and not killed:
            killed = True
            os.kill(pid_of(stack, "draft"), signal.SIGKILL)
            eventually(lambda: metric(stack, "foredraft_draft_attaches_total") > attaches)
    assert len(tokens) == 900
    assert reference.check(prompt, tokens, params, frozenset()) <= 2
    eventually(lambda: metric(stack, "foredraft_draft_available") == 1)
    before = metric(stack, "foredraft_draft_tokens_total")
    again = tokens_of(stub.Generate(request))
    assert again == tokens
    assert metric(stack, "foredraft_draft_tokens_total") > before
