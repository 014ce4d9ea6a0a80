"""Block drafters on a GPU behind a real engine: steps that stay on the device and such that do not
change no token.
"""

import random
from pathlib import Path

import pytest

from foredraft.types import SamplingParams
from testing.block_drafts import tiny_block, tiny_peagle
from testing.checkpoints import make_checkpoint
from testing.draft_heads import TinyHead, save_head
from testing.engines import Job, running_engine
from testing.triton_device import needs_gpu
from verify_service.metrics import OVERLAPPED_STEPS

pytestmark = [pytest.mark.gpu, needs_gpu]

HEADS: dict[str, TinyHead] = {
    "dflash": tiny_block("DFLASH", 1, ids=(0, 2), window=9, num_layers=3, sliding=(1,)),
    "dspark": tiny_block("DSPARK", 2, confidence="both", layout="deepspec", draft_vocab=90),
    "peagle": tiny_peagle(3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


def jobs() -> list[Job]:
    rng = random.Random(0)
    return [
        Job(
            [rng.randrange(2, 126) for _ in range(9 + 17 * i)],
            SamplingParams(temperature=0.8 * (i % 2), max_new_tokens=60, ignore_eos=True, seed=i),
        )
        for i in range(6)
    ]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with running_engine(target, device="cuda", dtype="float32") as harness:
        return [result.tokens for result in harness.run(jobs())]


TREE = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 12,
}


@pytest.mark.parametrize(
    ("transport", "where", "tree"),
    [
        ("cuda_ipc", "draft", {}),
        ("cuda_ipc", "draft", TREE),
        ("cuda_ipc", "verifier", {}),
        ("shm", "verifier", {}),
    ],
)
@pytest.mark.parametrize("kind", HEADS)
def test_no_token_changes(
    kind: str,
    transport: str,
    where: str,
    tree: dict[str, int],
    target: Path,
    plain: list[list[int]],
    tmp_path: Path,
) -> None:
    head = HEADS[kind]
    flags = {
        "speculative_draft_model_path": str(save_head(head, tmp_path)),
        "device": "cuda",
        "dtype": "float32",
        "require_transport": transport,
        "draft_projection": where,
        "draft_step_timeout": 60.0,
        **tree,
    }
    before = OVERLAPPED_STEPS._value.get()
    with running_engine(target, head.algorithm, **flags) as harness:
        results = harness.run(jobs(), timeout=200)
        harness.check_nothing_left()
    assert [result.tokens for result in results] == plain
    assert sum(result.finish.drafted_tokens for result in results if result.finish) > 100
    assert (OVERLAPPED_STEPS._value.get() - before > 20) == (transport == "cuda_ipc")
