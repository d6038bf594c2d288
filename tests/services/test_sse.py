"""Server-sent events on the wire: headers, pings, the one end marker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.connection import Connection
from tests.services.service_kit import MODEL, MakeService, Service, payloads, stream_lines

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def test_the_headers_keep_proxies_from_collecting_the_stream(service: Service) -> None:
    with service.http.stream("POST", CHAT, json={"model": MODEL, "messages": USER, "stream": True}) as response:
        headers = response.headers
        response.read()
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers
    assert "x-request-id" in headers


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("how", ["stop", "length", "stop string", "empty", "two choices"])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_every_stream_ends_with_exactly_one_end_marker(service: Service, path: str, how: str, usage: bool) -> None:
    extra: dict[str, Any] = {
        "stop": {},
        "length": {"max_tokens": 2},
        "stop string": {"stop": "France"},
        "empty": {},
        "two choices": {"n": 2},
    }[how]
    if how == "empty":
        service.answer = []
    base: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    lines = stream_lines(service, path, {**base, **extra, **options})
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    assert (json.loads(lines[-2])["choices"] == []) == usage


def test_a_step_is_one_write_however_many_choices_it_gives_tokens_and_wakes_no_handler(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    written: list[int] = []
    awaited: list[str] = []
    write, send = Connection.write, RequestResponseCycle.send

    def counted_write(connection: Connection, body: bytes) -> None:
        written.append(body.count(b"data: "))
        write(connection, body)

    async def counted_send(cycle: RequestResponseCycle, message: Any) -> None:
        awaited.append(message["type"])
        await send(cycle, message)

    monkeypatch.setattr(Connection, "write", counted_write)
    monkeypatch.setattr(RequestResponseCycle, "send", counted_send)
    scheduler.tokens_allowed = 1
    body = {"model": MODEL, "messages": USER, "stream": True, "n": 3}
    with service.http.stream("POST", CHAT, json=body) as response:
        parts = response.iter_text()
        text = next(parts)
        for allowed in range(2, 6):
            while text.count('"delta":{"content":') < 3 * (allowed - 1):
                text += next(parts)
            scheduler.call(lambda allowed=allowed: setattr(scheduler, "tokens_allowed", allowed))  # type: ignore
        scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 10**9))
        text += "".join(parts)
    assert payloads(text)[-1] == "[DONE]"
    assert len(written) >= 4 and set(written[1:4]) == {3}, "one write with an event of each choice"
    assert len(awaited) <= 4, "headers, what was there at once, and the end; no token"


def test_a_silent_stream_carries_comments_and_they_are_never_inside_an_event(make_service: MakeService) -> None:
    service = make_service(sse_ping_s=0.2)
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.held = True
    body = {"model": MODEL, "messages": USER, "stream": True}
    with service.http.stream("POST", CHAT, json=body) as response:
        parts = response.iter_text()
        text = ""
        while text.count(": ping\n\n") < 2:
            text += next(parts)
        assert payloads(text) == [], "a data event before the first token"
        scheduler.call(lambda: setattr(scheduler, "held", False))
        text += "".join(parts)
    assert payloads(text)[-1] == "[DONE]"
    service.close()


def test_pings_can_be_switched_off(make_service: MakeService) -> None:
    service = make_service(sse_ping_s=0.0)
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.held = True
    with service.http.stream("POST", CHAT, json={"model": MODEL, "messages": USER, "stream": True}) as response:
        # Housekeeping has turned several times once the scheduler has reported that often.
        seen: list[object] = []
        scheduler.wait_for(lambda: seen.append(1) or len(seen) > 300, "time to pass")  # type: ignore[func-returns-value]
        scheduler.call(lambda: setattr(scheduler, "held", False))
        assert ": ping" not in response.read().decode()
    service.close()
