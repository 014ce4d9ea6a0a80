"""Triton kernels of a step around the model, and the functions that launch them."""
