"""The gate as ASGI middleware: which paths are open, need a key, or count against limits."""

from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.config.services import GatewayConfig
from foredraft.errors import ForedraftError
from gateway.errors import CrossSite, UnknownHost
from gateway.http import error_response
from gateway.security.gate import Gate
from gateway.security.hosts import is_allowed
from gateway.security.limits import Caller, acting_for

HEALTH = frozenset({"/health", "/ping"})
# Pages and their files hold nothing of anybody's; whether the server lives may be asked by all.
OPEN = HEALTH | {"/", "/dashboard", "/docs"}
OPEN_FOLDER = "/web/"
METRICS = frozenset({"/metrics", "/dashboard/figures", "/dashboard/history"})
PROBE = "/health_generate"  # generates a token
# These end work or tell of it; a caller over its limits may use them. So may who looks at what is
# kept, or deletes it.
UNCOUNTED = frozenset({"/abort_request", "/flush_cache"})


class GateMiddleware:
    """Answers 401, 403 and 429 itself; everything behind it acts for a caller."""

    def __init__(self, app: ASGIApp, gate: Gate, config: GatewayConfig) -> None:
        self._app = app
        self._gate = gate
        self._hosts = config.allowed_host
        self._origins = config.allowed_origin
        self._protects_metrics = config.protect_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        host = headers.get("host", "")
        if path not in HEALTH and self._gate.checks_hosts and not is_allowed(host, self._hosts):
            unknown = UnknownHost(
                f"this server does not go by the name {host[:100]!r}; if it should, start it with"
                " --allowed-host NAME"
            )
            await error_response(unknown, path)(scope, receive, send)
            return
        if self.is_open(path):
            await self._app(scope, receive, send)
            return
        # Browsers say so of what a page of another site sends, which needs no CORS to make a server
        # of this machine work.
        if headers.get("sec-fetch-site") == "cross-site" and not self._is_welcome(headers):
            refusal = CrossSite(
                "pages of other sites may not use this server, unless it was started with"
                " --allowed-origin ORIGIN"
            )
            await error_response(refusal, path)(scope, receive, send)
            return
        with ExitStack() as place:
            try:
                caller = self._gate.identify(_authorization(headers))
                place.enter_context(acting_for(caller))
                if path == PROBE:
                    place.enter_context(self._gate.running(caller))
            except ForedraftError as error:
                await error_response(error, path)(scope, receive, send)
                return
            if scope["method"] not in ("GET", "DELETE") and path not in UNCOUNTED:
                receive = self._counted(receive, caller, place)
            await self._app(scope, receive, send)

    def _counted(self, receive: Receive, caller: Caller, place: ExitStack) -> Receive:
        """Wraps `receive` so that the request counts once its body is complete.

        A body that never arrives takes no place.
        """
        is_whole = False

        async def received() -> Message:
            nonlocal is_whole
            message = await receive()
            is_last = message["type"] == "http.request" and not message.get("more_body")
            if is_last and not is_whole:
                is_whole = True
                place.enter_context(self._gate.running(caller))
            return message

        return received

    def _is_welcome(self, headers: Headers) -> bool:
        """Returns whether the request comes from a page of an allowed origin."""
        return "*" in self._origins or headers.get("origin") in self._origins

    def is_open(self, path: str) -> bool:
        """Returns whether a path needs no key."""
        if path in METRICS:
            is_protected = self._protects_metrics
            return not (self._gate.asks_for_keys if is_protected is None else is_protected)
        return path in OPEN or path.startswith(OPEN_FOLDER)


def _authorization(headers: Headers) -> str:
    """Returns a request's Authorization header, or one made of Anthropic's x-api-key."""
    given = headers.get("authorization", "")
    key = headers.get("x-api-key", "")
    return given or (f"Bearer {key}" if key else "")
