"""Speculation changes no token of a quantised target."""

import random
import shutil

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer

from foredraft.models.registry import resolve_model_path
from foredraft.types import SamplingParams
from testing.engines import Job, running_engine
from testing.quantized_checkpoints import FORMATS, tiny_llama, write
from testing.reference import Reference
from testing.rounds import rounds
from testing.tools import ROOT
from testing.triton_device import needs_gpu

NUM_PROMPTS, NUM_TOKENS, VOCAB_SIZE = rounds(12, 24), 24, 97
SHAPE = {"max_running_requests": 6, "chunked_prefill_size": 24, "draft_step_timeout": 20.0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": VOCAB_SIZE}
    return tiny_llama(tmp_path_factory.mktemp("plain"), **sizes)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose products of few rows are all for the kernels in CUDA C++ where these run."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "vocab_size": VOCAB_SIZE}
    return tiny_llama(tmp_path_factory.mktemp("wide"), **sizes)


def jobs():
    rng = random.Random(5)
    made = []
    for number in range(NUM_PROMPTS):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(4, 30))]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
        if number % 3 == 2:
            sampling = SamplingParams(temperature=0.8, seed=number, max_new_tokens=NUM_TOKENS)
        made.append(Job(prompt * rng.choice([1, 2]), sampling))
    return made


def check(target, draft, **flags):
    """Texts of three algorithms are the same, and drafts are accepted."""
    texts = {}
    for algorithm in ("NONE", "NGRAM", "STANDALONE"):
        path = {"speculative_draft_model_path": str(draft)} if algorithm == "STANDALONE" else {}
        with running_engine(target, algorithm, **SHAPE, **flags, **path) as engine:
            results = engine.run(jobs())
            texts[algorithm] = [result.tokens for result in results]
            accepted = sum(result.finish.accepted_tokens for result in results)
            assert (accepted > 0) == (algorithm != "NONE")
    assert texts["NGRAM"] == texts["NONE"]
    assert texts["STANDALONE"] == texts["NONE"]


@pytest.mark.parametrize(
    "name", ["fp8-block", "int8", "awq", "gptq-order", "packed-64", "packed-int8"]
)
def test_text_is_the_same_with_any_draft(name, plain, tmp_path):
    write(plain, tmp_path, FORMATS[name])
    check(tmp_path, plain)


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-sym", "gptq-order"])
def test_one_rank_and_two_choose_what_the_rule_gives_in_float64(name, plain, tmp_path):
    """The rule for the weights that the checkpoint stands for."""
    target, expanded = tmp_path / "target", tmp_path / "expanded"
    meant = write(plain, target, FORMATS[name])
    shutil.copytree(plain, expanded)
    save_file(meant, expanded / "model.safetensors")
    asked, flags = jobs(), {**SHAPE, "speculative_num_draft_tokens": 4}
    texts = []
    # Ranks do not share act-order, see `tests/e2e/test_ranks.py`.
    for size in (1,) if name == "gptq-order" else (1, 2):
        with running_engine(target, "NGRAM", **flags, tensor_parallel_size=size) as engine:
            texts.append([result.tokens for result in engine.run(asked)])
    reference, ends = Reference(expanded), frozenset({2})
    for found in texts:
        cases = [(job.prompt, own, job.sampling) for job, own in zip(asked, found, strict=True)]
        assert reference.check_all(cases, ends) <= 1
    # But for a near tie.
    assert sum(one != two for one, two in zip(texts[0], texts[-1], strict=True)) <= 1


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_text_of_the_bundled_model_is_the_same_with_any_draft(kind):
    """Real text has near ties, at which rows that were rounded apart would part."""
    path = resolve_model_path("foredraft-demo")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "docs" / "operations.md").read_text()).ids
    jobs = [
        Job(ids[begin : begin + 40], SamplingParams(temperature=0.0, max_new_tokens=48))
        for begin in range(0, NUM_PROMPTS * 60, 60)
    ]
    texts = {}
    for algorithm in ("NONE", "NGRAM", "EAGLE3"):
        draft = {}
        if algorithm == "EAGLE3":
            draft["speculative_draft_model_path"] = str(resolve_model_path("foredraft-demo-eagle3"))
        with running_engine(path, algorithm, **SHAPE, quantization=kind, **draft) as engine:
            results = engine.run(jobs)
        texts[algorithm] = [result.tokens for result in results]
        accepted = sum(result.finish.accepted_tokens for result in results)
        assert (accepted > 0) == (algorithm != "NONE")
    for algorithm in ("NGRAM", "EAGLE3"):
        pairs = zip(texts[algorithm], texts["NONE"], strict=True)
        assert sum(ours != plain for ours, plain in pairs) == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    ["fp8-block", "float-channel", "int8", "awq", "gptq-order", "packed-32", "packed-channel"],
)
def test_text_is_the_same_with_any_draft_on_a_gpu(name, dtype, plain, tmp_path):
    write(plain, tmp_path, FORMATS[name])
    check(tmp_path, plain, device="cuda", dtype=dtype, exactness="strict", disable_cuda_graph=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "name",
    [
        "fp8-block",
        "float-channel",
        "int8",
        "awq",
        "awq-64",
        "gptq-order",
        "packed-32",
        "packed-channel",
    ],
)
def test_text_of_captured_steps_is_the_same_with_any_draft(name, wide, tmp_path):
    """Captured steps take the kernels of few rows, one or another by their number."""
    write(wide, tmp_path, FORMATS[name])
    check(tmp_path, wide, device="cuda", dtype="bfloat16", exactness="strict")
