"""The target's part of a step: forward, sampling rule, walk of draft trees, captured graphs."""
