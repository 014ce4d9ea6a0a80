"""The gateway: text, HTTP and the public gRPC in front of verifiers.

Decides no token and never reaches torch.
"""
