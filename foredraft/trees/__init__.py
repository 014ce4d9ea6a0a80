"""Draft trees: their shape, and how drafts build them."""
