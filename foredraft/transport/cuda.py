"""CUDA IPC: memory blocks that can be exported, mappings of other processes' blocks, and words that
order streams.

`cuda.bindings` comes with torch's CUDA builds and is imported only where it is used.
"""

import contextlib
import ctypes
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


def reaches(device: torch.device, other: torch.device) -> bool:
    """Returns whether kernels of a GPU can use the memory of another one, or of the same."""
    one, two = _index(device), _index(other)
    return one == two or torch.cuda.can_device_access_peer(one, two)


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
        device: GPU whose kernels use the allocation, which may lie on another one.

    Attributes:
        bytes: uint8 [num_bytes], the allocation, which torch takes to be on `device`.

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
    """Returns uint8 [num_bytes] over memory that torch does not own and never frees.

    Args:
        pointer: Address that kernels of the device can use; it may lie on another GPU.
    """
    sizes = (ctypes.c_int64 * 2)(num_bytes, 1)
    described = _Managed(data=pointer, num_dims=1, shape=ctypes.addressof(sizes))
    described.strides = ctypes.addressof(sizes) + ctypes.sizeof(ctypes.c_int64)
    described.code, described.bits, described.lanes = _UINT, 8, 1
    described.device_type, described.device = _CUDA, _index(device)
    _described.append((described, sizes))
    return torch.utils.dlpack.from_dlpack(
        _new_capsule(ctypes.addressof(described), b"dltensor", None)
    )


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream in which nothing waits."""
    return new_stream(device)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream of high priority that nobody else uses; torch's own streams are reused."""
    from cuda.bindings import runtime

    _use(device)
    _, highest = _call(runtime.cudaDeviceGetStreamPriorityRange())
    handle = _call(runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, highest))
    return torch.cuda.ExternalStream(int(handle), device=device)


def write_word(stream: int, pointer: int, value: int) -> None:
    """Writes a 32-bit word once everything before it in the stream is done and can be seen by
    others.

    Args:
        stream: Handle of the stream, as `torch.cuda.Stream.cuda_stream`.
    """
    from cuda.bindings import driver

    flags = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    _call(driver.cuStreamWriteValue32(stream, pointer, value & 0xFFFFFFFF, flags))


def wait_word(stream: int, pointer: int, value: int) -> None:
    """Makes the stream wait until a 32-bit word has reached a value; both wrap around."""
    from cuda.bindings import driver

    flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _call(driver.cuStreamWaitValue32(stream, pointer, value & 0xFFFFFFFF, flags))


def copy_bytes(stream: int, target: int, source: int, num_bytes: int) -> None:
    """Copies memory that the GPU can reach, without its multiprocessors where the target is another
    GPU's.
    """
    from cuda.bindings import driver

    _call(driver.cuMemcpyDtoDAsync(target, source, num_bytes, stream))


def new_event() -> Any:
    """Returns an event of the current device, which is never freed; `record` and `wait` take a
    fraction of the time of torch's.
    """
    from cuda.bindings import driver

    return _call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))


def record(stream: int, event: Any) -> None:
    """Makes an event stand for all that is in the stream now."""
    from cuda.bindings import driver

    _call(driver.cuEventRecord(event, stream))


def wait(stream: int, event: Any) -> None:
    """Makes the stream wait for what the event stands for now."""
    from cuda.bindings import driver

    _call(driver.cuStreamWaitEvent(stream, event, 0))


def current_stream(device: torch.device) -> int:
    """Returns the handle of this thread's stream on a device."""
    # Triton's launcher has it from here too: torch's public way takes ten times as long.
    return int(torch._C._cuda_getCurrentRawStream(_index(device)))


class _Managed(ctypes.Structure):
    """Describes memory to torch as DLPack's DLManagedTensor, which nobody frees."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_UINT, _CUDA = 1, 2  # codes of DLPack
# torch reads a description again when the last tensor over its memory goes.
_described: list[tuple[_Managed, object]] = []
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


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
