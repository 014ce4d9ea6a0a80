"""Trains small language models, draft heads and token maps for Foredraft.

Nothing imports this package.
"""
