"""How much to draft, from times and outcomes alone: knows no request and no connection."""
