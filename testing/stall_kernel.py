"""A kernel that stands still, or breaks, where a word says so."""

# mypy: ignore-errors
import triton
import triton.language as tl

FAR = 1 << 44  # elements beyond what anybody has


@triton.jit
def stall(word_ptr, point, nanoseconds, FAR: tl.constexpr = FAR):
    """At the point that the first word names: says so in the second, and spins; or faults, if the third is set.

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
