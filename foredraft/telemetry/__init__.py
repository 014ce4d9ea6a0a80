"""Logs, metrics and traces of a service.

Collects nothing about models or requests by itself.
"""
