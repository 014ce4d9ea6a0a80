"""Converts tensors to bytes and messages, and back."""

import math

import torch

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest

_TYPES: dict[tensor_pb2.DataType, torch.dtype] = {
    tensor_pb2.DATA_TYPE_FLOAT32: torch.float32,
    tensor_pb2.DATA_TYPE_FLOAT16: torch.float16,
    tensor_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DATA_TYPE_INT32: torch.int32,
    tensor_pb2.DATA_TYPE_INT64: torch.int64,
    tensor_pb2.DATA_TYPE_BOOL: torch.bool,
}
_NUMBERS = {dtype: number for number, dtype in _TYPES.items()}


def to_torch(dtype: tensor_pb2.DataType) -> torch.dtype:
    """Returns the element type that a message names.

    Raises:
        InvalidRequest: It names none.
    """
    if dtype not in _TYPES:
        raise InvalidRequest("dtype", f"{dtype} is not a known element type")
    return _TYPES[dtype]


def to_message(dtype: torch.dtype) -> tensor_pb2.DataType:
    """Returns the name of an element type in messages; KeyError for one that is never sent."""
    return _NUMBERS[dtype]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, row-major, uint8 [bytes]; shares the memory of a contiguous
    one on the CPU.
    """
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def encode(tensor: torch.Tensor) -> tensor_pb2.Tensor:
    """Returns a message that holds the tensor."""
    return tensor_pb2.Tensor(
        dtype=to_message(tensor.dtype), shape=tensor.shape, data=raw(tensor).numpy().tobytes()
    )


def decode(message: tensor_pb2.Tensor) -> torch.Tensor:
    """Returns the tensor that a message holds, in memory of its own.

    Raises:
        InvalidRequest: Type, shape and number of bytes do not fit each other.
    """
    dtype = to_torch(message.dtype)
    shape = tuple(message.shape)
    if len(message.data) != math.prod(shape) * dtype.itemsize:
        raise InvalidRequest(
            "data", f"{len(message.data)} bytes are no {dtype} tensor of shape {shape}"
        )
    if not message.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(message.data), dtype=dtype).view(shape)
