"""Runs every step: schedule, draft, forward, verify, commit, emit; and steps that are started ahead."""
