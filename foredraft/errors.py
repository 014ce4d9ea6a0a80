"""The exception tree of all services; `foredraft.rpc.errors` maps it to gRPC statuses and the
gateway to HTTP codes.
"""


class ForedraftError(Exception):
    """Base of every error that Foredraft raises on purpose."""


class ConfigError(ForedraftError):
    """A flag, variable or combination of them cannot be served. The message names the flags."""


class CheckpointError(ForedraftError):
    """A model directory or file is missing, broken, or of an unsupported kind.

    The message names the file or tensor.
    """


class InvalidRequest(ForedraftError):
    """A request field is wrong.

    Args:
        field: The name of the field as the client wrote it.
        message: What is wrong with it and what would be right.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class PromptTooLong(InvalidRequest):
    """A request can never fit the context length or the KV pool."""


class Overloaded(ForedraftError):
    """The server refuses work now; the same request may succeed later.

    Args:
        message: What limit was reached.
        retry_after_seconds: A hint for the client.
    """

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(ForedraftError):
    """A service that is needed is down; the request may be retried."""


class Unauthenticated(ForedraftError):
    """The caller gave no API key, or one that is not known."""


class AttachRefused(ForedraftError):
    """A draft cannot serve a verifier.

    Args:
        field: The field of the attach message that does not fit.
        message: What was offered and what is needed.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class DraftError(ForedraftError):
    """A draft died, answered too late, or broke the protocol. The verifier goes on without it."""
