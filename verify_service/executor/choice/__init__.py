"""Choice of tokens on the host: sampling rule, penalties, walk of draft trees, simulated
acceptance.
"""
