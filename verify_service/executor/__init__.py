"""The target's part of a step: the forward, the rule, the walk, captured graphs."""
