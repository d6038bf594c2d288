"""Limits of API keys: what they count, what a client is told, and what is over gives room to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from services.errors import ApiError
from services.limits import Account, KeyLimits, duration
from tests.services.service_kit import MODEL, MakeService, Service

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 3}
MESSAGE = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
WaitUntil = Callable[[Callable[[], Any], float, str], Any]
KEYS = """\
sk-few tenant=few requests_per_minute=2
sk-short tenant=short tokens_per_minute=5
sk-one tenant=one concurrent_requests=1
sk-two tenant=two concurrent_requests=2
sk-low tenant=low priority=7
sk-free tenant=free
"""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def limited(make_service: MakeService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    service = make_service(keys=["sk-admin-free"], api_key_file=str(path), allowed_origins=("*",))
    yield service
    service.close()


def ask(service: Service, key: str, body: dict[str, Any] | None = None, path: str = COMPLETIONS) -> httpx.Response:
    return service.http.post(path, json=body or BODY, headers={"Authorization": f"Bearer {key}"})


def refused(account: Account) -> ApiError:
    with pytest.raises(ApiError) as error:
        account.enter()
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value


def test_requests_per_minute_come_back_evenly_and_never_more_than_a_minutes_worth() -> None:
    clock = Clock()
    account = Account(clock, limits=KeyLimits(requests_per_minute=6))
    for _ in range(6):
        account.enter()
    assert refused(account).headers["Retry-After"] == "10"
    clock.now += 9.5
    assert refused(account).headers["Retry-After"] == "1"
    clock.now += 0.5
    account.enter()
    refused(account)
    clock.now += 3600
    for _ in range(6):
        account.enter()
    refused(account)


def test_tokens_are_charged_when_they_are_known_and_a_debt_is_paid_first() -> None:
    clock = Clock()
    account = Account(clock, limits=KeyLimits(tokens_per_minute=60))
    account.enter()
    account.spend(90)
    error = refused(account)
    assert error.headers["Retry-After"] == "31"
    assert "60 tokens per minute" in error.message
    assert account.headers() == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }
    clock.now += 31
    account.enter()


def test_a_refused_request_costs_nothing() -> None:
    account = Account(Clock(), limits=KeyLimits(requests_per_minute=2, concurrent_requests=1))
    account.enter()
    refused(account)
    account.leave()
    account.enter()
    assert account.live == 1


def test_anthropics_headers_say_when_in_the_calendar() -> None:
    account = Account(Clock(), limits=KeyLimits(requests_per_minute=60))
    account.enter()
    assert account.anthropic_headers(1_800_000_000.0) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:01Z",
    }


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0, 0.017, 1, 1.5, 60, 360.25)] == ["0s", "17ms", "1s", "1.5s", "1m0s", "6m0.25s"]


@pytest.mark.parametrize(("asked", "given"), [(None, 7), (9, 9), (7, 7), (-100, 7)])
def test_a_keys_priority_is_the_most_urgent_that_its_requests_have(asked: int | None, given: int) -> None:
    assert Account(Clock(), priority=7).urgency(asked) == given
    assert Account(Clock()).urgency(asked) == asked


def test_answers_say_what_is_left_and_one_too_many_is_a_429_in_openais_shape(limited: Service) -> None:
    first = ask(limited, "sk-few")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    wrong = ask(limited, "sk-few", {**BODY, "temperature": 5}, "/v1/chat/completions")
    assert wrong.status_code == 400
    assert wrong.headers["x-ratelimit-remaining-requests"] == "0"
    third = ask(limited, "sk-few", {**BODY, "stream": True})
    assert third.status_code == 429
    assert third.json()["error"] == {
        "message": third.json()["error"]["message"],
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-reset-requests"]
    assert third.headers["x-request-id"]
    assert limited.http.get("/v1/models", headers={"Authorization": "Bearer sk-few"}).status_code == 200


def test_one_too_many_messages_are_a_429_in_anthropics_shape(limited: Service) -> None:
    refusal = ask(limited, "sk-few", MESSAGE, "/v1/messages")
    while refusal.status_code == 200:
        refusal = ask(limited, "sk-few", MESSAGE, "/v1/messages")
    assert refusal.status_code == 429
    assert refusal.json()["error"]["type"] == "rate_limit_error"
    assert refusal.headers["anthropic-ratelimit-requests-remaining"] == "0"
    client = anthropic.Anthropic(base_url=limited.address, api_key="sk-few", max_retries=0)
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(**MESSAGE)  # type: ignore[call-overload]


def test_tokens_of_prompt_and_answer_are_charged(limited: Service) -> None:
    with openai.OpenAI(base_url=f"{limited.address}/v1", api_key="sk-short", max_retries=0) as client:
        used = client.completions.create(**BODY).usage  # type: ignore[call-overload]
        assert used.total_tokens == 4
        client.completions.create(**BODY)  # type: ignore[call-overload]
        with pytest.raises(openai.RateLimitError, match="5 tokens per minute"):
            client.completions.create(**BODY)  # type: ignore[call-overload]


def has_room(service: Service, key: str) -> bool:
    """Whether one more request would be let in: one that is wrong hears so then."""
    status = ask(service, key, {**BODY, "temperature": 5}).status_code
    assert status in (400, 429)
    return status == 400


def test_a_request_holds_its_place_until_its_stream_has_ended(limited: Service, wait_until: WaitUntil) -> None:
    limited.reset()
    scheduler = limited.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 1
    headers = {"Authorization": "Bearer sk-one"}
    with limited.http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}, headers=headers) as answer:
        parts = answer.iter_text()
        next(parts)
        assert not has_room(limited, "sk-one")
        assert has_room(limited, "sk-free")
    wait_until(lambda: has_room(limited, "sk-one"), 60, "room for the next")


def test_a_response_in_the_background_holds_its_place_until_it_is_over(limited: Service, wait_until: WaitUntil) -> None:
    limited.reset()
    scheduler = limited.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 1
    body = {"model": MODEL, "input": "x", "background": True, "max_output_tokens": 3}
    started = ask(limited, "sk-one", body, "/v1/responses")
    assert started.status_code == 200, started.text
    assert not has_room(limited, "sk-one")
    headers = {"Authorization": "Bearer sk-one"}
    limited.http.post(f"/v1/responses/{started.json()['id']}/cancel", headers=headers)
    wait_until(lambda: has_room(limited, "sk-one"), 60, "room for the next")


def test_who_follows_a_response_in_the_background_takes_no_second_place(
    limited: Service, wait_until: WaitUntil
) -> None:
    limited.reset()
    scheduler = limited.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 1
    body = {"model": MODEL, "input": "x", "background": True, "stream": True, "max_output_tokens": 3}
    headers = {"Authorization": "Bearer sk-two"}
    with limited.http.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
        events = answer.iter_text()
        next(events)
        assert has_room(limited, "sk-two")
        with limited.http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}, headers=headers) as other:
            parts = other.iter_text()
            next(parts)
            assert not has_room(limited, "sk-two")
    wait_until(lambda: has_room(limited, "sk-two"), 60, "the place of the stream")


def test_requests_that_run_count_when_their_key_is_given_a_limit(
    make_service: MakeService, tmp_path: Path, wait_until: WaitUntil
) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-a\n")
    path.chmod(0o600)
    service = make_service(keys=[], api_key_file=str(path))
    try:
        assert service.scheduler is not None
        service.scheduler.tokens_allowed = 1
        headers = {"Authorization": "Bearer sk-a"}
        with service.http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}, headers=headers) as answer:
            parts = answer.iter_text()
            next(parts)
            path.write_text("sk-a concurrent_requests=1\n")
            wait_until(lambda: not has_room(service, "sk-a"), 60, "the limit")
        wait_until(lambda: has_room(service, "sk-a"), 60, "room for the next")
    finally:
        service.close()


def test_tenant_and_priority_of_a_key_reach_the_scheduler(limited: Service) -> None:
    limited.reset()
    scheduler = limited.scheduler
    assert scheduler is not None
    ask(limited, "sk-low", {**BODY, "user": "me"})
    ask(limited, "sk-low", {**BODY, "priority": -3})
    ask(limited, "sk-low", {**BODY, "priority": 9})
    ask(limited, "sk-free", {**BODY, "priority": -3})
    seen = [(submit.tenant, submit.priority) for submit in scheduler.record.submits]
    assert seen == [("low", 7), ("low", 7), ("low", 9), ("free", -3)]
