"""Plain ASGI middleware: request ids, errors as responses, API keys. (Wrapping middleware would hide disconnects.)"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.anthropic import errors as anthropic
from services.bodies import ClientGone, send_body
from services.errors import ApiError, internal
from services.metrics import ApiMetrics

log = logging.getLogger("triptych.api")

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
MODEL_ROUTE = "/v1/models/{name}"
TIMELINE_ROUTE = "/v1/requests/{id}/timeline"
MAX_REQUEST_ID = 128
MAX_AUTHORIZATION = 4096
CLIENT_CLOSED_REQUEST = 499


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
        scope.setdefault("state", {})["request_id"] = request_id
        headers = [(b"x-request-id", request_id.encode())]
        foreign = anthropic.speaks_anthropic(scope["path"])
        if foreign:
            headers.append((b"request-id", request_id.encode()))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
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


def _request_id(scope: Scope) -> str:
    """The client's own id if it is short and printable, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable():
                return text
    return secrets.token_hex(16)


class ApiKeys:
    """Lets only bearers of a configured key through, on every path that isn't on the open list.

    The key becomes `scope["state"]["tenant"]`; an admin key stands for nobody, so nothing is hidden from it.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], open_paths: Iterable[str], admin_keys: Sequence[str] = ()
    ) -> None:
        self._app = app
        named = [(key, f"key-{index}") for index, key in enumerate(keys)] + [(key, "") for key in admin_keys]
        self._tenants = [(hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in named]
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise ApiError 401."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        tenant = self._match(scope)
        if tenant is None:
            raise ApiError(
                401,
                "A valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if tenant:
            scope["state"]["tenant"] = tenant
        await self._app(scope, receive, send)

    def _match(self, scope: Scope) -> str | None:
        """Whom the key in the Authorization header, or without one in X-Api-Key, stands for; None if it is wrong."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if not values:
            values = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(values) != 1 or len(values[0]) > MAX_AUTHORIZATION:
            return None
        scheme, _, token = values[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = hashlib.sha256(token.strip()).digest()
        found = None
        for known, tenant in self._tenants:  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, known):
                found = tenant
        return found


def load_keys(keys: Sequence[str], path: str) -> list[str]:
    """The configured keys and those of a file with one per line (`#` starts a comment). Raises OSError, ValueError."""
    found = [key for key in keys if key]
    if path:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
        from_file = [line for line in lines if line and not line.startswith("#")]
        if not from_file:
            raise ValueError(f"{path} holds no API key")
        found += from_file
    return list(dict.fromkeys(found))
