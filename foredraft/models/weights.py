"""Reads safetensors files through a memory map, tensor by tensor, giving pages back as it goes."""

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from foredraft.errors import CheckpointError
from foredraft.layers.parameters import Target
from foredraft.models.weight_files import checkpoint_files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
COPY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Locates a tensor in its file.

    Attributes:
        begin, end: Byte offsets from the file's start.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """Reads one file of the format https://huggingface.co/docs/safetensors; a context manager.

    Attributes:
        entries: Entries by tensor name, in the order of their bytes.

    Raises:
        CheckpointError: The file is missing, truncated or not in the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                self.entries = _read_header(file.read(8), file, size, path)
                # A private map, because torch wants memory that it could write.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._map.close()

    def copy_to(self, entry: TensorEntry, target: Target) -> None:
        """Copies a tensor, or the part that the target keeps; converts its type and releases
        the file's pages.
        """
        memory = target.memory
        if not memory.numel():
            return
        if not entry.shape or entry.shape == (1,):
            memory.copy_(self._view(entry, entry.begin, 1).view(memory.shape))
            return
        first, count = (target.first, len(memory)) if target.dim == 0 else (0, entry.shape[0])
        for row, values in self._blocks(entry, first, count):
            if target.dim:
                values = values.narrow(target.dim, target.first, memory.shape[target.dim])
            if target.is_flat:
                values = values.reshape(-1, *memory.shape[1:])
            memory[row - first : row - first + len(values)].copy_(values)

    def equals(self, entry: TensorEntry, target: Target) -> bool:
        """Returns whether `copy_to` would leave a target, rows of a tensor, unchanged."""
        if entry.shape != target.shape:
            return False
        memory, first = target.memory, target.first
        return all(
            torch.equal(values.to(memory), memory[row - first : row - first + len(values)])
            for row, values in self._blocks(entry, first, len(memory))
        )

    def _blocks(
        self, entry: TensorEntry, first: int, num_rows: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, some rows) of a range of a tensor's rows, block after block, and
        releases their pages.
        """
        row_bytes = (entry.end - entry.begin) // entry.shape[0]
        rows_at_once = max(1, COPY_BYTES // max(1, row_bytes))
        for row in range(first, first + num_rows, rows_at_once):
            count = min(rows_at_once, first + num_rows - row)
            begin = entry.begin + row * row_bytes
            values = self._view(entry, begin, count * row_bytes // entry.dtype.itemsize)
            yield row, values.view(count, *entry.shape[1:])
            del values
            self._forget(begin, begin + count * row_bytes)

    def mapped(self, entry: TensorEntry) -> torch.Tensor | None:
        """Returns the tensor mapped from the file, read on use; None where its bytes are not
        aligned.

        The map lives as long as the tensor, so the file must not be closed.
        """
        if entry.begin % entry.dtype.itemsize:
            return None
        count = (entry.end - entry.begin) // entry.dtype.itemsize
        return self._view(entry, entry.begin, count).view(entry.shape)

    def _view(self, entry: TensorEntry, begin: int, count: int) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=begin)

    def _forget(self, begin: int, end: int) -> None:
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def open_checkpoint(directory: Path) -> Iterator[SafetensorsFile]:
    """Yields the files of a checkpoint, one open at a time: model.safetensors, or those that
    its index names.

    Raises:
        CheckpointError: There is no such file, or one is broken.
    """
    for path in checkpoint_files(directory):
        with SafetensorsFile(path) as file:
            yield file


def check_finite(tensor: torch.Tensor, name: str, where: Path) -> None:
    """Raises CheckpointError, naming the tensor, when a weight is infinite or NaN in the type
    it is stored as.

    One pass without a copy: both ends of a range are NaN where one number is.
    """
    if tensor.dtype == torch.float8_e4m3fn:
        if bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(f"{where}: tensor {name} has values that are no numbers")
        return
    if tensor.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(tensor)):
        raise CheckpointError(
            f"{where}: tensor {name} has values that are infinite or no numbers in {tensor.dtype}"
        )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without the pages that torch adds."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_header(start: bytes, file: object, size: int, path: Path) -> dict[str, TensorEntry]:
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: not a safetensors file")
    if 8 + length > size:
        raise CheckpointError(f"{path}: truncated: {size} bytes end inside the header")
    try:
        header = json.loads(file.read(length))  # type: ignore[attr-defined]
        header.pop("__metadata__", None)
        entries = [_entry(name, value, 8 + length, path) for name, value in header.items()]
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{path}: broken safetensors header: {error!r}") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = 8 + length
    for entry in entries:
        if entry.end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {entry.name} ends at byte {entry.end} of {size}"
            )
        if entry.begin != at:
            raise CheckpointError(
                f"{path}: broken header: tensor {entry.name} begins at byte {entry.begin}, and what"
                f" is before it ends at {at}"
            )
        at = entry.end
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes after the last tensor belong to none")
    return {entry.name: entry for entry in entries}


def _entry(name: str, value: dict[str, object], data: int, path: Path) -> TensorEntry:
    kind = value["dtype"]
    if kind not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has the unsupported type {kind}")
    shape = tuple(int(size) for size in value["shape"])  # type: ignore[attr-defined]
    begin, end = (data + int(offset) for offset in value["data_offsets"])  # type: ignore[attr-defined]
    numel = 1
    for size in shape:
        numel *= size
    dtype = DTYPES[str(kind)]
    if min(shape, default=0) < 0 or begin < data or end - begin != numel * dtype.itemsize:
        raise CheckpointError(f"{path}: broken header: bytes of tensor {name} do not fit its shape")
    return TensorEntry(name, dtype, shape, begin, end)
