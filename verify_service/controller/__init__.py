"""Chooses how much is drafted in a step, and by which draft."""
