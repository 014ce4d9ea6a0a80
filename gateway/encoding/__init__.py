"""Tokenizing and chat templates in processes that can be killed: what clients write decides how long they take."""
