"""Log lines with service name and request id, for people or for machines.

Decides no log's content.
"""

import contextvars
import json
import logging
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")

# Libraries that report every request or connection at INFO.
_CHATTY = ("uvicorn.access", "httpx", "httpcore", "asyncio", "urllib3", "filelock")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "service",
    "request_id",
    "taskName",
    "color_message",  # uvicorn's second copy of a message
}


def setup(
    service: str, level: str = "info", format: str = "text", stream: TextIO | None = None
) -> None:
    """Sends the process's logs to one stream; replaces what an earlier call set up.

    Args:
        service: Name on every line, such as `verify`.
        level: debug, info, warning or error.
        format: `text` for people, `json` for one object per line.
        stream: Stream to write to; by default standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if format == "json" else TextFormatter(service))
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def new_request_id() -> str:
    """Returns a name for a request that came without one."""
    return uuid.uuid4().hex[:16]


def request_id() -> str:
    """Returns the id bound in this context; empty outside a request."""
    return _request_id.get()


@contextmanager
def bind_request_id(value: str) -> Iterator[None]:
    """Puts a request id on every line logged inside, in this task or thread."""
    token = _request_id.set(value)
    try:
        yield
    finally:
        # An asynchronous generator may be closed from another context than the one that opened it.
        try:
            _request_id.reset(token)
        except ValueError:
            _request_id.set("")


class TextFormatter(logging.Formatter):
    """Formats lines such as `2026-01-31 12:00:00.123 INFO verify: message [request 1f2e]`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname} {self.service}:"
            f" {record.getMessage()}"
        )
        fields = _extra_fields(record)
        if identifier := getattr(record, "request_id", ""):
            fields = {"request": identifier, **fields}
        if fields:
            line += " [" + " ".join(f"{name}={value}" for name, value in fields.items()) + "]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line.

    Keys are time, level, service, logger, message, then request_id, exception and extra fields.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if identifier := getattr(record, "request_id", ""):
            entry["request_id"] = identifier
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        for name, value in _extra_fields(record).items():
            entry.setdefault(name, value)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _add_request_id(record: logging.LogRecord) -> bool:
    if not getattr(record, "request_id", ""):
        record.request_id = _request_id.get()
    return True


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger(__name__).critical(
        "uncaught %s", kind.__name__, exc_info=(kind, error, traceback)
    )


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread else "unknown"
    error = args.exc_value or args.exc_type()
    logging.getLogger(__name__).critical(
        "uncaught %s in thread %s",
        args.exc_type.__name__,
        name,
        exc_info=(args.exc_type, error, args.exc_traceback),
    )
