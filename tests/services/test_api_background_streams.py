"""Responses that stream and run in the background: they go on without their client, who may come back for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry

from protocol.exposition import serve_metrics
from services.errors import ApiError
from services.responses import events as event_log
from services.responses.events import EventLog
from services.responses.shelf import PAGE
from tests.services.fake_scheduler import FakeScheduler
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service

PATH = "/v1/responses"
WaitUntil = Callable[..., Any]


def scheduler_of(service: Service) -> FakeScheduler:
    assert service.scheduler is not None
    return service.scheduler


def begin(service: Service, **fields: Any) -> Any:
    """The stream of a new response that runs in the background."""
    return service.client.responses.create(model=MODEL, input="Where is Paris?", background=True, stream=True, **fields)


def go_on(service: Service) -> None:
    scheduler = scheduler_of(service)
    scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 1000))


def body_of(service: Service, query: str, id: str) -> list[Any]:
    answer = service.http.get(f"{PATH}/{id}?{query}")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return [json.loads(block.split("data: ")[1]) for block in answer.text.strip().split("\n\n")]


def test_who_left_comes_back_for_the_rest(service: Service) -> None:
    scheduler_of(service).tokens_allowed = 3
    with begin(service) as stream:
        seen: list[Any] = []
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    id = seen[0].response.id
    assert seen[0].response.background and seen[0].response.status == "in_progress"
    go_on(service)
    with service.client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number) as stream:
        seen += list(stream)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == ANSWER
    assert seen[-1].type == "response.completed" and seen[-1].response.output_text == ANSWER
    again = body_of(service, "stream=true", id)
    assert again == [event.to_dict(mode="json") for event in seen]
    assert body_of(service, f"stream=true&starting_after={len(seen) - 2}", id) == again[-1:]


def test_two_follow_one_response_and_one_of_them_leaves(service: Service) -> None:
    scheduler_of(service).tokens_allowed = 2
    with begin(service) as first:
        id = next(iter(first)).response.id
        assert service.http.head(f"{PATH}/{id}?stream=true").status_code == 200, "at once"
        with service.client.responses.retrieve(id, stream=True) as second:
            next(iter(second))
        go_on(service)
        assert list(first)[-1].type == "response.completed"
    assert scheduler_of(service).record.aborted == []


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_who_follows_hears_that_it_was_cancelled(service: Service, how: str) -> None:
    scheduler_of(service).tokens_allowed = 2
    with begin(service) as stream:
        id = next(iter(stream)).response.id
        getattr(service.client.responses, how)(id)
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    scheduler_of(service).wait_for(lambda: len(scheduler_of(service).record.aborted) == 1, "the abort")


def test_a_refusal_is_a_status_and_a_failure_an_event(service: Service) -> None:
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        begin(service, max_output_tokens=0)
    with pytest.raises(openai.BadRequestError, match="needs store"):
        begin(service, store=False)
    whole = service.client.responses.create(model=MODEL, input="x", background=True)
    for query in ("stream=true", "stream=true&starting_after=-1", "stream=true&starting_after=x", "starting_after=1"):
        answer = service.http.get(f"{PATH}/{whole.id}?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] in ("stream", "starting_after"), query
    assert service.http.get(f"{PATH}/resp_00ff?stream=true").status_code == 404
    service.client.responses.delete(whole.id)


@pytest.fixture(scope="module")
def pinging(make_service: MakeService) -> Iterator[Service]:
    service = make_service(sse_ping_s=0.05)
    yield service
    service.close()


def test_comments_come_while_there_is_nothing_to_tell(pinging: Service, wait_until: WaitUntil) -> None:
    scheduler_of(pinging).tokens_allowed = 2
    body = {"model": MODEL, "input": "x", "background": True, "stream": True}
    with pinging.http.stream("POST", PATH, json=body) as answer:
        text = ""
        for part in answer.iter_text():
            text += part
            if text.count(": ping\n\n") == 3:
                go_on(pinging)
    blocks = text.strip().split("\n\n")
    assert blocks[-1].startswith("event: response.completed\n")
    assert all(block == ": ping" or block.startswith("event: response.") for block in blocks)


def test_another_process_passes_the_events_on(make_service: MakeService) -> None:
    one = make_service(process_number=1)
    two = make_service(process_number=2, runtime_dir=one.config.runtime_dir, scheduler=False)
    socket, pages = f"{one.config.runtime_dir}/api-1.metrics.sock", {PAGE: one.state.responses.page}
    scheduler_of(one).tokens_allowed = 3
    with serve_metrics(CollectorRegistry(), unix_path=socket, pages=pages), begin(one) as stream:
        id = next(iter(stream)).response.id
        with two.client.responses.retrieve(id, stream=True) as elsewhere:
            seen = [next(iter(elsewhere))]
            go_on(one)
            seen += list(elsewhere)
        whole = one.client.responses.create(model=MODEL, input="x")
        answer = two.http.get(f"{PATH}/{whole.id}?stream=true")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    two.close()
    one.close()


def test_the_first_events_make_room_and_who_wants_them_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_BYTES", 30)
    kept = EventLog()
    for number in range(5):
        kept.append(b"event-%04d" % number)
    assert kept.size == 30
    with pytest.raises(ApiError, match="up to 1 are no longer kept"):
        kept.news(0)
    assert kept.news(1).events == (b"event-0002", b"event-0003", b"event-0004")
    assert (kept.news(3).events, kept.news(3).over, kept.news(9).events) == ((b"event-0004",), False, ())
    kept.close()
    assert kept.news(3).over and kept.news(4).over


def test_news_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_NEWS", 2)
    kept = EventLog()
    for number in range(3):
        kept.append(b"%d" % number)
    kept.close()
    assert (kept.news(-1).events, kept.news(-1).over) == ((b"0", b"1"), False)
    assert (kept.news(1).events, kept.news(1).over) == ((b"2",), True)
