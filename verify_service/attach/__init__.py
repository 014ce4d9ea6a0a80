"""Attaches drafts: connects to them, checks that they fit the target, and makes their proxies."""
