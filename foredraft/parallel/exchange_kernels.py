"""Triton kernels that exchange small blocks between ranks on several GPUs of a host. Each rank can
write to the others' memory.

Each program sends a block to other ranks and then waits for theirs, once or for several blocks one
after the other. A program has two places for the blocks of each rank, which it uses in turn: who
has received all of one block sends the next but one to the same place, and by then every rank has
read what was there.

Blocks of floats need no flags. A place holds marks until numbers come, and who has read them writes
marks again, before it sends the next block (Lamport's way, as in TensorRT-LLM). Other blocks are
followed by a flag, which the sender holds back until the block has arrived.

Few blocks go to all ranks, and each rank adds up all of them ("one-shot"). Of many each rank adds up
its share, and sends the sums on ("two-shot"): that is twice the way, but each rank sends a block to
one other and its sums to all, instead of every block to all.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
import time

import triton
import triton.language as tl

SUM, FIRST, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EVERYONE = tl.constexpr(-1)
# Polls after which a kernel ends its process, about ten minutes; the host is told long before.
_MOST_POLLS = tl.constexpr(1 << 30)

nanoseconds = tl.extra.cuda.globaltimer
if triton.knobs.runtime.interpret:

    def nanoseconds():
        """Reads the host's clock: an interpreted kernel has no GPU's timer."""
        return tl.full((), time.monotonic_ns(), tl.int64)


@triton.jit
def _words(block):
    """Packs floats of 16 or 32 bits into words of 32; those that are marks become other NaNs."""
    if block.dtype.primitive_bitwidth == 16:
        halves = block.to(tl.int16, bitcast=True).reshape(block.shape[0] // 2, 2)
        low, high = tl.split(halves)
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        words = block.to(tl.int32, bitcast=True)
    return tl.where(words == -1, 0x7FFF7FFF, words)


@triton.jit
def _floats(words, dtype: tl.constexpr):
    """Unpacks what `_words` packed."""
    if dtype.primitive_bitwidth == 16:
        halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
        return halves.reshape(words.shape[0] * 2).to(dtype, bitcast=True)
    else:
        return words.to(dtype, bitcast=True)


@triton.jit
def _counted(polls):
    """Counts a poll, and ends a wait without end."""
    if polls >= _MOST_POLLS:
        polls = tl.inline_asm_elementwise(
            "trap; mov.u32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
        )
    return polls + 1


@triton.jit
def _place(sender, count, ROOM: tl.constexpr, PROGRAMS: tl.constexpr):
    """Returns where this program's block of a sender lies in a rank's memory."""
    turn = (count & 1) * PROGRAMS + tl.program_id(0)
    return (sender * 2 * PROGRAMS + turn).to(tl.int64) * ROOM


@triton.jit
def send(
    block, to, length, count, places, flags,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, LAMPORT: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Sends a block to another rank, or to EVERYONE else.

    Args:
        length: Number of elements of the block, from the first of `block`; a multiple of 8 with
            LAMPORT.
        count: The block's number, see `newest`.
        places: For each rank, its memory for blocks [RANKS, 2, PROGRAMS, ROOM]; with LAMPORT
            int32, at first all marks (-1).
        flags: For each rank, int32 [RANKS, PROGRAMS]: number of the newest block of each sender
            without LAMPORT.
    """
    if LAMPORT:
        length = length // (32 // block.dtype.primitive_bitwidth)
        block = _words(block)
    is_there = tl.arange(0, block.shape[0]) < length
    at = _place(RANK, count, ROOM, PROGRAMS) + tl.arange(0, block.shape[0])
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            is_meant = (to == EVERYONE) | (to == rank)
            if is_meant:
                tl.store(places[rank] + at, block, mask=is_there)
    if not LAMPORT:
        tl.debug_barrier()
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                is_meant = (to == EVERYONE) | (to == rank)
                if is_meant:
                    flag = flags[rank] + RANK * PROGRAMS + tl.program_id(0)
                    tl.atomic_xchg(flag, count, sem="release", scope="sys")


