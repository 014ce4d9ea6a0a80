"""Measures what steps of the target cost, for the controller."""

import logging
import math
import time

import torch

from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from verify_service.controller.costs import CostModel
from verify_service.controller.tables import RowTable, Table
from verify_service.executor.base import Executor
from verify_service.executor.timing import best_of_rounds, without_waits
from verify_service.scheduler.page_pool import PagePool

logger = logging.getLogger(__name__)

# Kernels on a CPU multiply up to 3 or 6 rows at once, so steps take longer from the next row on.
MEASURED_ROWS = (1, 2, 3, 4, 6, 7, 12, 13, 32)


def measured_costs(
    executor: Executor, runner: ModelRunner, pool: PagePool, weight_bytes: int
) -> CostModel:
    """Times the target's steps, on pages that are given back.

    Args:
        weight_bytes: Bytes of the target's weights.
    """
    table = _measure(executor, runner, pool)
    # Steps are as long as the memory that they read: their weights, and so much for each token.
    token_bytes = runner.model.config.kv_bytes_per_token(runner.kv.data.dtype.itemsize)
    return CostModel(table, token_bytes / weight_bytes * table.unit)


def _measure(executor: Executor, runner: ModelRunner, pool: PagePool) -> Table:
    """Times the target's steps: captured ones as they are, others by number of rows, on pages that
    are given back.
    """
    times = executor.measure()
    if times is not None:
        table = ", ".join(f"{b}x{r}: {t * 1e3:.2f}" for (b, r), t in sorted(times.measured.items()))
        logger.info("captured steps in ms by sequences x rows: %s", table)
        return times
    room = pool.num_pages * pool.page_size
    widths = [rows for rows in MEASURED_ROWS if rows <= room]
    pages = pool.allocate(pool.pages_for(widths[-1]))

    cpu_seconds = dict.fromkeys(widths, math.inf)

    def run(rows: int) -> float:
        chain = SequenceRows.chunk(pages, 0, [0] * rows, "all")
        started, started_cpu = time.perf_counter(), time.process_time()
        runner.forward([chain])
        if runner.model.device.type == "cuda":
            torch.cuda.synchronize()
        cpu_seconds[rows] = min(cpu_seconds[rows], time.process_time() - started_cpu)
        return time.perf_counter() - started

    seconds = best_of_rounds(widths, run)
    if runner.model.device.type == "cpu":
        spent = [cpu_seconds[rows] for rows in widths]
        seconds = without_waits(seconds, spent, torch.get_num_threads())
    by_rows = RowTable(widths, seconds)
    pool.release(pages)
    table = ", ".join(f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in by_rows.measured.items())
    logger.info("target forward in ms by rows: %s", table)
    return by_rows
