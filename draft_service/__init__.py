"""The draft: proposes tokens to a verifier. Decides no token and holds nothing that cannot be lost."""
