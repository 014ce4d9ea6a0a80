"""Speculation as pure functions and data: noise, sampling, draft trees, verification, drafting by n-grams. No model, no I/O."""
