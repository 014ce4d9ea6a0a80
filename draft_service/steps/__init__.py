"""Captured draft steps on a GPU: their records, kernels and graphs."""
