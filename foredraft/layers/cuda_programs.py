"""Compiles kernels in CUDA C++ while the process runs, and launches them.

NVRTC compiles them, which comes with torch's CUDA builds as `cuda.bindings` does; no `nvcc` is
needed. Such kernels exist where Triton cannot express what makes them fast. Each has a Triton
kernel of the same bits beside it, for where this does not work.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_COMMON = "native_common.cuh"
_CAPABILITY = (9, 0)  # whose matrix units give the bits of the Triton kernels
_LEAST_NVRTC = (13, 0)  # version that the kernels have run with
TILE_BYTES = 128  # of each line
MOST_SHARED = 227 * 1024  # bytes of shared memory that a block may have
# With so many two blocks never share a multiprocessor: those that start before the kernel ahead has
# ended would go to the few that are free.
ALONE_SHARED = 116 * 1024
_OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17")

Constants = dict[str, int]  # values of a file's macros


class Tiles(NamedTuple):
    """A matrix for the copy engine, that brings 128 bytes of some lines at a time.

    Attributes:
        matrix: [lines, columns], contiguous; lines of a multiple of 16 bytes.
        lines: Lines of a tile, at most 256. Beyond the last line of the matrix they are zeros.
    """

    matrix: torch.Tensor
    lines: int


Argument = torch.Tensor | Tiles | int


class _Ahead(threading.local):
    """What this thread does with launches.

    Attributes:
        take: Gets the kernel and a function that compiles and loads it, and returns whether it was
            new to the cache, in place of the launch. None to launch.
    """

    take: Callable[[str, Callable[[], bool]], object] | None = None


_AHEAD = _Ahead()


@contextlib.contextmanager
def taken(take: Callable[[str, Callable[[], bool]], object]) -> Iterator[None]:
    """Hands this thread's kernels to a function instead of launching them, see `_Ahead.take`."""
    before, _AHEAD.take = _AHEAD.take, take
    try:
        yield
    finally:
        _AHEAD.take = before


@functools.cache
def are_supported(device: torch.device) -> bool:
    """Returns whether the kernels can be compiled for a device, and give the same bits there; logs
    why not.
    """
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    try:
        from cuda.bindings import nvrtc

        version = _checked(nvrtc.nvrtcVersion())
        reason = "NVRTC is of CUDA {}.{}".format(*version) if version < _LEAST_NVRTC else ""
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    if capability != _CAPABILITY:
        reason = "compute capability {}.{}".format(*capability)
    if reason:
        logger.info("Triton's kernels are used in place of those in CUDA C++: %s", reason)
    return not reason


class Program:
    """A kernel of a CUDA C++ file in this folder, compiled once for each set of constants.

    Args:
        file: Name of the file; its constants are macros. `native_common.cuh` comes before it.
        name: Name of the kernel.
    """

    def __init__(self, file: str, name: str) -> None:
        self._file, self._name = file, name
        self._loaded: dict[tuple[object, ...], Any] = {}
        self._failed = False

    def is_ready(self, constants: Constants) -> bool:
        """Returns whether the kernel can be launched with these constants; compiles it if it was
        not yet.
        """
        if _AHEAD.take is not None:
            _AHEAD.take(f"{self._file} {constants}", functools.partial(self._load, constants))
        else:
            self._load(constants)
        return not self._failed

    def launch(
        self,
        constants: Constants,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: tuple[Argument, ...],
    ) -> None:
        """Launches the kernel on the current stream, where its start may overlap the end of the
        kernel before (programmatic dependent launch); it waits for that one itself.

        Args:
            constants: Values of the macros, for which `is_ready` was true.
            blocks: Number of blocks.
            threads: Number of threads of a block.
            shared_bytes: Bytes of dynamic shared memory of a block.
            arguments: Tensors, whose addresses the kernel gets, tiles, and integers of 64 bits, or
                of 32 where the kernel has them so.
        """
        if _AHEAD.take is not None:
            return
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        config = _config(blocks, threads, shared_bytes, stream)
        values, types = zip(*map(_passed, arguments), strict=True)
        function = self._loaded[_key(constants)]
        _checked(driver.cuLaunchKernelEx(config, function, (values, types), 0))

    def _load(self, constants: Constants) -> bool:
        """Compiles and loads the kernel, and returns whether it was new to the cache."""
        key = _key(constants)
        if self._failed or key in self._loaded:
            return False
        try:
            binary, is_new = compiled(self._file, constants)
            self._loaded[key] = _function(binary, self._name)
        except (RuntimeError, OSError) as error:
            logger.warning("%s is not used, a Triton kernel is: %s", self._file, error)
            self._failed = True
            return False
        return is_new


