"""Compiles Triton kernels side by side before they are launched, which takes most of a first start
otherwise.

It uses hooks of Triton that other releases may lack. Whatever is not compiled here is compiled when
it is launched.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from foredraft.cpu.threads import num_cores
from foredraft.kernel_launch import no_collection

logger = logging.getLogger(__name__)

MOST_THREADS = 16  # more gain nothing: a part of each compilation holds Python's lock

_ONE_AT_A_TIME = threading.Lock()  # hooks are the process's

# Compilations by the kernel's module and name, and how it is specialised.
_Compiling = dict[tuple[str, str, str], Future[object]]


@contextmanager
def compile_ahead(
    runs: Sequence[Callable[[], object]], device: torch.device
) -> Iterator[list[str]]:
    """Compiles the kernels that functions would launch, without running them, until the end of the
    `with` block.

    Each function is captured in a graph that is thrown away, so the host must be able to run it
    twice, and it may keep no memory that it allocates. If Triton's cache has all kernels of the
    first function, it has those of the others too: they are not tried then. A failure is logged,
    and leaves the rest to the launches.

    Args:
        runs: Functions that can be captured; those that take the most memory first.

    Yields:
        Names of the kernels that were compiled so far, by whatever thread, and not read from
        Triton's cache.
    """
    compiled: list[str] = []
    failure: BaseException | None = None
    with _ONE_AT_A_TIME, ExitStack() as stack:
        compiling: _Compiling = {}
        try:
            torch.ones(1, 1, device=device).mm(torch.ones(1, 1, device=device))  # cuBLAS's handle
            stack.enter_context(_noting(compiled))
            num_threads = min(MOST_THREADS, num_cores())
            threads = stack.enter_context(
                ThreadPoolExecutor(num_threads, "compile", torch.cuda.set_device, (device,))
            )
            _find(runs[:1], compiling, threads)
            # Whether the cache lacks one is known as soon as one is compiled.
            if any(compiled for _ in as_completed(list(compiling.values()))):
                _find(runs[1:], compiling, threads)
        except Exception as error:
            failure = error
        yield compiled
        for kernel in compiling.values():
            failure = failure or kernel.exception()
    if failure is not None:
        logger.warning("kernels are compiled one by one: %s: %s", type(failure).__name__, failure)


def _find(
    runs: Sequence[Callable[[], object]], compiling: _Compiling, threads: ThreadPoolExecutor
) -> None:
    """Captures functions without their kernels, which the threads begin to compile at once.

    Kernels that this process has loaded before are captured too.
    """
    from triton import knobs

    own, before = threading.get_ident(), knobs.runtime.jit_cache_hook

    def skip(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if threading.get_ident() != own:
            return False
        kernel = fn.module, fn.name, key
        if kernel not in compiling:
            data = compile["specialization_data"]
            compiling[kernel] = threads.submit(fn.jit_function.preload, data)
        return True  # neither compiled nor launched

    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in runs]  # never made executable
    pool = torch.cuda.graph_pool_handle()
    knobs.runtime.jit_cache_hook = skip
    try:
        for run, graph in zip(runs, graphs, strict=True):
            with (
                no_collection(),
                # Kernels may be loaded meanwhile.
                torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"),
            ):
                run()
    finally:
        knobs.runtime.jit_cache_hook = before
        graphs.clear()
        torch.cuda.empty_cache()  # the pool's memory


@contextmanager
def _noting(compiled: list[str]) -> Iterator[None]:
    """Notes the kernels that are compiled meanwhile, and not read from Triton's cache."""
    from triton import knobs

    before = knobs.compilation.listener

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(src.name)

    knobs.compilation.listener = note
    try:
        yield
    finally:
        knobs.compilation.listener = before
