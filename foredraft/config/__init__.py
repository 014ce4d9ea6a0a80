"""Configuration of every service: one frozen dataclass each, from flags and FOREDRAFT_*
variables.
"""
