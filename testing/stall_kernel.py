"""A kernel that stops, or fails, where a word says so."""

# mypy: ignore-errors
import triton
import triton.language as tl

FAR = 1 << 44  # number of elements beyond any memory


@triton.jit
def stall(word_ptr, point, nanoseconds, FAR: tl.constexpr = FAR):
    """Stops at the point that the first word names: reports it in the second word, and spins.

    Faults if the third word is set.

    Args:
        word_ptr: int32 [4] in pinned memory of the host.
    """
    if tl.load(word_ptr, volatile=True) == point:
        tl.store(word_ptr + 1, point, cache_modifier=".wt")
        begin = tl.extra.cuda.globaltimer()
        now = begin
        while now - begin < nanoseconds:
            now = tl.extra.cuda.globaltimer()
            if tl.load(word_ptr + 2, volatile=True) != 0:
                tl.store(word_ptr + FAR, point)
