"""The connection to a draft: its thread attaches, makes shared memory, and notices a dead draft."""
