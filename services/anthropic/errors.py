"""Anthropic's shape of an error, its names for kinds of failure, and its status for a full queue."""

from __future__ import annotations

from typing import Any

import msgspec

from services.errors import ApiError, printable

PATH = "/v1/messages"
OVERLOADED_STATUS = 529
NO_THREADS = "thread_unsupported_request"
_OVERLOADED = frozenset({"queue_full", "displaced", "waiting_timeout"})
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether whoever asks for this path expects Anthropic's errors."""
    return path == PATH or path.startswith(PATH + "/")


def status_of(error: ApiError) -> int:
    """529 if there is too much to do now; 503 stays for a server that can't serve at all."""
    return OVERLOADED_STATUS if error.status == 503 and error.code in _OVERLOADED else error.status


def envelope(error: ApiError, request_id: str) -> bytes:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`, with `details` where clients act on them."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = printable(error.message)
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words by which clients know that they have to shorten it
    shown: dict[str, Any] = {"type": kind, "message": message}
    if error.code == NO_THREADS:
        shown["details"] = {"error_code": NO_THREADS}  # by which clients know to send all messages
    return msgspec.json.encode({"type": "error", "error": shown, "request_id": request_id})
