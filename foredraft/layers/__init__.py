"""Building blocks of models: projections, norms, rotary embeddings, the MLP.

Knows no architecture by name.
"""
