"""Runs every step: schedule, draft, forward, verify, commit, emit; and overlaps steps."""
