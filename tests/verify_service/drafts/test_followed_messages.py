"""Messages whose tokens are on the device, read by the draft's own account of its sequences: rows,
requests and page tables must come out right.
"""

import random

import pytest

from draft_service.drafters.paged_sequences import PagedSequences
from draft_service.drafters.tree_limits import TreeLimits
from foredraft.api.draft.v1 import draft_pb2
from foredraft.types import SamplingParams
from testing.drafts import attach_request
from verify_service.drafts.known import KnownSequences
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.sync_messages import SyncMessages
from verify_service.drafts.wire import tree_limits
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence, Status

NUM_PAGES, WHOLE = 64, TreeLimits(3, 2, 7)
LIMITS = tree_limits(*WHOLE)


@pytest.mark.parametrize("seed", range(20))
def test_the_draft_stands_where_the_sequences_stand(seed: int) -> None:
    rng = random.Random(seed)
    marks = DraftMarks(PagePool(NUM_PAGES, 4))
    messages = SyncMessages(KnownSequences(marks, 0, None, uses_pages=True), "request")
    drafts, twin = (PagedSequences(attach_request(num_pages=NUM_PAGES), WHOLE) for _ in range(2))
    sequences = []
    for slot in range(4):
        sequence = Sequence(slot, [5, 6, 7], SamplingParams())
        sequence.status, sequence.slot = Status.RUNNING, slot
        sequence.num_computed, sequence.pages = 2, [slot]
        sequences.append(sequence)
        first = draft_pb2.StepRequest(step=1)
        first.sequences.append(messages.message(sequence, 100)[0])
        drafts.apply(first)
        twin.apply(first)
    before, num_same = None, 0
    for _ in range(100):
        flying = rng.sample(sequences, rng.randrange(1, 5)) if rng.random() < 0.15 else sequences
        for sequence in flying:
            if rng.random() < 0.04 and len(sequence.pages) < 20:
                sequence.pages.append(rng.randrange(NUM_PAGES))
            if rng.random() < 0.02:
                index = rng.randrange(len(sequence.pages))
                sequence.pages[index] = rng.randrange(NUM_PAGES)
                sequence.pages_changed(index)
        wants = [rng.random() < 0.97 for _ in flying]
        request = draft_pb2.StepRequest()
        request.sequences.extend(
            messages.on_device(sequence, row, LIMITS if wanted else None)
            for row, (sequence, wanted) in enumerate(zip(flying, wants, strict=True))
        )
        message = request.SerializeToString()
        read = drafts.proceed(draft_pb2.StepRequest.FromString(message))
        twin._newest = None  # it does not know what came before
        assert read == twin.proceed(draft_pb2.StepRequest.FromString(message))
        num_same += read is before
        before = read
        for row, (one, sequence, wanted) in enumerate(zip(read, flying, wants, strict=True)):
            assert (one.row, one.is_wanted, one.sequence.slot) == (row, wanted, sequence.slot)
            assert one.sequence.pages == sequence.pages
        for message in request.sequences:
            assert not message.HasField("propose") or message.propose == LIMITS
    assert num_same > 3
