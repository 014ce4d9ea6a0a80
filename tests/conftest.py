"""Lets the workers of pytest-xdist, and the services that they start, share the cores; no example fails by being slow."""

import contextlib
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read by torch when it is imported, which no worker has done yet.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # tests on a GPU can do without
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
