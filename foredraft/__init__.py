"""The library that Foredraft's services share.

It starts no process by itself; see `foredraft.cli`.
"""

__version__ = "0.1.0"
