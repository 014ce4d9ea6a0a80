"""Permissively licensed training text out of software packages: sources, extraction, filters, deduplication."""
