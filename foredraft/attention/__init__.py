"""Attention over the paged KV cache: one interface, one backend per file.

Knows no model and no request.
"""
