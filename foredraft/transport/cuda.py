"""CUDA IPC: memory blocks that can be exported, mappings of other processes' blocks, and words that
order streams.

`cuda.bindings` comes with torch's CUDA builds and is imported only where it is used.
"""

import contextlib
import functools
import weakref
from typing import Any

import torch

HANDLE_BYTES = 64


class CudaError(RuntimeError):
    """Raised when a call of CUDA fails."""


def is_supported(device: torch.device) -> bool:
    """Returns whether blocks on a device can be shared with other processes."""
    if device.type != "cuda":
        return False
    try:
        from cuda.bindings import driver, runtime  # noqa: F401
    except ImportError:
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    try:
        _use(device)
        return bool(_call(driver.cuDeviceGetAttribute(attribute, _index(device))))
    except CudaError:
        return False


def works(device: torch.device) -> bool:
    """Returns whether this process can still use a device.

    A fault there, or of another client of MPS, is permanent.
    """
    if device.type != "cuda":
        return True
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError:
        return False
    return True


def uuid_of(device: torch.device) -> str:
    """Returns the id of a GPU that is the same in every process; its number may differ."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device | None:
    """Returns this process's device for a GPU's id; None where it does not see the GPU."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if uuid_of(device) == uuid:
            return device
    return None


class Block:
    """A memory block outside torch's allocator, so that a handle to it exposes nothing else.

    Args:
        num_bytes: Size, at least 1.

    Raises:
        CudaError: There is no such memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from cuda.bindings import runtime

        _use(device)
        self.num_bytes = num_bytes
        self.device = device
        self.pointer = int(_call(runtime.cudaMalloc(num_bytes)))
        memory = _Raw(self.pointer, num_bytes)
        weakref.finalize(memory, _free, self.pointer, device)
        self.handle = handle_of(self.pointer)
        self.bytes = torch.as_tensor(memory, device=device)
        self.bytes.zero_()
        torch.cuda.current_stream(device).synchronize()

    def free(self) -> None:
        """Gives the memory back, as soon as no tensor in it is left."""
        del self.bytes


class Mapping:
    """Maps another process's allocation into this one.

    Args:
        handle: Handle made by `handle_of` in another process.
        num_bytes: Number of bytes used, from the start of the allocation.

    Raises:
        CudaError: The allocation does not exist, or it is on a GPU that this process cannot
            reach.
    """

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
        from cuda.bindings import runtime

        _use(device)
        self.device = device
        raw = runtime.cudaIpcMemHandle_t()
        raw.reserved = handle
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        self.pointer = int(_call(runtime.cudaIpcOpenMemHandle(raw, flags)))
        try:
            _, size = allocation_of(self.pointer)
            if num_bytes > size:
                raise CudaError(f"the allocation has {size} bytes, not {num_bytes}")
            self.bytes = view(self.pointer, num_bytes, device)
        except BaseException:
            runtime.cudaIpcCloseMemHandle(self.pointer)
            raise

    def close(self) -> None:
        """Unmaps the allocation; no kernel may be reading it."""
        from cuda.bindings import runtime

        _use(self.device)
        runtime.cudaIpcCloseMemHandle(self.pointer)


def handle_of(pointer: int) -> bytes:
    """Returns the handle of the allocation that holds an address; a handle always names the start.

    Raises:
        CudaError: It cannot be shared, for example memory of an expandable segment.
    """
    from cuda.bindings import runtime

    return bytes(_call(runtime.cudaIpcGetMemHandle(pointer)).reserved)


def allocation_of(pointer: int) -> tuple[int, int]:
    """Returns start and size of the allocation that holds an address."""
    from cuda.bindings import driver

    start, size = _call(driver.cuMemGetAddressRange(pointer))
    return int(start), int(size)


def view(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns uint8 [num_bytes] over memory that torch does not own and never frees."""
    return torch.as_tensor(_Raw(pointer, num_bytes), device=device)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream in which nothing waits. torch's own streams are reused, so one of them may
    be waiting.
    """
    from cuda.bindings import runtime

    _use(device)
    _, highest = _call(runtime.cudaDeviceGetStreamPriorityRange())
    handle = _call(runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, highest))
    return torch.cuda.ExternalStream(int(handle), device=device)


def write_word(stream: torch.cuda.Stream, pointer: int, value: int) -> None:
    """Writes a 32-bit word once everything before it in the stream is done and can be seen by
    others.
    """
    from cuda.bindings import driver

    flags = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    _call(driver.cuStreamWriteValue32(stream.cuda_stream, pointer, value & 0xFFFFFFFF, flags))


def wait_word(stream: torch.cuda.Stream, pointer: int, value: int) -> None:
    """Makes the stream wait until a 32-bit word has reached a value; both wrap around."""
    from cuda.bindings import driver

    flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _call(driver.cuStreamWaitValue32(stream.cuda_stream, pointer, value & 0xFFFFFFFF, flags))


class _Raw:
    """Presents memory to torch without a copy."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _free(pointer: int, device: torch.device) -> None:
    with contextlib.suppress(ImportError, CudaError):  # may fail while the process ends
        from cuda.bindings import runtime

        _use(device)
        runtime.cudaFree(pointer)


def _use(device: torch.device) -> None:
    """Makes the device's context, which torch uses too, current in this thread."""
    from cuda.bindings import runtime

    _call(runtime.cudaSetDevice(_index(device)))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _call(result: tuple[Any, ...]) -> Any:
    """Returns the values of a call, or raises its error."""
    error, *values = result
    if int(error) != 0:
        from cuda.bindings import runtime

        runtime.cudaGetLastError()  # or a later call would report it again
        raise CudaError(f"{error.name} ({int(error)})")
    return values[0] if len(values) == 1 else tuple(values)
