"""Tests that responses are kept within bytes and time, and only for their owner."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import hypothesis
import hypothesis.strategies as st

from gateway.responses.store import OVERHEAD_BYTES, ResponseStore, Turn, conversation


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs the test in an event loop, which the store's timer needs."""
    return functools.wraps(test)(lambda: asyncio.run(test()))


async def size_of(body: Any, items: list[Any]) -> int:
    """Returns the bytes of one response that continues no other."""
    store = ResponseStore(2**30, 60.0, Clock())
    store.put("", "x", body, items)
    return store.num_bytes


@in_a_loop
async def test_only_its_owner_finds_it() -> None:
    clock = Clock()
    store = ResponseStore(2**20, 60.0, clock)
    store.put("a", "x", {"n": 1}, [])
    store.put("b", "x", {"n": 2}, [])
    assert store.get("a", "x") == b'{"n":1}'
    assert store.get("b", "x") == b'{"n":2}'
    assert store.get("c", "x") is None
    assert store.turn("c", "x") is None
    assert not store.delete("c", "x")
    assert store.delete("a", "x")
    assert store.get("a", "x") is None
    assert store.get("b", "x") is not None


@in_a_loop
async def test_the_same_name_again_takes_the_place_of_the_first() -> None:
    clock = Clock()
    store = ResponseStore(2**20, 60.0, clock)
    for number in range(3):
        store.put("a", "x", {"n": number}, [])
    assert store.get("a", "x") == b'{"n":2}'
    assert store.num_bytes == await size_of({"n": 0}, [])


@in_a_loop
async def test_time_ends_it() -> None:
    clock = Clock()
    store = ResponseStore(2**20, 60.0, clock)
    store.put("a", "x", {}, [])
    clock.now = 30.0
    store.put("a", "y", {}, [])
    clock.now = 60.0
    assert store.get("a", "x") is None
    assert store.get("a", "y") is not None
    clock.now = 90.0
    assert store.get("a", "y") is None
    assert (len(store), store.num_bytes) == (0, 0)


@in_a_loop
async def test_time_ends_it_though_nobody_asks() -> None:
    store = ResponseStore(2**20, 0.01)
    store.put("a", "x", {}, [])
    async with asyncio.timeout(30):
        while store.num_bytes:
            await asyncio.sleep(0.01)


@in_a_loop
async def test_nobody_pushes_out_what_another_has() -> None:
    clock = Clock()
    one = await size_of({}, ["x" * 1000])
    store = ResponseStore(one * 10, 60.0, clock)
    for number in range(3):
        store.put("small", str(number), {}, ["x" * 1000])
    for number in range(50):
        store.put("large", str(number), {}, ["x" * 1000])
    assert all(store.get("small", str(number)) for number in range(3))
    kept = [number for number in range(50) if store.get("large", str(number))]
    assert kept == list(range(43, 50))


@in_a_loop
async def test_what_is_too_large_is_not_kept() -> None:
    clock = Clock()
    store = ResponseStore(OVERHEAD_BYTES * 4, 60.0, clock)
    store.put("a", "x", {}, ["x" * OVERHEAD_BYTES * 4])
    assert (store.get("a", "x"), store.num_bytes) == (None, 0)
    off = ResponseStore(0, 60.0, clock)
    off.put("a", "x", {}, [])
    assert not off.is_on
    assert off.get("a", "x") is None


@in_a_loop
async def test_a_long_conversation_goes_on_and_is_let_go() -> None:
    clock = Clock()
    store = ResponseStore(2**30, 60.0, clock)
    before = None
    for number in range(20_000):
        store.put("a", str(number), {}, [number], before)
        before = store.turn("a", str(number))
        if number:
            store.delete("a", str(number - 1))
    assert conversation(before) == [[number] for number in range(20_000)]
    del before
    store.delete("a", "19999")
    assert store.num_bytes == 0


@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),  # who
            st.integers(0, 7),  # which response
            st.integers(-1, 7),  # what it continues
            st.integers(0, 3000),  # characters
            st.booleans(),  # delete it instead
            st.sampled_from([0.0, 0.0, 1.0, 20.0]),  # seconds that pass
        ),
        max_size=60,
    )
)
def test_bytes_are_those_of_what_can_be_reached(steps: list[tuple[Any, ...]]) -> None:
    """Against a count of every turn that the kept responses lead to."""

    async def run() -> None:
        clock = Clock()
        store = ResponseStore(20_000, 60.0, clock)
        alive: dict[tuple[str, str], tuple[Turn, int]] = {}
        for owner, number, previous, size, deletes, seconds in steps:
            clock.now += seconds
            name = str(number)
            if deletes:
                is_there = store.get(owner, name) is not None
                assert store.delete(owner, name) == is_there
            else:
                before = store.turn(owner, str(previous)) if previous >= 0 else None
                store.put(owner, name, {"n": number}, ["x" * size], before)
                turn = store.turn(owner, name)
                if turn is not None:
                    alive[owner, name] = turn, len(b'{"n":0}')
            reached: dict[int, Turn] = {}
            bodies = 0
            for (who, which), (_, body) in alive.items():
                held = store.turn(who, which)
                if held is None:
                    continue
                bodies += body + OVERHEAD_BYTES
                while held is not None:
                    reached[id(held)] = held
                    held = held.before
            turns = sum(len(turn.items) + OVERHEAD_BYTES for turn in reached.values())
            assert store.num_bytes == bodies + turns <= 20_000

    asyncio.run(run())
