"""Training of what Foredraft serves: small language models, draft heads and token maps. Nothing imports this package."""
