"""Errors that don't come from a body's fields: routes, methods, media types, sizes, and failures in mid-stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from protocol.columns import pack_i32, pack_u64
from protocol.messages import Finished, Outputs, RequestStatus
from services.choice import Choice
from tests.services.service_kit import MODEL, MakeService, Service, connect, payloads, stream_lines

COMPLETIONS = "/v1/completions"


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_an_unknown_path_is_a_404_in_the_error_shape(service: Service) -> None:
    for path in ("/v1/nope", "/", "/v1/models/", "//v1/models", "/v1/completions/"):
        error_of(service.http.get(path), 404)


def test_a_wrong_method_is_a_405_that_names_the_right_one(service: Service) -> None:
    response = service.http.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(service.http.post("/health"), 405)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_body_that_does_not_claim_to_be_json_is_a_415(service: Service, kind: str) -> None:
    error_of(service.http.post(COMPLETIONS, content=b'{"prompt":"x"}', headers={"Content-Type": kind}), 415)


def test_a_compressed_body_is_a_415(service: Service) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    error_of(service.http.post(COMPLETIONS, content=b"\x1f\x8b", headers=headers), 415)


def test_a_body_over_the_limit_is_a_413_announced_or_not(make_service: MakeService) -> None:
    service = make_service(max_body_bytes=2000)
    body = json.dumps({"model": MODEL, "prompt": "x" * 3000}).encode()
    headers = {"Content-Type": "application/json"}
    error_of(service.http.post(COMPLETIONS, content=body, headers=headers), 413)
    error_of(service.http.post(COMPLETIONS, content=iter([body[:1500], body[1500:]]), headers=headers), 413)
    service.close()


def test_a_body_that_never_arrives_is_a_408_and_the_connection_closes(make_service: MakeService) -> None:
    service = make_service(body_timeout_s=0.2)
    with connect(service) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while more := client.recv(65536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"body_timeout"' in answer
    service.close()


def test_a_client_that_leaves_while_sending_its_body_leaves_nothing(
    service: Service, wait_until: Callable[..., Any]
) -> None:
    before = service.state.metrics.value("client_disconnects_total")
    with connect(service) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    wait_until(lambda: service.state.metrics.value("client_disconnects_total") == before + 1, 60, "the disconnect")
    assert service.state.engine.num_live() == 0


def test_an_unexpected_exception_is_a_500_without_its_details(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.state.engine, "draw_seed", explode)
    response = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    assert "secret" not in error_of(response, 500)["message"]


def test_the_request_id_comes_back_or_is_made(service: Service) -> None:
    assert service.http.get("/version", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(service.http.get("/version").headers["x-request-id"]) == 32
    for odd in ("x" * 200, "caf\u00e9"):
        answer = service.http.get("/version", headers={"X-Request-Id": odd.encode("latin-1")})
        assert len(answer.headers["x-request-id"]) == 32
    refused = service.http.post(COMPLETIONS, json={"model": "nope", "prompt": "x"}, headers={"X-Request-Id": "abc-2"})
    assert refused.headers["x-request-id"] == "abc-2"


def end_with_error(service: Service, after: int) -> None:
    """Every request now gets `after` tokens, then the scheduler ends it with an error."""
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = after

    def fail() -> None:
        for live in list(scheduler.live.values()):
            event = Finished(
                live.submit.id, RequestStatus.ERROR, -1, live.count, code="nan_logits", message="not finite"
            )
            scheduler.channel.send(live.peer, Outputs(1, 1, finished=[event]))
            del scheduler.live[live.submit.id]

    scheduler.wait_for(lambda: any(live.count >= after for live in scheduler.live.values()), "tokens")
    scheduler.call(fail)


def test_a_failure_in_mid_stream_is_one_error_event_and_done(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 3
    body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    with service.http.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        parts = response.iter_text()
        text = next(parts)
        end_with_error(service, 3)
        text += "".join(parts)
    lines = payloads(text)
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["error"] == {
        "message": "not finite", "type": "server_error", "param": None, "code": "nan_logits",
    }  # fmt: skip
    assert all(json.loads(line)["choices"][0]["finish_reason"] is None for line in lines[:-2])
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-2]) == "The capital of"


def test_the_official_client_raises_on_a_failure_in_mid_stream(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 2
    stream = service.client.completions.create(model=MODEL, prompt="x", stream=True)
    next(stream)
    end_with_error(service, 2)
    with pytest.raises(openai.APIError, match="not finite"):
        list(stream)


def test_a_failure_of_a_whole_answer_is_a_status(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None

    def submit_fails(peer: bytes, submit: Any) -> None:
        event = Finished(submit.id, RequestStatus.ERROR, code="boom", message="it broke")
        scheduler.channel.send(peer, Outputs(1, 1, accepted=pack_u64([submit.id]), finished=[event]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_submit", submit_fails)
        for stream in (False, True):
            response = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x", "stream": stream})
            assert error_of(response, 500)["code"] == "boom"


def test_a_gap_in_the_tokens_ends_that_request_with_an_error_and_is_counted(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 1
    before = service.state.metrics.value("lost_tokens_total")
    with service.http.stream("POST", COMPLETIONS, json={"model": MODEL, "prompt": "x", "stream": True}) as response:
        parts = response.iter_text()
        text = next(parts)
        (request_id,) = scheduler.live
        scheduler.send_outputs(Outputs(1, 9, pack_u64([request_id]), pack_i32([3]), pack_i32([5])))
        text += "".join(parts)
    assert json.loads(payloads(text)[-2])["error"]["code"] == "tokens_lost"
    assert service.state.metrics.value("lost_tokens_total") == before + 2
    scheduler.wait_for(lambda: request_id in scheduler.record.aborted, "the abort")


def test_an_end_that_counts_more_tokens_than_arrived_is_an_error(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 1
    with service.http.stream("POST", COMPLETIONS, json={"model": MODEL, "prompt": "x", "stream": True}) as response:
        parts = response.iter_text()
        text = next(parts)
        (request_id,) = scheduler.live
        scheduler.send_outputs(Outputs(1, 9, finished=[Finished(request_id, RequestStatus.STOPPED, 2, 4)]))
        text += "".join(parts)
    assert json.loads(payloads(text)[-2])["error"]["code"] == "tokens_lost"


def test_a_message_that_makes_no_sense_leaves_the_service_working(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.send_outputs(Outputs(1, 9, pack_u64([1, 2]), pack_i32([0]), pack_i32([5])))
    scheduler.send_outputs(Outputs(1, 9, b"odd", b"", b""))
    scheduler.send_outputs(Outputs(1, 9, pack_u64([77]), pack_i32([0]), pack_i32([5])))
    assert stream_lines(service, COMPLETIONS, {"prompt": "x"})[-1] == "[DONE]"


def test_an_exception_over_one_requests_text_ends_that_request_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    original = Choice.advance

    def poisoned(choice: Choice) -> Any:
        if choice.generation.submit.label == "poison" and len(choice.generation.tokens) > 2:
            raise RuntimeError("can't be shown")
        return original(choice)

    monkeypatch.setattr(Choice, "advance", poisoned)
    poison = {"X-Request-Id": "poison"}
    body = {"model": MODEL, "prompt": "x"}
    response = service.http.post(COMPLETIONS, json={**body, "stream": True}, headers=poison)
    lines = payloads(response.text)
    assert json.loads(lines[-2])["error"]["code"] == "internal_error"
    assert lines[-1] == "[DONE]"
    assert service.http.post(COMPLETIONS, json=body, headers=poison).status_code == 500
    assert service.http.post(COMPLETIONS, json=body).status_code == 200
    assert service.state.engine.num_live() == 0
