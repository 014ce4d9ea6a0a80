"""Runs the target on several ranks: worker processes, their messages, and a watchdog."""
