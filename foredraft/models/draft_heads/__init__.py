"""Draft heads on a target's hidden states: what they are, their modules, and how their checkpoints are read."""
