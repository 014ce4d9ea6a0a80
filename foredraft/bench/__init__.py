"""Load and measurement of LLM servers over HTTP, and the search for the best speculation.

Starts no services by itself.
"""
