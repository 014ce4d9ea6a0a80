"""Loads keys and values by pages, in Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def load_pages(table, keys, end, PAGE_SIZE: tl.constexpr):
    """Loads the pages of the keys before `end`."""
    return tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0)


@triton.jit
def load_rows(
    ptr, slots, in_range, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr = True
):
    """Loads rows of WIDTH elements [slots, BLOCK], with zeros outside of the range.

    Args:
        MASKED: Whether a row may be outside of the range.
    """
    columns = tl.arange(0, BLOCK)
    if not MASKED and WIDTH == BLOCK:
        return tl.load(ptr + slots[:, None] * WIDTH + columns[None, :])
    wanted = in_range[:, None] & (columns < WIDTH)[None, :]
    return tl.load(ptr + slots[:, None] * WIDTH + columns[None, :], mask=wanted, other=0.0)
