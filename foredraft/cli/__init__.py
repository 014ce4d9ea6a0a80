"""The `foredraft` command. Starts services as processes by module name and imports none of them."""
