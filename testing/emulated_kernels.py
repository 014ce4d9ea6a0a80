"""Runs kernels in CUDA C++ on this CPU, with the instructions of GPUs emulated."""

import functools
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from foredraft.layers import cuda_programs
from foredraft.layers.cuda_programs import Argument, Constants, Tiles

_LAYERS = Path(cuda_programs.__file__).parent
_NATIVE = Path(__file__).parent / "native"
_COMPILER = ("g++", "-std=c++20", "-O1", "-pthread", "-w")


class Emulated(cuda_programs.Program):
    """A kernel that this CPU runs; what it needs for that goes to a folder."""

    def __init__(self, folder: Path, file: str, name: str) -> None:
        super().__init__(file, name)
        self._folder = folder

    def is_ready(self, constants: Constants) -> bool:
        """See Program."""
        return True

    def launch(
        self,
        constants: Constants,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: tuple[Argument, ...],
    ) -> None:
        """See Program; tensors get what the kernel wrote."""
        assert shared_bytes <= cuda_programs.MOST_SHARED
        macros = constants | {
            "KERNEL_FILE": f'"{self._file}"', "KERNEL_NAME": self._name,
            "NUM_ARGUMENTS": len(arguments),
        }  # fmt: skip
        program = self._folder / "program"
        subprocess.run(
            [*_COMPILER, "-include", f"{_library().name}/library.h", f"-I{_LAYERS}",
             *(f"-D{name}={value}" for name, value in macros.items()),
             str(_NATIVE / "main.cpp"), "-o", str(program)], check=True,
        )  # fmt: skip
        words, tensors = [], {}
        for index, one in enumerate(arguments):
            if isinstance(one, int):
                words.append(f"= {one}")
                continue
            path = self._folder / str(index)
            tensor = one.matrix if isinstance(one, Tiles) else one
            path.write_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            if isinstance(one, Tiles):
                (lines, columns), itemsize = tensor.shape, tensor.element_size()
                words.append(f"{path} {lines} {columns * itemsize} {one.lines}")
            else:
                words.append(str(path))
                tensors[path] = tensor
        subprocess.run([program, str(blocks), *words], check=True, timeout=120)
        for path, tensor in tensors.items():
            found = torch.frombuffer(bytearray(path.read_bytes()), dtype=tensor.dtype)
            tensor.copy_(found.view(tensor.shape))


@functools.cache
def _library() -> TemporaryDirectory[str]:
    """Compiles the headers of C++'s own library for all programs, half of the time of each: they
    are `library.h` in this folder.
    """
    folder = TemporaryDirectory()
    header = Path(folder.name) / "library.h"
    texts = "\n".join((_NATIVE / name).read_text() for name in ("emulated.h", "main.cpp"))
    header.write_text("\n".join(re.findall("#include <.+>", texts)))
    subprocess.run([*_COMPILER, "-x", "c++-header", str(header)], check=True)
    return folder
