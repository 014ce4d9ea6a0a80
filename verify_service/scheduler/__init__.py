"""Who runs in the next step, with how many rows, on which pages. No torch."""
