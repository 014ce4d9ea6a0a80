"""Schedules steps: which sequences run, with how many rows, on which pages. No torch."""
