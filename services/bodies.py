"""Reading request bodies over raw ASGI, and whole responses."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.errors import ApiError


class ClientGone(Exception):
    """The client has disconnected: nobody is left to answer."""


async def read_json_body(scope: Scope, receive: Receive, limit: int, patience_s: float) -> bytes:
    """The whole body of a JSON request. Raises ApiError 415, 413 or, after `patience_s`, 408; ClientGone."""
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"Content-Type {kind[:100]!r} is not supported, send application/json", code="media_type")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding {coding[:100]!r} is not supported", code="media_type")
    length = headers.get("content-length", "")
    too_large = ApiError(413, f"The body is larger than the limit of {limit} bytes", code="body_too_large")
    if length.isdigit() and int(length[:18]) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(patience_s or None):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {patience_s:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None


def may_answer_unread(scope: Scope) -> bool:
    """Whether a client gets an answer that comes before it has sent its body.

    One that wants the connection closed may not: what it sends into a closed connection takes the answer with it. One
    that waits for `100 Continue` would send no body, and the next request would be read as one.
    """
    if scope["http_version"] != "1.1":
        return False
    return not any(
        name == b"expect" or (name == b"connection" and b"close" in value.lower()) for name, value in scope["headers"]
    )


async def send_body(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: str = "application/json",
    headers: dict[str, str] | None = None,
) -> None:
    """One complete response."""
    fields = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    fields += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """One complete response with this body, for routes that Starlette calls as functions."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
