"""Kernels in C for steps of few rows on a CPU, and the threads that compute them.

Knows tensors and addresses; no layers and no models.
"""
