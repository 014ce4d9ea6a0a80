"""No kernel is compiled while a draft serves: what the warm-up has launched is all that extensions
launch, on a GPU.
"""

import random
import time
from collections import Counter

import pytest
import torch
from torch import nn

from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.module_chain import ModuleChainMethod
from foredraft.api.draft.v1 import draft_pb2
from testing.compiled_kernels import compiled, compiled_since
from testing.published_drafts import DRAFTS, make_extensions, make_proposer, some_extensions
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
GPU = torch.device("cuda", 0)
MAX_BATCH, MAX_CONTEXT = 64, 100_000


def fill(model: nn.Module) -> None:
    """Weights that overflow nowhere."""
    for parameter in model.parameters():
        parameter.data.normal_(std=0.01)


def told() -> list[tuple[list[int], list[int], list[bool]]]:
    """Returns rows, earlier keys and tree requests of sequences: steps seen in serving, and
    small numbers of rows.
    """
    found = [
        ([65] + [64] * 15, [0] * 16, [True] * 16),  # 1,025 tokens of 16 sequences
        ([38], [5585], [True]),
        ([1024], [0], [True]),
        ([1] * MAX_BATCH, [900] * MAX_BATCH, [True] * MAX_BATCH),
        ([70] * 3, [10, 70_000, 333], [True, False, True]),
    ]
    contexts = (0, 130, 1100, 5585, 40_000, MAX_CONTEXT - 70)
    found += [([count], [contexts[count % 6]], [True]) for count in range(1, 71)]
    for count in (1, 4, 16, 33, 66):
        found += [([count], [context], [True]) for context in contexts]
    return found


@pytest.mark.parametrize("name", DRAFTS)
def test_extensions_compile_nothing(name: str) -> None:
    settings = GraphSettings(8, captures=True)
    sizes = {"max_batch": MAX_BATCH, "max_context": MAX_CONTEXT, "draft_sampling": "coupled"}
    proposer = make_proposer(name, GPU, fill, settings, **sizes)
    started = time.perf_counter()
    proposer.prepare()
    torch.cuda.synchronize()
    cold = time.perf_counter() - started
    rng = random.Random(name)
    random_ones = [some_extensions(rng, MAX_BATCH, MAX_CONTEXT) for _ in range(60)]
    before, slowest = compiled(), 0.0
    with torch.inference_mode():
        started = time.perf_counter()
        proposer._method.warm_up()
        torch.cuda.synchronize()
        warm = time.perf_counter() - started
        for extensions in [*(make_extensions(*one) for one in told()), *random_ones]:
            started = time.perf_counter()
            requests = proposer._method.extend(extensions, proposer.hidden)
            if proposer._fixed_steps is not None:
                proposer._fixed_steps.draft(requests, draft_pb2.StepResponse())
            elif isinstance(proposer._method, ModuleChainMethod):
                proposer._method.draft(requests)
            torch.cuda.synchronize()
            slowest = max(slowest, time.perf_counter() - started)
            assert compiled_since(before) == Counter(), [len(e.tokens) for e in extensions]
    print(f"{name}: prepared in {cold:.2f} s, warm-up again {warm:.2f} s, slowest {slowest:.4f} s")
    proposer.close()
