"""Target and draft models: configuration, weights, the decoder.

Knows nothing about batches' origin or services.
"""
