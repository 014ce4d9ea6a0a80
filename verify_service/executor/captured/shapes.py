"""Shapes that decode steps are padded to: one captured graph serves all smaller steps."""

LEAST_ROWS = 32  # minimum rows of a step for a graph between one row per sequence and all


class PaddedShapes:
    """Finds the padded shape of a step: B sequences of R rows each.

    Args:
        max_batch: Maximum number of sequences.
        max_rows: Maximum number of rows of a sequence, the root included.

    Attributes:
        max_batch: The argument of this name.
    """

    def __init__(self, max_batch: int, max_rows: int) -> None:
        self.max_batch = max_batch
        self._batch_sizes = batch_sizes(max_batch)
        self._row_sizes = {batch: row_sizes(batch, max_rows) for batch in self._batch_sizes}

    def batch_size(self, num_sequences: int) -> int:
        """Returns the padded batch size of a step."""
        return next(size for size in self._batch_sizes if size >= num_sequences)

    def row_size(self, num_sequences: int, num_rows: int) -> int:
        """Returns the padded number of rows of each sequence of a step."""
        sizes = self._row_sizes[self.batch_size(num_sequences)]
        return next(size for size in sizes if size >= num_rows)

    def all(self) -> list[tuple[int, int]]:
        """Returns (batch, rows per sequence) of all shapes, the largest first."""
        shapes = [(batch, rows) for batch, sizes in self._row_sizes.items() for rows in sizes]
        return sorted(shapes, key=lambda shape: (shape[1], shape[0]), reverse=True)


def batch_sizes(max_batch: int) -> list[int]:
    """Returns the sizes that batches are padded to: powers of two up to 8, then multiples of 8,
    farther apart from 64 on.
    """
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_batch + 1, 32)]
    kept = [size for size in sizes if size < max_batch]
    return [*kept, max_batch]


def row_sizes(batch: int, max_rows: int) -> list[int]:
    """Returns the numbers of rows that sequences are padded to: 1, `max_rows`, and powers of two
    between that make at least LEAST_ROWS rows in all.

    A few rows in all cost a GPU the same, so small batches have no small trees.
    """
    powers = (1 << i for i in range(1, max_rows.bit_length()))
    kept = [rows for rows in powers if rows < max_rows and batch * rows >= LEAST_ROWS]
    return sorted({1, *kept, max_rows})