@triton.jit
def _look(
    senders, at, is_there, count, places, ROOM: tl.constexpr, PROGRAMS: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """Loads each sender's words `at`.

    Returns:
        A tuple with each sender's words, and 1 + a sender some of whose words are marks, or 0.
    """
    blocks = ()
    for i in tl.static_range(len(senders)):  # all are on their way before the first is looked at
        place = places[RANK] + _place(senders[i], count, ROOM, PROGRAMS)
        blocks = blocks + (tl.load(place + at, mask=is_there, other=0, volatile=True),)
    missing = tl.zeros_like(at)
    for i in tl.static_range(len(senders)):
        missing = tl.where(blocks[i] == -1, senders[i] + 1, missing)
    return blocks, tl.max(missing, 0)


@triton.jit
def receive(
    senders, like, length, count, places, flags, told, patience,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, LAMPORT: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Waits for the blocks that other ranks have sent under the number `count`.

    Args:
        senders: Tuple of ranks.
        like: A block of the same length and type.
        told: int64 [3] that the host reads; its first gets 1 + a rank whose block has not come
            after `patience` polls.

    Returns:
        A tuple with each sender's block.
    """
    polls = 0
    blocks = ()
    if LAMPORT:
        WIDTH: tl.constexpr = 32 // like.dtype.primitive_bitwidth
        at = tl.arange(0, like.shape[0] // WIDTH)
        is_there = at < length // WIDTH
        came, missing = _look(senders, at, is_there, count, places, ROOM, PROGRAMS, RANK)
        while missing != 0:
            if polls == patience:
                tl.store(told, missing)
            polls = _counted(polls)
            came, missing = _look(senders, at, is_there, count, places, ROOM, PROGRAMS, RANK)
        for i in tl.static_range(len(senders)):
            place = places[RANK] + _place(senders[i], count, ROOM, PROGRAMS)
            tl.store(place + at, tl.full(at.shape, -1, tl.int32), mask=is_there)
            blocks = blocks + (_floats(came[i], like.dtype),)
    else:
        for i in tl.static_range(len(senders)):
            flag = flags[RANK] + senders[i] * PROGRAMS + tl.program_id(0)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while seen - count < 0:  # also where the numbers wrap around
                if polls == patience:
                    tl.store(told, senders[i] + 1)
                polls = _counted(polls)
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        at = tl.arange(0, like.shape[0])
        for i in tl.static_range(len(senders)):
            place = places[RANK] + _place(senders[i], count, ROOM, PROGRAMS)
            blocks = blocks + (tl.load(place + at, mask=at < length, other=0),)
    return blocks


@triton.jit
def receive_all(
    own, length, count, places, flags, told, patience,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, LAMPORT: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Returns a tuple with each rank's block; see `receive`."""
    others = ()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            others = others + (rank,)
    came = receive(
        others, own, length, count, places, flags, told, patience, ROOM, PROGRAMS, LAMPORT, RANK
    )
    blocks = ()
    for rank in tl.static_range(RANKS):
        if rank < RANK:
            blocks = blocks + (came[rank],)
        elif rank == RANK:
            blocks = blocks + (own,)
        else:
            blocks = blocks + (came[rank - 1],)
    return blocks


@triton.jit
def _sum_of_all(
    own, length, count, places, flags, told, patience,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, LAMPORT: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Adds up the ranks' blocks in float32 in the order of the ranks, and rounds once."""
    blocks = receive_all(
        own, length, count, places, flags, told, patience, ROOM, PROGRAMS, LAMPORT, RANK, RANKS
    )
    total = blocks[0].to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += blocks[rank].to(tl.float32)
    return total.to(own.dtype)


@triton.jit
def sum_of_ranks(
    own, block, length, count, places, flags, times, told, patience,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, LAMPORT: tl.constexpr, TWO_SHOT: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Returns the sum of the ranks' blocks, added up in float32 in the order of the ranks and
    rounded to their type; see `send` and `receive`.

    Args:
        block: Number of the block among all of the exchange.
    """
    if TWO_SHOT:
        # Blocks that are as many programs apart as a card runs at once have different owners too.
        owner = (block + block // RANKS) % RANKS
        if owner == RANK:
            sent = nanoseconds()
            total = _sum_of_all(
                own, length, count, places, flags, told, patience, ROOM, PROGRAMS, LAMPORT, RANK,
                RANKS,
            )  # fmt: skip
            send(
                total, EVERYONE, length, count, places, flags, ROOM, PROGRAMS, LAMPORT, RANK, RANKS
            )
        else:
            send(own, owner, length, count, places, flags, ROOM, PROGRAMS, LAMPORT, RANK, RANKS)
            sent = nanoseconds()
            came = receive(
                (owner,), own, length, count, places, flags, told, patience, ROOM, PROGRAMS,
                LAMPORT, RANK,
            )  # fmt: skip
            total = came[0]
    else:
        send(own, EVERYONE, length, count, places, flags, ROOM, PROGRAMS, LAMPORT, RANK, RANKS)
        sent = nanoseconds()
        total = _sum_of_all(
            own, length, count, places, flags, told, patience, ROOM, PROGRAMS, LAMPORT, RANK, RANKS
        )
    note(times, sent, False)
    return total


@triton.jit
def newest(counts):
    """Returns the number of the newest block that this program has sent; `counts` is int32
    [PROGRAMS].
    """
    return tl.load(counts + tl.program_id(0))


@triton.jit
def go_on(counts, count):
    """Lets this program send its next block: its marks are back before another rank can know."""
    tl.debug_barrier()
    tl.atomic_xchg(counts + tl.program_id(0), count, sem="release", scope="sys")
    tl.debug_barrier()


@triton.jit
def finish(counts, count):
    """Stores the number of the newest block, once this program has received it from all ranks."""
    tl.debug_barrier()
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def note(times, sent, BESIDE: tl.constexpr):
    """Notes that the ranks' blocks have come to the first program, without a wait for anything.

    Args:
        times: int64 [4] in nanoseconds: sum of waits; sum of forwards, and of waits beside them;
            end of the newest wait of a forward; beginning of the newest forward.
        sent: When this rank's block was sent.
        BESIDE: Whether the exchange is no part of a forward.
    """
    came = nanoseconds()
    if tl.program_id(0) == 0:
        tl.atomic_add(times, came - sent, sem="relaxed")
        if BESIDE:
            tl.atomic_add(times + 1, came - sent, sem="relaxed")
        else:
            tl.store(times + 2, came)


@triton.jit
def begin_forward(times, told):
    """Adds the last forward, and tells the host the sums of waits and of what is between them."""
    waits = tl.load(times)
    forwards = tl.load(times + 1) + tl.load(times + 2) - tl.load(times + 3)
    tl.store(told + 1, waits)
    tl.store(told + 2, forwards - waits)
    tl.store(times + 1, forwards)
    tl.store(times + 3, nanoseconds())


@triton.jit
def exchange(
    x_ptr, out_ptr, places, flags, counts, times, told, patience, size, width,
    BLOCK: tl.constexpr, KIND: tl.constexpr, ROOM: tl.constexpr, PROGRAMS: tl.constexpr,
    LAMPORT: tl.constexpr, TWO_SHOT: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Exchanges one block of x [size]: writes the ranks' sum, or rank 0's x, or all ranks' x as
    [rows, RANKS, width].
    """
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    length = size - block * BLOCK
    is_there = index < size
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.load(x_ptr + index, mask=is_there, other=0)
    count = newest(counts) + 1
    if KIND == SUM:
        total = sum_of_ranks(
            own, block, length, count, places, flags, times, told, patience, ROOM, PROGRAMS,
            LAMPORT, TWO_SHOT, RANK, RANKS,
        )  # fmt: skip
        tl.store(out_ptr + index, total, mask=is_there)
    else:
        send(own, EVERYONE, length, count, places, flags, ROOM, PROGRAMS, LAMPORT, RANK, RANKS)
        sent = nanoseconds()
        blocks = receive_all(
            own, length, count, places, flags, told, patience, ROOM, PROGRAMS, LAMPORT, RANK, RANKS
        )
        note(times, sent, KIND == FIRST)
        if KIND == FIRST:
            tl.store(out_ptr + index, blocks[0], mask=is_there)
        else:
            out_ptr += (index // width).to(tl.int64) * RANKS * width + index % width
            for rank in tl.static_range(RANKS):
                tl.store(out_ptr + rank * width, blocks[rank], mask=is_there)
    finish(counts, count)
