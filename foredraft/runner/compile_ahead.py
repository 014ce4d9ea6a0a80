"""Compiles kernels side by side before they are launched, which takes most of a first start
otherwise; and gets Triton ready while a model is loaded.

It uses hooks of Triton that other releases may lack. Whatever is not compiled here is compiled when
it is launched.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch

from foredraft.cpu.threads import num_cores
from foredraft.layers.cuda_programs import taken
from foredraft.layers.fused import rms_norm
from foredraft.runner.aside import captured_into

logger = logging.getLogger(__name__)

MOST_THREADS = 16  # more gain nothing: a part of each compilation holds Python's lock

_ONE_AT_A_TIME = threading.Lock()  # hooks are the process's

# Compilations by the kernel's module and name, and how it is specialised.
_Compiling = dict[tuple[str, str, str], Future[object]]


@contextmanager
def first_kernel(device: torch.device) -> Iterator[None]:
    """Launches a kernel beside the `with` block: the first of a process takes Triton most of a
    second. Does nothing for a CPU.
    """
    if device.type == "cpu":
        yield
        return
    number = torch.cuda.current_device() if device.index is None else device.index
    thread = threading.Thread(target=_launch, args=(number,), name="first-kernel")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _launch(number: int) -> None:
    try:
        torch.cuda.set_device(number)
        x = torch.ones(1, 16, device="cuda")
        rms_norm(x, x[0], 1e-6, True)
    except Exception as error:
        logger.warning("the first kernel: %s: %s", type(error).__name__, error)


def compile_ahead(runs: Sequence[Callable[[], object]], device: torch.device) -> int:
    """Compiles and loads the kernels that functions would launch, without running them.

    Each function is captured in a graph that is thrown away, so the host must be able to run it
    twice, and it may keep no memory that it allocates. If Triton's cache has all kernels of the
    first function, it has those of the others too: they are not tried then. A failure is logged,
    and leaves the rest to the launches.

    Args:
        runs: Functions that can be captured; those that take the most memory first.

    Returns:
        Number of kernels that were compiled, and not read from Triton's cache.
    """
    compiled: list[str] = []
    compiling: _Compiling = {}
    num_threads = min(MOST_THREADS, num_cores())
    try:
        torch.ones(1, 1, device=device).mm(torch.ones(1, 1, device=device))  # cuBLAS's handle
        number = torch.cuda.current_device() if device.index is None else device.index
        with (
            _ONE_AT_A_TIME,
            _noting(compiled),
            ThreadPoolExecutor(num_threads, "compile", torch.cuda.set_device, (number,)) as threads,
        ):
            _find(runs[:1], compiling, threads, compiled)
            # Whether the cache lacks one is known as soon as one is compiled.
            if any(compiled for _ in as_completed(list(compiling.values()))):
                _find(runs[1:], compiling, threads, compiled)
            for kernel in compiling.values():
                kernel.result()
    except Exception as error:
        logger.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
    return len(compiled)


def _find(
    runs: Sequence[Callable[[], object]],
    compiling: _Compiling,
    threads: ThreadPoolExecutor,
    compiled: list[str],
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
            compiling[kernel] = threads.submit(_compile, fn.jit_function, data)
        return True  # neither compiled nor launched

    def load(name: str, load_kernel: Callable[[], bool]) -> None:
        if load_kernel():
            compiled.append(name)

    def take(name: str, load_kernel: Callable[[], bool]) -> None:
        kernel = "", "", name
        if kernel not in compiling:
            compiling[kernel] = threads.submit(load, name, load_kernel)

    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in runs]  # never made executable
    pool = torch.cuda.graph_pool_handle()
    knobs.runtime.jit_cache_hook = skip
    try:
        for run, graph in zip(runs, graphs, strict=True):
            # Kernels may be loaded meanwhile.
            with taken(take), captured_into(graph, pool, "relaxed"):
                run()
    finally:
        knobs.runtime.jit_cache_hook = before
        graphs.clear()
        torch.cuda.empty_cache()  # the pool's memory


def _compile(function: Any, specialization: str) -> None:
    kernel = function.preload(specialization)
    _ = kernel.run  # builds its launcher, and loads it


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
