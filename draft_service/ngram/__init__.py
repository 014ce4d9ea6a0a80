"""The n-gram trie over prompts and outputs, written in C."""
