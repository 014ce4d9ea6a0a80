"""The target's decode steps as CUDA graphs: their capture, records, start and results."""
