"""Who may ask the gateway, and how much: API keys and their limits. Knows no front."""
