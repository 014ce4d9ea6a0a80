"""The engine's side of its drafts: connections, syncs, hidden states and proposals."""
