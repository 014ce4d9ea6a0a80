"""Tables of sequences with penalties on the device, whatever chose their tokens and in
whichever slot.
"""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.types import SamplingParams
from verify_service.executor.captured.fill import needs_two_phases
from verify_service.executor.captured.two_phase import SlotTables
from verify_service.executor.captured.two_phase_tables import TwoPhaseTables
from verify_service.executor.kernels.adjust import history, kinds
from verify_service.scheduler.request import Sequence
from verify_service.scheduler.token_limits import biases

VOCAB, EOS, SLOTS = 60, frozenset({7}), 3
ASKED = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.2, min_new_tokens=4),
    SamplingParams(frequency_penalty=0.5, logit_bias={3: 1.0, 59: -2.0}),
    SamplingParams(logit_bias={4: 1.0}),
    SamplingParams(bad_words=((4,), (5, 6))),
    SamplingParams(allowed_token_ids=(4, 5)),
)


class Tables(TwoPhaseTables):
    """A device's tables on the CPU."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self.histories = torch.randint(0, 9, (SLOTS, VOCAB), dtype=torch.int32)
        self.biases = torch.randn(SLOTS, VOCAB)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_tables_are_those_of_the_sequences(seed: int) -> None:
    rng = random.Random(seed)
    device = Tables()
    tables = SlotTables(device, EOS, VOCAB)
    waiting = [
        Sequence(i, [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))], rng.choice(ASKED))
        for i in range(9)
    ]
    running: list[Sequence] = []
    while waiting or running:
        while waiting and len(running) < SLOTS and rng.random() < 0.7:
            sequence = waiting.pop(0)
            sequence.slot = min(set(range(SLOTS)) - {one.slot for one in running})
            running.append(sequence)
        if by_device := rng.random() < 0.7:
            tables.update(running)
            for sequence in running:
                check(device, sequence)
        # Some steps more may follow; the host learns their outcomes later.
        for _ in range(rng.randrange(1, 4) if by_device else 1):
            for sequence in running:
                tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 4))]
                sequence.tokens += tokens
                if by_device:
                    for token in tokens:
                        device.histories[sequence.slot, token] += bool(kinds(sequence.sampling) & 1)
                    tables.counted(sequence, len(tokens))
        for sequence in list(running):
            if rng.random() < 0.2:
                running.remove(sequence)
                if rng.random() < 0.3:  # preempted
                    waiting.insert(0, sequence)


def check(device: Tables, sequence: Sequence) -> None:
    sampling, slot = sequence.sampling, sequence.slot
    if kinds(sampling) & 1:
        want = history(sampling, sequence.prompt, sequence.output, EOS, VOCAB)
        assert device.histories[slot].tolist() == want.tolist()
    if kinds(sampling) & 2:
        assert device.biases[slot].tolist() == biases(sampling, VOCAB).tolist()
    assert needs_two_phases(sequence) == bool(kinds(sampling))
