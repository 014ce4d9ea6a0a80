"""The sampling rule: filters, position-keyed noise, and the choice of each token."""
