"""The engine's side of its drafts: connections, what each was told, hidden states, proposals, sizes of trees."""
