"""Declares a record once: the host fills it as a numpy structure, and kernels read it as 32-bit
words at constant offsets.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

WORD = 4  # bytes
ALIGNMENT = 4  # a record's header is a multiple of this many words


class Layout:
    """Columns of a record, in order.

    Args:
        columns: Name and type of each: a numpy type of 4 bytes, one of 8 bytes (two words, the low
            one first), or another layout whose columns are put in here.

    Attributes:
        names: Names of the columns; an inner layout's columns keep their own names.
        dtype: The columns as a numpy structure, without padding.
        block: The same as bytes, which numpy copies many times as fast. So the whole records have
            inner layouts.
        size: Number of words of a header, padding included.

    Raises:
        ValueError: Two columns have one name, or a type has another size.
    """

    def __init__(self, *columns: "tuple[str, type[np.generic] | Layout]") -> None:
        self._first: dict[str, int] = {}
        self._blocks: list[tuple[str, np.dtype[Any]]] = []
        fields: list[tuple[str, np.dtype[Any]]] = []
        begin = 0
        for name, kind in columns:
            if isinstance(kind, Layout):
                inner = {own: begin + kind[own] for own in kind.names}
                own_dtype, block = kind.dtype, kind.block
            else:
                inner = {name: begin}
                own_dtype = block = np.dtype(kind)
                if own_dtype.itemsize not in (WORD, 2 * WORD):
                    raise ValueError(f"column {name} has {own_dtype.itemsize} bytes, not 4 or 8")
            if twice := inner.keys() & self._first.keys():
                raise ValueError(f"two columns are named {min(twice)}")
            self._first |= inner
            fields.append((name, own_dtype))
            self._blocks.append((name, block))
            begin += own_dtype.itemsize // WORD
        self.names: tuple[str, ...] = tuple(self._first)
        self.dtype: np.dtype[Any] = np.dtype(fields)
        self.block: np.dtype[Any] = np.dtype((np.void, begin * WORD))
        self.size = -(-begin // ALIGNMENT) * ALIGNMENT
        if padding := self.size * WORD - self.dtype.itemsize:
            self._blocks.append(("padding", np.dtype((np.void, padding))))
        self._whole: np.dtype[Any] = np.dtype(self._blocks)

    def __getitem__(self, name: str) -> int:
        """The word at which a column begins."""
        return self._first[name]

    def constants(self, *names: str) -> dict[str, int]:
        """The words at which columns begin, as arguments of a kernel: each by its name in
        capitals.
        """
        return {name.upper(): self._first[name] for name in names}

    def whole(self, **arrays: int) -> np.dtype[Any]:
        """A record with int32 arrays behind its header.

        Args:
            arrays: Number of elements of each, by name, in order.
        """
        if not arrays:
            return self._whole
        behind = [(name, np.int32, (length,)) for name, length in arrays.items()]
        return np.dtype([*self._blocks, *behind])

    def pack(self, objects: Iterable[object]) -> npt.NDArray[np.void]:
        """The columns of some objects, which have them as attributes or are tuples of them: an
        array [n] of `block`.
        """
        values = attrgetter(*self.names)
        rows = [one if isinstance(one, tuple) else values(one) for one in objects]
        return np.array(rows, self.dtype).view(self.block)
