"""Tensors between a verifier and its draft: through shared memory or inside messages.

Knows no engine and no drafter.
"""
