"""API keys: which routes, which headers, and that keys stay out of logs and metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from tests.services.service_kit import MODEL, MakeService, Service, raw_request

KEYS = ["sk-first-key-1", "sk-zweiter-schlüssel"]
ROUTES = [
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "GET /v1/responses/resp_1",
    "DELETE /v1/responses/resp_1",
    "POST /v1/responses/resp_1/cancel",
    "GET /v1/responses/resp_1/input_items",
    "GET /v1/models",
    f"GET /v1/models/{MODEL}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /load",
    "GET /metrics",
    "GET /openapi.json",
    "GET /nope",
    "GET //v1/models",
    "GET /v1/../health",
    "GET /v1/%2e%2e/health",
    "GET /health/",
    "GET /HEALTH",
    "OPTIONS /v1/models",
]
WRONG = {
    "none": None,
    "empty": b"",
    "no token": b"Bearer",
    "only a space": b"Bearer ",
    "another scheme": b"Basic c2stZmlyc3Qta2V5LTE=",
    "no scheme": b"sk-first-key-1",
    "another key": b"Bearer wrong",
    "too short": b"Bearer sk-first-key-",
    "too long": b"Bearer sk-first-key-11",
    "not ascii": "Bearer é".encode(),
    "not utf-8": b"Bearer \xff\xfe",
    "huge": b"Bearer " + b"x" * 100_000,
    "two in one": b"Bearer sk-first-key-1, Bearer x",
}


@pytest.fixture(scope="module")
def locked(make_service: MakeService) -> Iterator[Service]:
    service = make_service(keys=KEYS)
    yield service
    service.close()


@pytest.mark.parametrize("wrong", WRONG)
def test_without_a_right_key_every_route_is_a_401(locked: Service, wrong: str) -> None:
    value = WRONG[wrong]
    headers = [] if value is None else [(b"Authorization", value)]
    for route in ROUTES if wrong != "huge" else ROUTES[:1]:
        status, answer, body = raw_request(locked, *route.split(" "), headers)
        assert status == 401, route
        assert answer["www-authenticate"] == "Bearer"
        assert json.loads(body)["error"]["type"] == "authentication_error"


def test_two_authorization_headers_are_a_401(locked: Service) -> None:
    right = (b"Authorization", b"Bearer sk-first-key-1")
    assert raw_request(locked, "GET", "/v1/models", [right, (b"Authorization", b"Bearer x")])[0] == 401


@pytest.mark.parametrize("header", ["Bearer {}", "bearer {}", "Bearer  {}", "BEARER {} "])
def test_each_key_opens_the_door(locked: Service, header: str) -> None:
    for key in KEYS:
        headers = [(b"Authorization", header.format(key).encode())]
        assert raw_request(locked, "GET", "/v1/models", headers)[0] == 200


def test_the_open_routes_need_no_key(locked: Service) -> None:
    for path in ("/health", "/ready", "/version"):
        assert raw_request(locked, "GET", path)[0] == 200


def test_requests_with_different_keys_are_different_tenants(locked: Service) -> None:
    assert locked.scheduler is not None
    for key in KEYS:
        headers = [(b"Authorization", f"Bearer {key}".encode())]
        body = json.dumps({"model": MODEL, "prompt": "x", "user": "me"}).encode()
        assert raw_request(locked, "POST", "/v1/completions", headers, body)[0] == 200
    assert [s.tenant for s in locked.scheduler.record.submits[-2:]] == ["key-0", "key-1"]


def test_keys_are_in_no_log_and_no_metric(locked: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    locked.http.get("/v1/models")
    locked.http.post("/v1/completions", json={"model": "nope", "prompt": "x"})
    metrics = locked.http.get("/metrics").text
    for key in KEYS:
        assert key not in metrics
        assert not any(key in record.getMessage() for record in caplog.records if record.name.startswith("triptych"))


def test_metrics_may_be_opened_without_a_key(make_service: MakeService) -> None:
    service = make_service(keys=KEYS[:1], metrics_open=True)
    assert raw_request(service, "GET", "/metrics")[0] == 200
    assert raw_request(service, "GET", "/load")[0] == 401
    service.close()


def test_without_keys_everything_is_open(service: Service) -> None:
    assert service.http.get("/v1/models").status_code == 200


def test_browsers_may_call_from_configured_origins_and_read_errors(make_service: MakeService) -> None:
    service = make_service(keys=KEYS[:1], allowed_origins=("https://app.example",))
    origin = {"Origin": "https://app.example"}
    asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = service.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    refused = service.http.get("/v1/models", headers={**origin, "Authorization": "Bearer no"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    exposed = set(refused.headers["access-control-expose-headers"].split(", "))
    assert {"x-request-id", "retry-after", "warning"} <= exposed
    assert {"x-ratelimit-reset-tokens", "anthropic-ratelimit-tokens-reset"} <= exposed
    other = service.http.options("/v1/chat/completions", headers={**asked, "Origin": "https://other.example"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    service.close()


def test_browsers_may_call_from_nowhere_unless_that_is_configured(service: Service) -> None:
    origin = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    preflight = service.http.options("/v1/chat/completions", headers=origin)
    assert preflight.status_code == 405
    for answer in (preflight, service.http.get("/v1/models", headers=origin)):
        assert not any(name.startswith("access-control-") for name in answer.headers)
