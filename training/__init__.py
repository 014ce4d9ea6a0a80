"""Trains small language models, draft heads and token maps for Foredraft.

Nothing imports this package.
"""

import os

# On a CPU that other programs use too, a thread that spins until there is work again keeps the
# cores from the threads that it waits for. OpenMP reads this when torch is loaded, so it has to be
# set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
