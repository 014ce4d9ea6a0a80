"""Lets the workers of pytest-xdist, and the services that they start, share the cores."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read by torch when it is imported, which no worker has done yet.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
