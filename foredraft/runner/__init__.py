"""Runs models: tokens and page tables in, logits and hidden states out.

Knows no request, no draft and no service.
"""
