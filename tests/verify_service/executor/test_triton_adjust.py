"""Penalties, biases and masks on a GPU against `PenaltyState`, to the bit; on a GPU or
interpreted.
"""

import random
import struct

import numpy as np
import pytest
import torch

from foredraft.trees.draft_tree import depths, paths, sanitize
from foredraft.types import SamplingParams
from testing.triton_device import DEVICE, needs_triton
from verify_service.executor.choice.penalties import PenaltyState
from verify_service.executor.kernels.adjust import (
    HISTORY,
    IN_PROMPT,
    adjust_logits,
    count_tokens,
    history,
    kinds,
)
from verify_service.executor.kernels.steps import Begun
from verify_service.executor.records import STEP
from verify_service.scheduler.token_limits import biases

pytestmark = [needs_triton, pytest.mark.gpu]
VOCAB, EOS = 1500, (7, 9)
PARAMS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(frequency_penalty=-1.1),
    SamplingParams(presence_penalty=0.9, logit_bias={3: 2.5, 1400: -100.0, 7: 0.125}),
    SamplingParams(logit_bias={0: 50.0}),
    SamplingParams(min_new_tokens=6, stop_token_ids=(11, 1499)),
    SamplingParams(min_new_tokens=3, repetition_penalty=1.1, logit_bias={9: 4.0}),
    SamplingParams(allowed_token_ids=(3, 4, 40, 1499), logit_bias={4: 1.5}),
    SamplingParams(bad_words=((3,), (5, 6), (1499,)), frequency_penalty=0.5),
)


def record_of(slot: int, params: SamplingParams, num_prompt: int, mask: int) -> list[int]:
    record = [0] * STEP.size
    record[STEP["slot"]], record[STEP["mask"]] = slot, mask
    packed = struct.pack(
        "<iifff",
        kinds(params),
        num_prompt + params.min_new_tokens,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    record[STEP["adjusted"] : STEP["presence"] + 1] = np.frombuffer(packed, np.int32).tolist()
    return record


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 6])
def test_rows_are_adjusted_as_the_reference_does(rows, dtype):
    rng = random.Random(rows)
    generator = torch.Generator().manual_seed(rows)
    batch = len(PARAMS)
    slots = rng.sample(range(batch + 2), batch)
    histories = torch.zeros(batch + 2, VOCAB, dtype=torch.int32)
    bias = torch.zeros(batch + 2, VOCAB)
    masks = torch.randint(-(2**31), 2**31 - 1, (3 * rows, -(-VOCAB // 32)), generator=generator)
    masks = masks.to(torch.int32)
    mask_of = {2: 1 + rows, 5: 1 + 2 * rows}
    logits = (torch.randn(batch * rows, VOCAB, generator=generator) * 4).to(dtype)
    records, tokens, parents, positions, wanted = [], [], [], [], []
    for i, (params, slot) in enumerate(zip(PARAMS, slots, strict=True)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        output = [rng.randrange(12) for _ in range(rng.randrange(1, 8))]
        histories[slot] = torch.from_numpy(history(params, prompt, output, EOS, VOCAB))
        bias[slot] = torch.from_numpy(biases(params, VOCAB))
        records.append(record_of(slot, params, len(prompt), mask_of.get(i, 0)))
        nodes = rng.sample(range(12), rows - 1)
        tree, _ = sanitize(nodes, [rng.randrange(-1, n) for n in range(rows - 1)], VOCAB, rows)
        tokens.append([output[-1], *tree.tokens])
        parents.append([-1, *(parent + 1 for parent in tree.parents)])
        depth = [0, *depths(tree.parents)]
        positions += [len(prompt) + len(output) - 1 + d for d in depth]
        state = PenaltyState(params, prompt, VOCAB, eos_token_ids=EOS)
        state.commit(output)
        want = logits[i * rows : (i + 1) * rows].float().clone()
        state.apply_(want, paths(tree), [len(output) + d for d in depth])
        if i in mask_of:
            first = mask_of[i] - 1
            bits = masks[first : first + rows].numpy().view(np.uint8)
            allowed = np.unpackbits(bits, axis=1, bitorder="little")[:, :VOCAB]
            want[torch.from_numpy(allowed) == 0] = float("-inf")
        wanted.append(want)

    def on_device(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    begun = Begun(on_device(tokens), on_device(parents), on_device([0] * batch))
    got = adjust_logits(
        logits.to(DEVICE),
        on_device(records),
        begun,
        on_device(positions, torch.int64),
        histories.to(DEVICE),
        bias.to(DEVICE),
        masks.to(DEVICE),
    )
    assert torch.equal(got.cpu(), torch.cat(wanted))


def test_broken_trees_end():
    """A row whose parent comes later, or is nothing, has no path; nobody reads what it gets."""
    records = torch.tensor([record_of(0, PARAMS[3], 1, 0)], device=DEVICE)
    tokens = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32, device=DEVICE)
    parents = torch.tensor([[-1, 3, -2, 2]], dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros(1, VOCAB, device=DEVICE)
    got = adjust_logits(
        torch.zeros(4, VOCAB, device=DEVICE),
        records.int(),
        Begun(tokens, parents, tokens[0, :1]),
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
        zeros.int(),
        zeros,
        zeros.int(),
    )
    assert not got[0].any()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_no_mask_hides_a_logit_that_is_no_number(broken):
    records = torch.tensor([record_of(0, PARAMS[7], 1, 1)], device=DEVICE).int()
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    logits[0, [40, 9]] = broken
    masks = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32, device=DEVICE)
    masks[0, 0] = 2
    nothing = torch.zeros(1, VOCAB, device=DEVICE)
    root = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    begun = Begun(root, root - 1, root[0])
    positions = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    got = adjust_logits(logits, records, begun, positions, nothing.int(), nothing, masks)[0].cpu()
    assert got.isnan().nonzero()[:, 0].tolist() == [9, 40]
    assert got[1] == 0
    assert got.isinf().sum() == VOCAB - 3


def test_emitted_tokens_are_counted_where_they_matter():
    held = torch.zeros(4, VOCAB, dtype=torch.int32, device=DEVICE)
    held[2, 5] = IN_PROMPT + 2
    records = torch.zeros(3, STEP.size, dtype=torch.int32, device=DEVICE)
    records[:, STEP["slot"]] = torch.tensor([2, 0, 3])
    records[:, STEP["adjusted"]] = torch.tensor([HISTORY, 0, HISTORY])
    emitted = torch.tensor([[5, 8, 5], [1, 2, 3], [1499, -1, -1]], device=DEVICE)
    # The last one has a second token that is none: its logits were broken.
    count_tokens(records, torch.tensor([3, 3, 2], device=DEVICE).int(), emitted, held)
    want = torch.zeros(4, VOCAB, dtype=torch.int32)
    want[2, 5], want[2, 8], want[3, 1499] = IN_PROMPT + 4, 1, 1
    assert torch.equal(held.cpu(), want)
