"""What answers carry beside their body: ids, hints to come back, names of ignored fields, and what proxies look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.messages import Rejected
from services.openapi.operations import OPERATIONS
from tests.services.service_kit import MODEL, MakeService, Service, raw_request

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
STREAMING = [path for path in BODIES if path.startswith("/v1") and not path.endswith("count_tokens")]


@pytest.fixture(scope="module")
def alone(make_service: MakeService) -> Iterator[Service]:
    """A service without a scheduler: it can't serve, and says so at once."""
    service = make_service(scheduler=False, engine_wait_s=0.0)
    yield service
    service.close()


@pytest.mark.parametrize("path", sorted({operation.path for operation in OPERATIONS}))
def test_the_request_id_comes_back_from_every_route_whatever_the_answer(service: Service, path: str) -> None:
    asked = path.replace("{", "").replace("}", "")
    for method in ("POST", "DELETE", "PUT") if path.endswith("timeline") else ("GET", "POST", "DELETE", "PUT"):
        answer = service.http.request(method, asked, headers={"X-Request-Id": f"mine-{method}"})
        assert answer.headers.get_list("x-request-id") == [f"mine-{method}"], answer.status_code
        if path.startswith("/v1/messages"):
            assert answer.headers["request-id"] == f"mine-{method}"


@pytest.mark.parametrize("path", BODIES)
def test_errors_before_the_route_reads_a_body_have_the_shape_of_their_api(service: Service, path: str) -> None:
    for status, method, asked, headers in (
        (405, "GET", path, []),
        (415, "POST", path, [(b"Content-Type", b"text/plain"), (b"Content-Length", b"0")]),
        (413, "POST", path, [(b"Content-Type", b"application/json"), (b"Content-Length", b"99999999")]),
        (404, "POST", f"{path}/no/such", [(b"Content-Length", b"0")]),
    ):
        found, _, body = raw_request(service, method, asked, headers)
        assert found == status
        answer = json.loads(body)
        if path.startswith("/v1/messages"):
            assert set(answer) == {"type", "error", "request_id"}
            assert set(answer["error"]) == {"type", "message"}
        else:
            assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert service.http.get(path).headers["allow"] == "POST"


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_are_not_known_are_named_in_a_warning_and_counted(service: Service, path: str) -> None:
    before = service.state.metrics.value("unknown_fields_total")
    body = {**BODIES[path], "max_token": 5, 'odd "näme"\n': None}
    answer = service.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    wanted = '299 triptych "ignored unknown fields: max_token, odd%20%22n%C3%A4me%22%0A"'
    assert answer.headers["warning"] == wanted
    assert service.state.metrics.value("unknown_fields_total") == before + 2
    assert "warning" not in service.http.post(path, json=BODIES[path]).headers


@pytest.mark.parametrize("path", STREAMING)
def test_a_stream_and_an_error_carry_the_warning_too(service: Service, path: str) -> None:
    streamed = service.http.post(path, json={**BODIES[path], "stream": True, "max_token": 5})
    assert "max_token" in streamed.headers["warning"]
    refused = service.http.post(path, json={**BODIES[path], "temperature": 9, "max_token": 5})
    assert refused.status_code == 400
    assert "max_token" in refused.headers["warning"]


def test_very_many_unknown_fields_make_a_short_warning(service: Service) -> None:
    body = {**BODIES["/tokenize"], **{f"{number}-{'x' * 200}": 1 for number in range(100)}}
    warning = service.http.post("/tokenize", json=body).headers["warning"]
    assert warning.endswith(' and 84 more"')
    assert len(warning) < 1500


@pytest.mark.parametrize("path", STREAMING)
def test_proxies_are_told_not_to_hold_a_stream_back(service: Service, path: str) -> None:
    answer = service.http.post(path, json={**BODIES[path], "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


def test_who_can_not_be_served_now_hears_when_to_come_back(alone: Service) -> None:
    for path in STREAMING:
        answer = alone.http.post(path, json={"model": MODEL, **BODIES[path]})
        assert (answer.status_code, answer.headers["retry-after"].isdigit()) == (503, True)
    for path in ("/health", "/ready", "/v1/requests/x/timeline"):
        answer = alone.http.get(path)
        assert (answer.status_code, answer.headers["retry-after"].isdigit()) == (503, True)


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 503), ("/v1/messages", 529)])
def test_a_scheduler_that_names_no_time_to_come_back_leaves_no_answer_without_one(
    service: Service, path: str, status: int
) -> None:
    assert service.scheduler is not None
    service.scheduler.refuse = lambda submit: Rejected(submit.id, "waiting_timeout", "too long", 503)
    answer = service.http.post(path, json=BODIES[path])
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
