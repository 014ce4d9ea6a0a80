"""A verifier that has served many requests holds nothing of them: no table anywhere in the engine
grows with their number.
"""

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.types import SamplingParams, SpeculationParams
from testing.checkpoints import make_checkpoint
from testing.engines import Harness, Job, running_engine
from verify_service.engine.engine import Engine

OURS = ("verify_service", "foredraft")
TABLES = (dict, list, set, deque)
COUNT = 16


def table_sizes(engine: Engine) -> Counter[str]:
    """Entries of all tables that can be reached from the engine, by class and attribute."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[Any] = [engine]
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            todo += [*found.keys(), *found.values()]
        elif isinstance(found, (tuple, *TABLES)):
            todo += found
        elif type(found).__module__.startswith(OURS):
            for name, attribute in _attributes(found):
                if isinstance(attribute, TABLES):
                    sizes[f"{type(found).__name__}.{name}"] += len(attribute)
                todo.append(attribute)
    return sizes


def _attributes(found: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(found, "__dict__", {}).items()
    for kind in type(found).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(found, name):
                yield name, getattr(found, name)


def work(first: int) -> list[Job]:
    """Requests that end in every way and need state of every kind; no two batches have a prompt in
    common.
    """
    jobs = []
    for i in range(first, first + COUNT):
        sampling = SamplingParams(
            temperature=0.5 * (i % 3),
            seed=i,
            repetition_penalty=1.2 if i % 2 else 1.0,
            max_new_tokens=12 + i % 5,
            ignore_eos=i % 4 > 0,
        )
        speculation = SpeculationParams(enabled=False) if i % 5 == 0 else SpeculationParams()
        prompt = [2 + i % 100, 3, *[5, 6, 7, 8] * 5]
        cancel_after = 5 if i % 7 == 0 else None
        jobs.append(Job(prompt, sampling, speculation, cancel_after=cancel_after))
    return jobs


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("leftovers") / "target")


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_nothing_grows_with_the_requests_that_were_served(target: Path, algorithm: str) -> None:
    flags: dict[str, Any] = {"max_running_requests": 4, "max_total_tokens": 192}
    if algorithm == "STANDALONE":
        flags |= {"speculative_draft_model_path": str(target), "speculative_num_steps": 2}
    with running_engine(target, algorithm, **flags) as harness:
        serve(harness, 0)
        before = table_sizes(harness.engine)
        assert before["RunQueue.free_slots"] == 4, "the walk reaches what the engine is made of"
        serve(harness, COUNT)
        serve(harness, 2 * COUNT)
        growth = table_sizes(harness.engine) - before
    # A few entries may wait for something to happen; one for each request would be as many as there
    # were.
    assert {name: number for name, number in growth.items() if number >= COUNT} == {}


def serve(harness: Harness, first: int) -> None:
    harness.run(work(first))
    assert harness.engine.flush_cache().result(60) >= 0
    harness.check_nothing_left()
