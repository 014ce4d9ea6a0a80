"""Layout of an arena: one description for every transport, and views of its tensors in mapped
bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import codec
from foredraft.transport.rows import HIDDEN, ArenaError, RowFormat

ALIGNMENT = 256  # bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor that an arena shall hold.

    Attributes:
        name: Unique in the arena.
        follows: Whether it begins where the one before it ends; else where memory is aligned.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    follows: bool = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor's elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def ring_spec(row: RowFormat, capacity: int) -> TensorSpec:
    """Describes the ring of hidden states."""
    return TensorSpec(HIDDEN, row.dtype, (capacity, row.width))


def describe(
    transport: tensor_pb2.Transport, epoch: int, specs: Sequence[TensorSpec], first: int
) -> tensor_pb2.Arena:
    """Returns the arena of tensors one behind the other, without a handle.

    Args:
        epoch: Number of the attach.
        first: Bytes before the first tensor.
    """
    arena = tensor_pb2.Arena(transport=transport, epoch=epoch)
    end = first
    for spec in specs:
        offset = end if spec.follows else -(-end // ALIGNMENT) * ALIGNMENT
        arena.tensors.add(
            name=spec.name,
            offset=offset,
            dtype=codec.to_message(spec.dtype),
            shape=spec.shape,
        )
        end = offset + spec.num_bytes
    arena.size = end
    return arena


def find(arena: tensor_pb2.Arena, name: str) -> tensor_pb2.ArenaTensor | None:
    """Returns an arena's description of a tensor; None where it has none."""
    return next((tensor for tensor in arena.tensors if tensor.name == name), None)


def view(data: torch.Tensor, tensor: tensor_pb2.ArenaTensor) -> torch.Tensor:
    """Returns a tensor in the arena's bytes.

    Args:
        data: uint8 [bytes].

    Raises:
        ArenaError: It is not in them.
    """
    try:
        dtype = codec.to_torch(tensor.dtype)
    except InvalidRequest as error:
        raise ArenaError("tensors", error.message) from error
    shape = tuple(tensor.shape)
    end = tensor.offset + math.prod(shape) * dtype.itemsize
    if end > len(data) or tensor.offset % dtype.itemsize:
        raise ArenaError("tensors", f"{tensor.name} does not lie within {len(data)} bytes")
    return data[tensor.offset : end].view(dtype).view(shape)
