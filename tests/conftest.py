"""Lets the workers of pytest-xdist, and the services that they start, share the cores; no example
fails by being slow, and random numbers are the same in every run.
"""

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Read by OpenMP when torch is imported, which nobody has done yet. Services ask for it too, but the
# process that they are forked from imports torch before them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # tests on a GPU can do without
    from hypothesis import HealthCheck, settings

    # Every run draws the same examples: --hypothesis-profile default draws others.
    settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeatable")

# Begun first, longest first, so that no worker is left with one of them at the end. Others follow
# by their number of tests.
LONG = (
    "tests/e2e/test_exactness.py",
    "tests/gateway/test_openapi.py",
    "tests/e2e/test_heads.py",
    "tests/e2e/test_hidden_drafts.py",
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_several_verifiers.py",
    "tests/e2e/test_ranks.py",
    "tests/e2e/test_services.py",
    "tests/chaos/test_chaos.py",
    "tests/web/test_pages.py",
    "tests/web/test_dashboard.py",
    "tests/web/test_playground.py",
    "tests/monitoring/test_dashboards.py",
    "tests/verify_service/controller/test_changing_loads.py",
    "tests/verify_service/controller/test_steady_loads.py",
    "tests/verify_service/controller/test_prompts.py",
    "tests/verify_service/controller/test_alike.py",
    "tests/verify_service/controller/test_cpu_load.py",
    "tests/cli/test_generate.py",
    "tests/e2e/test_several_drafts.py",
    "tests/cli/test_serve.py",
    "tests/deploy/test_wheel.py",
    "tests/examples/test_examples.py",
    "tests/verify_service/grammar/test_lossless.py",
    "tests/verify_service/drafts/test_missed_states.py",
    "tests/e2e/test_structured_output.py",
    "tests/e2e/test_quantized_exactness.py",
    "tests/e2e/test_quantized_drafts.py",
    "tests/e2e/test_ngram_override.py",
    "tests/e2e/test_block_drafts.py",
    "tests/draft_service/test_mtp_engine.py",
    "tests/e2e/test_fault_points.py",
    "tests/verify_service/drafts/test_hidden_states.py",
    "tests/bench/test_sweep.py",
    "tests/bench/test_soak.py",
    "tests/training/test_draft.py",
    "tests/verify_service/drafts/test_several_drafts.py",
    "tests/verify_service/drafts/test_several_models.py",
    "tests/gateway/test_responses.py",
    "tests/gateway/test_anthropic.py",
    "tests/gateway/test_reasoning.py",
    "tests/gateway/test_call_grammars.py",
    "tests/gateway/test_tls.py",
    "tests/models/test_understood.py",
    "tests/verify_service/engine/test_broken_logits.py",
    "tests/verify_service/engine/test_dynamic_rope.py",
    "tests/draft_service/test_device_steps.py",
    "tests/draft_service/test_graph_drafting.py",
    "tests/draft_service/test_draft_ahead.py",
    "tests/draft_service/test_standalone.py",
    "tests/verify_service/engine/test_engine.py",
    "tests/draft_service/test_own_weights.py",
    "tests/gateway/test_attacks.py",
    "tests/verify_service/engine/test_leftovers.py",
    "tests/e2e/test_concurrent_clients.py",
    "tests/e2e/test_many_connections.py",
    "tests/bench/test_serve.py",
    "tests/models/test_quantized_heads.py",
    "tests/models/test_registry.py",
    "tests/e2e/test_eight_bit_kv.py",
)
# Files whose fixtures are made anew for each first parameter: these parts may run side by side.
DIVIDED = ("tests/e2e/test_exactness.py",)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Seeds torch, so that no test's numbers depend on the tests that ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks long files, and puts files in the order in which workers begin them; without workers
    pytest's own stays.
    """
    ranks = {name: rank for rank, name in enumerate(LONG)}
    files = {item: item.nodeid.partition("::")[0] for item in items}
    for item in items:
        if files[item] in ranks:
            item.add_marker(pytest.mark.slow)
    if not IS_WORKER:
        return
    sizes = Counter(files.values())
    items.sort(
        key=lambda item: (ranks.get(files[item], len(LONG)), -sizes[files[item]], files[item])
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collects no garbage while tests are imported, and keeps what was imported, which stays, out
    of all later collections; makes these as rare as in a gateway, since tests import much more.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """--dist loadfile in the order of `pytest_collection_modifyitems`, with the files of DIVIDED in
    parts.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    root = Path(__file__).parents[1]
    if gone := [name for name in (*LONG, *DIVIDED) if not (root / name).is_file()]:
        raise pytest.UsageError(f"tests/conftest.py names files that are not there: {gone}")

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            first = test.partition("[")[2].partition("-")[0].rstrip("]")
            return f"{file}[{first}]" if file in DIVIDED else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)
