"""gRPC as every service uses it: addresses, servers, channels, health, and errors as statuses.

Knows no service's messages.
"""
