"""API keys, their limits, and the other checks of who may use the gateway."""
