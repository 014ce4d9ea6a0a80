"""A scheduler for small pools, and an engine's execution of its plans."""

import math
from typing import Any

from foredraft.types import SamplingParams
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.page_tables import PageTables, UsablePrefix
from verify_service.scheduler.prefill_budget import PrefillBudget
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.request import Sequence
from verify_service.scheduler.scheduler import Scheduler
from verify_service.scheduler.step_plan import StepPlan

FOREVER = float("-inf")  # a `now` before every deadline


def make_scheduler(num_pages=64, page_size=4, **options) -> Scheduler:
    pool = PagePool(num_pages, page_size)
    options = {"max_running_requests": 8, "chunked_prefill_size": 16} | options
    return scheduler_of(pool, PrefixTree(pool), **options)


def scheduler_of(
    pool: PagePool,
    prefix_tree: PrefixTree | None,
    *,
    chunked_prefill_size: int,
    max_decode_delay: float = math.inf,
    key_cost: float = 0.0,
    bounds_rows: bool = False,
    usable_prefix: UsablePrefix | None = None,
    look_ahead: int = 0,
    longest_shared: int | None = None,
    **options: Any,
) -> Scheduler:
    """Makes a scheduler with its page tables and prefill budget."""
    tables = PageTables(pool, prefix_tree, usable_prefix, look_ahead, longest_shared)
    budget = PrefillBudget(chunked_prefill_size, max_decode_delay, key_cost, bounds_rows)
    return Scheduler(tables, budget, **options)


def make_sequence(name, prompt, max_new_tokens=8, **fields) -> Sequence:
    prompt = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
    request_id = number(name)
    return Sequence(request_id, prompt, SamplingParams(max_new_tokens=max_new_tokens), **fields)


def number(name) -> int:
    return int.from_bytes(name.encode(), "big")


def name(seq) -> str:
    return seq.request_id.to_bytes(16, "big").lstrip(b"\0").decode()


def unlike(start, length):
    """Returns a prompt that shares no page with prompts of another `start`."""
    return [start * 10_000 + i for i in range(length)]


def run(scheduler, plan, tokens=1, next_token=7):
    """Commits a plan as the engine would: one token per finished chunk, `tokens` per decode."""
    for chunk in plan.prefill:
        appended = chunk.seq.append_tokens([next_token]) if chunk.is_last else None
        scheduler.on_committed(chunk.seq, chunk.num_tokens)
        if appended and appended.finish_reason:
            scheduler.finish(chunk.seq)
    for slot in plan.decode:
        appended = slot.seq.append_tokens([next_token] * min(tokens, slot.max_tree_nodes + 1))
        scheduler.on_committed(slot.seq, appended.num_kept)
        if appended.finish_reason:
            scheduler.finish(slot.seq)
    scheduler.check_integrity()


def step(scheduler, nodes=0, tokens=1, now=FOREVER) -> StepPlan:
    plan = scheduler.schedule(lambda seqs, _: [nodes] * len(seqs), now)
    run(scheduler, plan, tokens)
    return plan


def chunks(plan):
    return [(name(chunk.seq), chunk.start, chunk.num_tokens) for chunk in plan.prefill]


def decodes(plan):
    return [name(slot.seq) for slot in plan.decode]
