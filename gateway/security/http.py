"""The gate as ASGI middleware: what is open to everybody, and what needs a key or counts."""

from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.config.services import GatewayConfig
from foredraft.errors import ForedraftError
from gateway.errors import CrossSite, UnknownHost
from gateway.http import error_response
from gateway.security.gate import Gate
from gateway.security.hosts import is_allowed

HEALTH = "/health"
# Pages and their files hold nothing of anybody's; whether the server lives may be asked by all.
OPEN = frozenset({"/", "/dashboard", HEALTH})
OPEN_FOLDER = "/web/"
METRICS = frozenset({"/metrics", "/dashboard/figures", "/dashboard/history"})
PROBE = "/health_generate"  # generates a token
# These end work or tell of it; a caller over its limits may use them. So may who looks at what is kept, or deletes it.
UNCOUNTED = frozenset({"/abort_request", "/flush_cache"})


class GateMiddleware:
    """Answers 401, 403, 429 and 503 itself; everything behind it acts for a caller."""

    def __init__(self, app: ASGIApp, gate: Gate, config: GatewayConfig) -> None:
        self._app = app
        self._gate = gate
        self._hosts = config.allowed_host
        self._open = OPEN if config.protect_metrics else OPEN | METRICS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        host = headers.get("host", "")
        if path != HEALTH and self._gate.checks_hosts and not is_allowed(host, self._hosts):
            unknown = UnknownHost(
                f"this server does not go by the name {host[:100]!r}; if it should, start it with --allowed-host NAME"
            )
            await error_response(unknown)(scope, receive, send)
            return
        if self._is_open(path):
            await self._app(scope, receive, send)
            return
        # Browsers say so of what a page of another site sends, which needs no CORS to make a server of this machine work.
        if headers.get("sec-fetch-site") == "cross-site":
            refusal = CrossSite("pages of other sites may not use this server")
            await error_response(refusal)(scope, receive, send)
            return
        counts = path == PROBE or (
            scope["method"] not in ("GET", "DELETE") and path not in UNCOUNTED
        )
        with ExitStack() as admission:
            try:
                admission.enter_context(
                    self._gate.admit(headers.get("authorization", ""), counts=counts)
                )
            except ForedraftError as error:
                await error_response(error)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(OPEN_FOLDER)
