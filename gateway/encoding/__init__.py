"""Tokenizing and chat templates, in processes that can be killed.

The clients' text decides how long they take.
"""
