"""Structured output: grammars compiled within bounds, followed along draft trees, as masks over the
vocabulary.
"""
