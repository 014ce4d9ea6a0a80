"""What the device holds of sequences that have penalties, whoever chose their tokens and in whichever slot."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.types import SamplingParams
from verify_service.executor.triton_adjust import biases, kinds, words
from verify_service.executor.two_phase_step import SlotTables, is_late
from verify_service.executor.two_phase_tables import LateChoice
from verify_service.scheduler.request import Sequence

VOCAB, EOS, SLOTS = 60, frozenset({7}), 3
ASKED = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.2, min_new_tokens=4),
    SamplingParams(frequency_penalty=0.5, logit_bias={3: 1.0, 59: -2.0}),
    SamplingParams(logit_bias={4: 1.0}),
)


class Tables(LateChoice):
    """Those of a device, on the CPU."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self.words = torch.randint(0, 9, (SLOTS, VOCAB), dtype=torch.int32)
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
        # Some steps more may follow, of which the host knows the outcome later.
        for _ in range(rng.randrange(1, 4) if by_device else 1):
            for sequence in running:
                tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 4))]
                sequence.tokens += tokens
                if by_device:
                    for token in tokens:
                        device.words[sequence.slot, token] += bool(kinds(sequence.sampling) & 1)
                    tables.counted(sequence, len(tokens))
        for sequence in list(running):
            if rng.random() < 0.2:
                running.remove(sequence)
                if rng.random() < 0.3:  # preempted
                    waiting.insert(0, sequence)


def check(device: Tables, sequence: Sequence) -> None:
    sampling, slot = sequence.sampling, sequence.slot
    if kinds(sampling) & 1:
        want = words(sampling, sequence.prompt, sequence.output, EOS, VOCAB)
        assert device.words[slot].tolist() == want.tolist()
    if kinds(sampling) & 2:
        assert device.biases[slot].tolist() == biases(sampling, VOCAB).tolist()
    assert is_late(sequence) == bool(kinds(sampling))
