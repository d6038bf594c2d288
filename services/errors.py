"""What a client sees when something is wrong: one exception with a status and OpenAI's error shape.

Every boundary of the service raises `ApiError`; whoever writes the response asks it for its body.
"""

from __future__ import annotations

import http
from typing import Any

import msgspec

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
NOT_FOUND = "not_found_error"
RATE_LIMIT = "rate_limit_error"
OVERLOADED = "overloaded_error"
SERVER = "server_error"
RETRY_AFTER_S = 1

_ENDS = {
    "context_length_exceeded": 400,
    "kv_capacity_exceeded": 400,
    "invalid_grammar": 400,
    "queue_full": 503,
    "displaced": 503,
    "waiting_timeout": 503,
    "draining": 503,
}
_TYPES = {401: AUTHENTICATION, 403: AUTHENTICATION, 404: NOT_FOUND, 429: RATE_LIMIT, 503: OVERLOADED}


class ApiError(Exception):
    """A failure with the HTTP status that fits. `retry_after_s` > 0 becomes a Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int = 0,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s > 0:
            self.headers["Retry-After"] = str(retry_after_s)

    @property
    def type(self) -> str:
        """OpenAI's coarse name for this kind of failure."""
        return _TYPES.get(self.status, INVALID if self.status < 500 else SERVER)

    def payload(self) -> dict[str, Any]:
        """The body as an object: `{"error": {"message", "type", "param", "code"}}`."""
        return {
            "error": {
                "message": printable(self.message),
                "type": self.type,
                "param": None if self.param is None else printable(self.param),
                "code": self.code or str(self.status),
            }
        }

    def body(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.payload())


def printable(text: str) -> str:
    """`text` with lone surrogates replaced, so that it can be encoded whatever a client sent."""
    return text.encode("utf-8", "replace").decode()


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request can't be understood or served as it is."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, what: str = "") -> ApiError:
    """400: a known feature that this server doesn't have; never ignored silently. `what` may begin with the place."""
    named = what if what.startswith(f"{param}[") else f"{param}: {what or 'this feature'}"
    return ApiError(400, f"{named} is not supported", code="unsupported", param=param)


def from_status(status: int, detail: str = "") -> ApiError:
    """The error for a bare HTTP status, such as the router's 404 and 405."""
    codes = {404: "route_not_found", 405: "method_not_allowed"}
    return ApiError(status, detail or http.HTTPStatus(status).phrase, code=codes.get(status))


def internal() -> ApiError:
    """500, without details that belong into the log."""
    return ApiError(500, "Internal server error; the server's log has the details", code="internal_error")


def ended(code: str, message: str) -> ApiError:
    """What a request's end by the scheduler is to the client; a reason that is not known is a 500."""
    status = _ENDS.get(code, 500)
    return ApiError(status, message, code=code, retry_after_s=RETRY_AFTER_S if status == 503 else 0)


def unavailable(message: str, code: str = "unavailable", retry_after_s: int = 5) -> ApiError:
    """503 that asks to come back."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)
