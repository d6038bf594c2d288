"""Very long prompts, posted one after the other beside streams that they must not hold up."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Sequence

KINDS = ("text", "token ids", "chat")
TIMEOUT_S = 60.0


def long_request(kind: str, model: str, text: str, token_ids: Sequence[int]) -> tuple[str, bytes]:
    """Path and body of a request for a prompt, given as text, as ids, or as one message."""
    if kind == "chat":
        fields = {"messages": [{"role": "user", "content": text}]}
        return "/v1/chat/completions", json.dumps({"model": model, **fields}).encode()
    prompt = text if kind == "text" else list(token_ids)
    return "/v1/completions", json.dumps({"model": model, "prompt": prompt}).encode()


class LongPrompts:
    """Posts a request again and again from a thread, until the block ends. `answers` are the statuses that came."""

    def __init__(self, host: str, port: int, request: tuple[str, bytes]) -> None:
        self.answers: list[int] = []
        self._address = (host, port)
        self._path, self._body = request
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._post_all, daemon=True)

    def __enter__(self) -> LongPrompts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _post_all(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            while not self._over.is_set():
                connection.request("POST", self._path, self._body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                self.answers.append(response.status)
        except (OSError, http.client.HTTPException):
            pass  # the count of answers says it
        finally:
            connection.close()
