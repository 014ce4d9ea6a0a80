"""Triton kernels that exchange small blocks between ranks on several GPUs of a host. Each rank can
write to the others' memory.

Each program sends its block to all other ranks and then waits for theirs. A program has two places
for blocks, which it uses in turn: a rank that sends the next block but one has the answer to the
next one, so every rank has read this one.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

SUM, FIRST, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def send_and_wait(
    own, at, is_there, places, flags, counts,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Sends a block `own` to the other ranks and waits for theirs.

    Args:
        at: Index of each element in the block.
        is_there: Whether the element is part of the block.
        places: For each rank, its memory for blocks [RANKS, 2, PROGRAMS, ROOM].
        flags: For each rank, int32 [RANKS, PROGRAMS]: number of the newest block of each sender.
        counts: int32 [PROGRAMS], number of the newest block of this rank.

    Returns:
        Where rank 0's block lies in this rank's memory; `2 * PROGRAMS * ROOM` after it lies the
        next rank's. This rank's own is not there.
    """
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    place = ((count & 1) * PROGRAMS + program).to(tl.int64) * ROOM
    stride: tl.constexpr = 2 * PROGRAMS * ROOM
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(places[rank] + RANK * stride + place + at, own, mask=is_there)
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = flags[rank] + RANK * PROGRAMS + program
            tl.atomic_xchg(flag, count, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = flags[RANK] + rank * PROGRAMS + program
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while seen - count < 0:  # also where the numbers wrap around
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    tl.store(counts + program, count)
    return places[RANK] + place


@triton.jit
def sum_of_ranks(
    own, others, stride, at, is_there, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Adds up the ranks' blocks in float32 in the order of the ranks; `others` and `stride` as
    `send_and_wait` returns them.
    """
    total = tl.zeros_like(own).to(tl.float32)
    for rank in tl.static_range(RANKS):
        at_rank = others + rank * stride + at
        part = own if rank == RANK else tl.load(at_rank, mask=is_there, other=0)
        total = part.to(tl.float32) if rank == 0 else total + part.to(tl.float32)
    return total


@triton.jit
def exchange(
    x_ptr, out_ptr, places, flags, counts, size, width,
    BLOCK: tl.constexpr, KIND: tl.constexpr, ROOM: tl.constexpr, PROGRAMS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Exchanges one block of x [size]: writes the ranks' sum, or rank 0's x, or all ranks' x as
    [rows, RANKS, width].
    """
    at = tl.arange(0, BLOCK)
    index = tl.program_id(0) * BLOCK + at
    is_there = index < size
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.load(x_ptr + index, mask=is_there, other=0)
    others = send_and_wait(own, at, is_there, places, flags, counts, ROOM, PROGRAMS, RANK, RANKS)
    stride: tl.constexpr = 2 * PROGRAMS * ROOM
    if KIND == SUM:
        total = sum_of_ranks(own, others, stride, at, is_there, RANK, RANKS)
        tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=is_there)
    elif KIND == FIRST:
        if RANK != 0:
            own = tl.load(others + at, mask=is_there, other=0)
        tl.store(out_ptr + index, own, mask=is_there)
    else:
        out_ptr += (index // width).to(tl.int64) * RANKS * width + index % width
        for rank in tl.static_range(RANKS):
            part = own
            if rank != RANK:
                part = tl.load(others + rank * stride + at, mask=is_there, other=0)
            tl.store(out_ptr + rank * width, part, mask=is_there)
