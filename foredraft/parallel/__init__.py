"""How the ranks of one model work together; a group of one costs nothing."""
