"""Extracts permissively licensed training text from software packages.

It has sources, extraction, filters and deduplication.
"""
