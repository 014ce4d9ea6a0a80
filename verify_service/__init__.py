"""The verifier: owns the target model, the KV cache, the scheduler and verification.

Decides every output token.
"""

import os

# Verifier and draft share the cores: a thread that spins until there is work again takes the core
# that the other needs (docs/measurements/cpu.md, "Threads"). OpenMP reads this when torch is
# loaded, so it has to be set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
