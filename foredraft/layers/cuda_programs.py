"""Compiles kernels in CUDA C++ while the process runs, and launches them.

NVRTC compiles them, which comes with torch's CUDA builds as `cuda.bindings` does; no `nvcc` is
needed. Such kernels exist where Triton cannot express what makes them fast. Each has a Triton
kernel of the same bits beside it, for where this does not work.
"""

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_CAPABILITY = (9, 0)  # whose matrix units give the bits of the Triton kernels
_LEAST_NVRTC = 13  # major version that the kernels have run with


@functools.cache
def are_supported(device: torch.device) -> bool:
    """Returns whether the kernels can be compiled for a device, and give the same bits there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    try:
        from cuda.bindings import nvrtc

        version = _checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        logger.info("kernels in CUDA C++ are not compiled, Triton's are used: %s", error)
        return False
    return bool(version >= _LEAST_NVRTC)


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

    def is_ready(self, constants: dict[str, int], shared_bytes: int) -> bool:
        """Returns whether the kernel can be launched with these constants; compiles it if it was
        not yet.
        """
        if self._failed:
            return False
        try:
            self._function(constants, shared_bytes)
        except (RuntimeError, OSError) as error:
            logger.warning("%s is not used, a Triton kernel is: %s", self._file, error)
            self._failed = True
        return not self._failed

    def launch(
        self,
        constants: dict[str, int],
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: tuple[torch.Tensor | int, ...],
    ) -> None:
        """Launches the kernel on the current stream, where its start may overlap the end of the
        kernel before (programmatic dependent launch); it waits for that one itself.

        Args:
            constants: Values of the macros.
            blocks: Number of blocks.
            threads: Number of threads of a block.
            shared_bytes: Bytes of dynamic shared memory of a block.
            arguments: Tensors, whose addresses the kernel gets, and 32-bit integers.
        """
        from cuda.bindings import driver

        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        values = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        types = [
            ctypes.c_void_p if isinstance(one, torch.Tensor) else ctypes.c_int for one in arguments
        ]
        function = self._function(constants, shared_bytes)
        _checked(driver.cuLaunchKernelEx(config, function, (tuple(values), tuple(types)), 0))

    def _function(self, constants: dict[str, int], shared_bytes: int) -> Any:
        from cuda.bindings import driver

        key = torch.cuda.current_device(), shared_bytes, *constants.items()
        if key not in self._loaded:
            binary = compiled(self._file, tuple(constants.items()))
            module = _checked(driver.cuModuleLoadData(binary))
            function = _checked(driver.cuModuleGetFunction(module, self._name.encode()))
            room = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, room, shared_bytes))
            self._loaded[key] = function
        return self._loaded[key]


@functools.cache
def compiled(file: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    """Returns the machine code of a CUDA C++ file for some values of its macros.

    Raises:
        RuntimeError: The file does not compile.
    """
    from cuda.bindings import nvrtc

    source = b"".join((_FOLDER / name).read_bytes() for name in ("native_common.cuh", file))
    program = _checked(nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in constants]
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
    return result[1] if len(result) > 1 else None
