"""Draft models: heads that continue the target's hidden states, and weights shared with the
target.
"""
