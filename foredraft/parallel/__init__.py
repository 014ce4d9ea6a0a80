"""Groups of ranks that compute one model together; a group of one costs nothing."""
