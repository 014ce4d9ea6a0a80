"""Triton kernels that exchange small blocks between ranks on several GPUs of a host. Each rank can
write to the others' memory.

Each program sends a block to all other ranks and then waits for theirs, once or for several blocks
one after the other. A program has two places for blocks, which it uses in turn: a rank that sends
the next block but one has the answer to the next one, so every rank has read this one. Few blocks
travel as words that hold the block's number beside their data, so that no rank waits until a block
has arrived before it says so; many would take twice the bytes, and a flag follows each of them.
"""

# mypy: ignore-errors
import time

import triton
import triton.language as tl

SUM, FIRST, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Polls after which a kernel ends its process, about ten minutes; the host is told long before.
_MOST_POLLS = tl.constexpr(1 << 30)

nanoseconds = tl.extra.cuda.globaltimer
if triton.knobs.runtime.interpret:

    def nanoseconds():
        """Reads the host's clock: an interpreted kernel has no GPU's timer."""
        return tl.full((), time.monotonic_ns(), tl.int64)


@triton.jit
def _words(own, count):
    """Packs a block [n] of 16- or 32-bit numbers: 32 bits of them below `count` in each int64.

    Returns the even words and the odd ones: a thread has four in a row, and can store and load two
    at once.
    """
    if own.dtype.primitive_bitwidth == 16:
        halves = own.to(tl.int16, bitcast=True).reshape(own.shape[0] // 2, 2)
        low, high = tl.split(halves)
        bits = (low.to(tl.int64) & 0xFFFF) | ((high.to(tl.int64) & 0xFFFF) << 16)
    else:
        bits = own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    words = bits | (count.to(tl.int64) << 32)
    return tl.split(words.reshape(words.shape[0] // 2, 2))


@triton.jit
def _numbers(even, odd, dtype: tl.constexpr):
    """Unpacks what `_words` packed."""
    words = tl.join(even, odd).reshape(even.shape[0] * 2)
    if dtype.primitive_bitwidth == 16:
        both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
        numbers = both.reshape(words.shape[0] * 2)
    else:
        numbers = words.to(tl.int32)
    return numbers.to(dtype, bitcast=True)


@triton.jit
def _waited(polls, patience, told, rank: tl.constexpr):
    """Tells once that a rank's block has not come, and ends a wait without end."""
    if polls == patience:
        tl.store(told, rank + 1)
    if polls >= _MOST_POLLS:
        polls = tl.inline_asm_elementwise(
            "trap; mov.u32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
        )
    return polls + 1


@triton.jit
def _looked(even_ptr, odd_ptr, is_there, count):
    """Loads the words of a block, and whether some of them are not those of `count`."""
    even = tl.load(even_ptr, mask=is_there, other=0, volatile=True)
    odd = tl.load(odd_ptr, mask=is_there, other=0, volatile=True)
    is_old = ((even >> 32).to(tl.int32) != count) | ((odd >> 32).to(tl.int32) != count)
    return even, odd, tl.max((is_there & is_old).to(tl.int32), 0)


@triton.jit
def send(
    own, length, count, places, flags,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Sends a block `own` to the other ranks.

    Args:
        length: Number of elements of the block, from the first of `own`; with WORDS a
            multiple of 8.
        count: The block's number, see `newest`.
        places: For each rank, its memory for blocks [RANKS, 2, PROGRAMS, ROOM], of int64 with
            WORDS.
        flags: For each rank, int32 [RANKS, PROGRAMS]: number of the newest block of each sender
            without WORDS.
    """
    program = tl.program_id(0)
    place = (RANK * 2 * PROGRAMS + (count & 1) * PROGRAMS + program).to(tl.int64) * ROOM
    if WORDS:
        even, odd = _words(own, count)
        at = tl.arange(0, even.shape[0])
        is_there = at < length // (own.shape[0] // even.shape[0])
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                tl.store(places[rank] + place + at, even, mask=is_there)
                tl.store(places[rank] + place + ROOM // 2 + at, odd, mask=is_there)
    else:
        at = tl.arange(0, own.shape[0])
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                tl.store(places[rank] + place + at, own, mask=at < length)
        tl.debug_barrier()
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                flag = flags[rank] + RANK * PROGRAMS + program
                tl.atomic_xchg(flag, count, sem="release", scope="sys")


@triton.jit
def receive(
    own, length, count, places, flags, told, patience,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr,
    SENDER: tl.constexpr,
):  # fmt: skip
    """Waits for the block that another rank has sent under the number `count`.

    Args:
        own: This rank's block, of the same length and type.
        told: int64 [3] that the host reads; its first gets SENDER + 1 after `patience` polls.

    Returns:
        The block, as `own`.
    """
    program = tl.program_id(0)
    place = (SENDER * 2 * PROGRAMS + (count & 1) * PROGRAMS + program).to(tl.int64) * ROOM
    polls = 0
    if WORDS:
        half: tl.constexpr = own.shape[0] // (4 if own.dtype.primitive_bitwidth == 16 else 2)
        at = tl.arange(0, half)
        is_there = at < length // (own.shape[0] // half)
        words = places[RANK] + place + at
        even, odd, missing = _looked(words, words + ROOM // 2, is_there, count)
        while missing != 0:
            polls = _waited(polls, patience, told, SENDER)
            even, odd, missing = _looked(words, words + ROOM // 2, is_there, count)
        block = _numbers(even, odd, own.dtype)
    else:
        flag = flags[RANK] + SENDER * PROGRAMS + program
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen - count < 0:  # also where the numbers wrap around
            polls = _waited(polls, patience, told, SENDER)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        at = tl.arange(0, own.shape[0])
        block = tl.load(places[RANK] + place + at, mask=at < length, other=0)
    return block


@triton.jit
def sum_of_ranks(
    own, length, count, places, flags, times, told, patience,
    ROOM: tl.constexpr, PROGRAMS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Exchanges a block, and adds up the ranks' in float32 in the order of the ranks; see `send`
    and `receive`.
    """
    send(own, length, count, places, flags, ROOM, PROGRAMS, WORDS, RANK, RANKS)
    sent = nanoseconds()
    total = tl.zeros_like(own).to(tl.float32)
    for rank in tl.static_range(RANKS):
        part = own
        if rank != RANK:
            part = receive(
                own, length, count, places, flags, told, patience, ROOM, PROGRAMS, WORDS, RANK, rank
            )
        total = part.to(tl.float32) if rank == 0 else total + part.to(tl.float32)
    note(times, sent, False)
    return total


@triton.jit
def newest(counts):
    """Returns the number of the newest block that this program has sent; `counts` is int32
    [PROGRAMS].
    """
    return tl.load(counts + tl.program_id(0))


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
    WORDS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Exchanges one block of x [size]: writes the ranks' sum, or rank 0's x, or all ranks' x as
    [rows, RANKS, width].
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = size - tl.program_id(0) * BLOCK
    is_there = index < size
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.load(x_ptr + index, mask=is_there, other=0)
    count = newest(counts) + 1
    if KIND == SUM:
        total = sum_of_ranks(
            own, length, count, places, flags, times, told, patience, ROOM, PROGRAMS, WORDS, RANK,
            RANKS,
        )  # fmt: skip
        tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=is_there)
    else:
        send(own, length, count, places, flags, ROOM, PROGRAMS, WORDS, RANK, RANKS)
        sent = nanoseconds()
        if KIND == ALL:
            out_ptr += (index // width).to(tl.int64) * RANKS * width + index % width
        else:
            out_ptr += index
        for rank in tl.static_range(RANKS):
            part = own
            if rank != RANK:
                part = receive(
                    own, length, count, places, flags, told, patience, ROOM, PROGRAMS, WORDS, RANK,
                    rank,
                )  # fmt: skip
            if KIND == ALL:
                tl.store(out_ptr + rank * width, part, mask=is_there)
            elif rank == 0:
                tl.store(out_ptr, part, mask=is_there)
        note(times, sent, KIND == FIRST)
    finish(counts, count)
