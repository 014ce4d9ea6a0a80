"""The engine's side of its drafts, in the engine's thread: syncs, hidden states and proposals."""
