"""Chooses the draft of each step and how much it drafts."""
