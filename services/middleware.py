"""Plain ASGI middleware: request ids, errors as responses, API keys. (Wrapping middleware would hide disconnects.)"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.anthropic import errors as anthropic
from services.bodies import ClientGone, send_body
from services.errors import RETRY_AFTER_S, ApiError, internal
from services.keys import Keyring
from services.limits import Account
from services.metrics import ApiMetrics

log = logging.getLogger("triptych.api")

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
MODEL_ROUTE = "/v1/models/{name}"
TIMELINE_ROUTE = "/v1/requests/{id}/timeline"
MAX_REQUEST_ID = 128
MAX_AUTHORIZATION = 4096
CLIENT_CLOSED_REQUEST = 499
MAX_WARNED_FIELDS, MAX_WARNED_NAME = 16, 64
"""Of the fields that were ignored, as many are named to the client, and so much of each name."""


class Edge:
    """Outermost: gives each request an id, turns exceptions into error responses, counts the outcome."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics, paths: Iterable[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; nothing but cancellation gets out."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1002})
            return
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        ignored: list[str] = []
        state["ignored"] = ignored
        headers = [(b"x-request-id", request_id.encode())]
        foreign = anthropic.speaks_anthropic(scope["path"])
        if foreign:
            headers.append((b"request-id", request_id.encode()))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                found = {"warning": _warning(ignored)} if ignored else {}
                if (told := state.get("told")) is not None:
                    found |= told()
                more = [(name.encode(), value.encode()) for name, value in found.items()]
                message["headers"] = [*message.get("headers", ()), *headers, *more]
            await send(message)

        error: ApiError | None = None
        try:
            await self._app(scope, receive, send_with_id)
        except ApiError as raised:
            # Without its frames: one of them is this one, and a cycle would keep all of them until the next collection.
            error = raised.with_traceback(None)
        except ClientGone:
            self._metrics.disconnects.inc()
            status = status or CLIENT_CLOSED_REQUEST
        except Exception:
            log.exception("request %s failed", request_id)
            error = internal()
        if error is not None and not status:
            answer = anthropic.envelope(error, request_id) if foreign else error.body()
            code = anthropic.status_of(error) if foreign else error.status
            if error.status in (429, 503):
                error.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
            await send_body(send_with_id, answer, status=code, headers=error.headers)
        self._metrics.request_done(self._endpoint(scope["path"]), status)

    def _endpoint(self, path: str) -> str:
        """The route for metrics: a client can't make up new label values."""
        if path in self._paths:
            return path
        if path.startswith("/v1/requests/") and path.endswith("/timeline"):
            return TIMELINE_ROUTE
        if path.startswith("/v1/responses/"):
            rest = path.removeprefix("/v1/responses/").partition("/")[2]
            return "/v1/responses/{id}" + (f"/{rest}" if rest in ("cancel", "input_items") else "")
        return MODEL_ROUTE if path.startswith("/v1/models/") else "other"


def _warning(ignored: Sequence[str]) -> str:
    """The header that names ignored fields, in the form of RFC 7234."""
    names = [quote(name[:MAX_WARNED_NAME], safe="$[]") for name in ignored[:MAX_WARNED_FIELDS]]
    more = f" and {len(ignored) - len(names)} more" if len(ignored) > len(names) else ""
    return f'299 triptych "ignored unknown fields: {", ".join(names)}{more}"'


def _request_id(scope: Scope) -> str:
    """The client's own id if it is short and printable, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable():
                return text
    return secrets.token_hex(16)


class ApiKeys:
    """Lets only bearers of a known key through, on every path that isn't on the open list, and within the key's limits.

    What the key stands for becomes `scope["state"]["tenant"]` and `["account"]`; an admin key stands for nobody, so
    nothing is hidden from it. Limits count for the routes that generate; `["told"]` makes the headers about them.
    """

    def __init__(
        self, app: ASGIApp, keyring: Keyring, open_paths: Iterable[str], wall: Callable[[], float] = time.time
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._open = frozenset(open_paths)
        self._wall = wall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise ApiError 401 or 429."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        account = self._match(scope)
        if account is None:
            raise ApiError(
                401,
                "A valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if account.tenant:
            scope["state"]["tenant"] = account.tenant
            scope["state"]["account"] = account
        if scope["method"] == "POST" and scope["path"] in GENERATING_PATHS:
            # Without limits too: a key may be given some while its requests run.
            scope["state"]["told"] = functools.partial(self._left, account, scope["path"])
            account.enter()
            try:
                await self._app(scope, receive, send)
            finally:
                account.leave()
        else:
            await self._app(scope, receive, send)

    def _left(self, account: Account, path: str) -> dict[str, str]:
        """Headers that say what is left of the key's limits."""
        more = account.anthropic_headers(self._wall()) if anthropic.speaks_anthropic(path) else {}
        return {**account.headers(), **more}

    def _match(self, scope: Scope) -> Account | None:
        """Whom the key in the Authorization header, or without one in X-Api-Key, stands for; None if it is wrong."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if not values:
            values = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(values) != 1 or len(values[0]) > MAX_AUTHORIZATION:
            return None
        scheme, _, token = values[0].partition(b" ")
        return self._keyring.find(token.strip()) if scheme.lower() == b"bearer" else None
