"""Rows of hidden states in a ring of memory, and tensors in messages."""

import random
from collections import deque

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import codec
from foredraft.transport.base import RowRing
from foredraft.transport.rows import RowFormat


def test_rows_are_taken_in_order_and_go_round() -> None:
    ring = RowRing(10)
    assert ring.take(6) == 0
    ring.sent(1)
    assert ring.take(4) == 6
    ring.sent(2)
    assert ring.num_free == 0
    ring.answered(1)
    assert ring.num_free == 6
    assert ring.take(5) == 0
    ring.sent(3)
    ring.answered(3)
    assert ring.num_free == 10
    assert ring.take(10) == 5


def test_no_row_is_taken_again_before_its_step_was_answered() -> None:
    rng = random.Random(1)
    ring = RowRing(64)
    in_use: deque[tuple[int, set[int]]] = deque()
    unsent: set[int] = set()
    step = 0
    for _ in range(5000):
        used = unsent.union(*(rows for _, rows in in_use))
        assert ring.num_free == 64 - len(used)
        choice = rng.random()
        if choice < 0.5 and ring.num_free:
            count = rng.randint(1, ring.num_free)
            first = ring.take(count)
            rows = {(first + i) % 64 for i in range(count)}
            assert not rows & used
            unsent |= rows
        elif choice < 0.75:
            step += 1
            ring.sent(step)
            in_use.append((step, unsent))
            unsent = set()
        elif in_use:
            answered = rng.choice(in_use)[0]
            ring.answered(answered)
            while in_use and in_use[0][0] <= answered:
                in_use.popleft()


@pytest.mark.parametrize("count", [0, -1, 9])
def test_more_rows_than_are_free_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="free"):
        RowRing(8).take(count)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (1,), (2, 3, 4)])
def test_a_tensor_comes_back_from_its_message(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    message = tensor_pb2.Tensor.FromString(codec.encode(tensor).SerializeToString())
    assert torch.equal(codec.decode(message), tensor)


def test_a_view_is_sent_in_its_own_order() -> None:
    tensor = torch.randn(3, 5)
    assert torch.equal(codec.decode(codec.encode(tensor.t())), tensor.t())


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    message = codec.encode(torch.zeros(3, 5))
    message.shape[0] = 4
    with pytest.raises(InvalidRequest, match="60 bytes"):
        codec.decode(message)
    message.dtype = tensor_pb2.DATA_TYPE_UNSPECIFIED
    with pytest.raises(InvalidRequest, match="element type"):
        codec.decode(message)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (0, tensor_pb2.DATA_TYPE_FLOAT32),
        (8, tensor_pb2.DATA_TYPE_INT32),
        (8, tensor_pb2.DATA_TYPE_UNSPECIFIED),
        (1 << 40, tensor_pb2.DATA_TYPE_FLOAT32),
    ],
)
def test_rows_that_cannot_be_are_refused(width: int, dtype: tensor_pb2.DataType) -> None:
    with pytest.raises(InvalidRequest):
        RowFormat.of(draft_pb2.HiddenNeeds(width=width, dtype=dtype))