@functools.lru_cache(maxsize=4096)
def _config(blocks: int, threads: int, shared_bytes: int, stream: int) -> Any:
    """Returns how a kernel is launched on a stream, see `Program.launch`."""
    from cuda.bindings import driver

    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    config.attrs, config.numAttrs = [attribute], 1
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, driver.CUstream(stream)
    return config


def _passed(argument: Argument) -> tuple[Any, Any]:
    """Returns what a launch gets for an argument, and its type."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), ctypes.c_void_p
    if isinstance(argument, Tiles):
        matrix = argument.matrix
        return _tensor_map(
            matrix.data_ptr(), *matrix.shape, matrix.element_size(), argument.lines
        ), None
    return argument, ctypes.c_longlong


@functools.lru_cache(maxsize=4096)
def _tensor_map(pointer: int, num_lines: int, columns: int, itemsize: int, lines: int) -> Any:
    """Returns the copy engine's description of a matrix. Its tiles have the order in shared memory
    that the matrix units read: pieces of 16 bytes change places within eight lines.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    sizes = [driver.cuuint64_t(columns), driver.cuuint64_t(num_lines)]
    box = [driver.cuuint32_t(TILE_BYTES // itemsize), driver.cuuint32_t(lines)]
    return _checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if itemsize == 1
            else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2, pointer, sizes, [driver.cuuint64_t(columns * itemsize)], box,
            [driver.cuuint32_t(1)] * 2, driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip


def _key(constants: Constants) -> tuple[object, ...]:
    return torch.cuda.current_device(), *constants.items()


def _function(binary: bytes, name: str) -> Any:
    from cuda.bindings import driver

    function = _checked(
        driver.cuModuleGetFunction(_checked(driver.cuModuleLoadData(binary)), name.encode())
    )
    room = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, room, MOST_SHARED))
    return function


def compiled(file: str, constants: Constants) -> tuple[bytes, bool]:
    """Returns the machine code of a CUDA C++ file for some values of its macros, and whether it was
    not in Triton's cache directory, where it is kept.

    Raises:
        RuntimeError: The file does not compile.
    """
    from cuda.bindings import nvrtc
    from triton import knobs

    source = b"".join((_FOLDER / name).read_bytes() for name in (_COMMON, file))
    options = [*_OPTIONS, *(f"-D{name}={value}".encode() for name, value in constants.items())]
    version = repr(_checked(nvrtc.nvrtcVersion())).encode()
    digest = hashlib.sha256(b"\0".join((version, *options, source))).hexdigest()
    kept = Path(knobs.cache.dir) / f"foredraft-{digest}.cubin"
    with contextlib.suppress(OSError):
        return kept.read_bytes(), False
    binary = _compile(source, file, options)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        scratch.write_bytes(binary)
        scratch.replace(kept)
    return binary, True


def _compile(source: bytes, file: str, options: list[bytes]) -> bytes:
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []))
    try:
        _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    except RuntimeError as error:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{file}: {log.decode()}") from error
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _checked(result: tuple[Any, ...]) -> Any:
    """Returns what a call of CUDA gives beside its status.

    Raises:
        RuntimeError: The call failed.
    """
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]
