"""The journal: streams survive their scheduler, requests wait for one that is away, and nobody waits for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from protocol import wire
from protocol.columns import i32, pack_i32, pack_u64
from protocol.messages import Outputs, Refused
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service, payloads, stream_lines

COMPLETIONS = "/v1/completions"
WaitUntil = Callable[..., Any]


class Background:
    """A request in a thread; `result` waits for its outcome."""

    def __init__(self, service: Service, **fields: Any) -> None:
        self._body = {"model": MODEL, "prompt": "x", "max_tokens": 50, **fields}
        self._service = service
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._response = self._service.http.post(COMPLETIONS, json=self._body)

    @property
    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_a_request_goes_on_with_the_next_scheduler_where_the_last_one_died(
    make_service: MakeService, stream: bool, done: int
) -> None:
    service = make_service()
    first = service.scheduler
    assert first is not None
    first.tokens_allowed = done
    request = Background(service, stream=stream, logprobs=1)
    first.wait_for(lambda: [live.count for live in first.live.values()] == [done], "tokens")
    first.stop()
    service.scheduler = second = service.new_scheduler(epoch=2)
    response = request.result
    assert response.status_code == 200
    if stream:
        lines = payloads(response.text)
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        text = "".join(choice["text"] for choice in choices)
        count = sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"])
    else:
        choice = response.json()["choices"][0]
        text, count = choice["text"], len(choice["logprobs"]["tokens"])
    assert text == ANSWER
    assert count == len(service.answer) + 1
    (before,), (after,) = first.record.submits, second.record.submits
    assert i32(after.emitted).tolist() == service.answer[:done]
    assert (after.id, after.prompt, after.params) == (before.id, before.prompt, before.params)
    assert second.record.hellos[-1].epoch == 1
    assert service.state.metrics.value("resubmitted_total") == 1
    service.close()


def test_an_answer_whose_end_was_lost_with_the_scheduler_is_complete(make_service: MakeService) -> None:
    service = make_service()
    first = service.scheduler
    assert first is not None
    first.tokens_allowed = 2
    request = Background(service, max_tokens=3)
    first.wait_for(lambda: [live.count for live in first.live.values()] == [2], "two tokens")
    (request_id,) = first.live
    last = service.answer[2]
    first.send_outputs(Outputs(1, 5, pack_u64([request_id]), pack_i32([2]), pack_i32([last])))
    first.stop()
    service.scheduler = second = service.new_scheduler(epoch=2)
    choice = request.result.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The capital of", "length")
    assert second.record.submits == []
    service.close()


def test_tokens_that_come_twice_are_dropped(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 3
    request = Background(service)
    scheduler.wait_for(lambda: [live.count for live in scheduler.live.values()] == [3], "three tokens")
    (request_id,) = scheduler.live
    again = Outputs(1, 5, pack_u64([request_id] * 2), pack_i32([1, 2]), pack_i32([5000, 5000]))
    before = service.state.metrics.value("duplicate_tokens_total")
    scheduler.send_outputs(again)
    scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 100))
    answer = request.result.json()
    assert answer["choices"][0]["text"] == ANSWER
    assert answer["usage"]["completion_tokens"] == len(service.answer) + 1
    assert service.state.metrics.value("duplicate_tokens_total") == before + 2


def test_a_session_reopened_by_the_same_scheduler_continues_every_request(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 3
    request = Background(service, stream=True)
    scheduler.wait_for(lambda: [live.count for live in scheduler.live.values()] == [3], "three tokens")

    def forget_peers() -> None:
        scheduler.live.clear()
        scheduler.tokens_allowed = 100
        for peer in scheduler.channel.peers:
            scheduler.channel.drop(peer)

    scheduler.call(forget_peers)
    lines = payloads(request.result.text)
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == ANSWER
    assert [len(s.emitted) // 4 for s in scheduler.record.submits] == [0, 3]


def test_a_request_that_arrives_while_the_scheduler_is_away_waits_for_it(
    make_service: MakeService, wait_until: WaitUntil
) -> None:
    service = make_service()
    assert service.scheduler is not None
    service.scheduler.stop()
    request = Background(service)
    wait_until(lambda: service.state.engine.num_live() == 1, 60, "the request to wait")
    service.scheduler = service.new_scheduler(epoch=2)
    assert request.result.json()["choices"][0]["text"] == ANSWER
    service.close()


def test_a_service_that_starts_before_its_scheduler_answers_once_it_is_there(make_service: MakeService) -> None:
    service = make_service(scheduler=False)
    request = Background(service)
    service.scheduler = service.new_scheduler()
    assert request.result.json()["choices"][0]["text"] == ANSWER
    service.close()


def test_without_a_scheduler_requests_fail_after_the_wait_and_new_ones_at_once(make_service: MakeService) -> None:
    service = make_service(engine_wait_s=1.0, heartbeat_timeout_s=1.0)
    first = service.scheduler
    assert first is not None
    first.tokens_allowed = 2
    streamed, whole = Background(service, stream=True), Background(service)
    first.wait_for(lambda: sorted(live.count for live in first.live.values()) == [2, 2], "tokens")
    first.call(lambda: setattr(first, "runner", "absent"))
    lines = payloads(streamed.result.text)
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["error"]["code"] == "engine_unavailable"
    assert whole.result.status_code == 503
    late = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    assert late.status_code == 503
    assert int(late.headers["retry-after"]) > 0
    assert "runner is absent" in late.json()["error"]["message"]
    first.forget()
    assert stream_lines(service, COMPLETIONS, {"prompt": "x"})[-1] == "[DONE]"
    service.close()


def test_a_request_may_not_outlive_the_configured_time(make_service: MakeService) -> None:
    service = make_service(request_timeout_s=0.5)
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 2
    response = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "request_timeout"
    scheduler.wait_for(lambda: len(scheduler.record.aborted) == 1, "the abort")
    service.close()


def test_a_request_that_cannot_be_encoded_fails_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 1
    neighbour = Background(service)
    scheduler.wait_for(lambda: len(scheduler.live) == 1, "the neighbour")
    monkeypatch.setattr(service.state.engine, "draw_seed", lambda: 0)
    monkeypatch.setattr("services.routes.endpoint.seed_of", lambda request: None)
    monkeypatch.setattr("services.sampling._logit_bias", lambda bias, vocab: ((1, 2**70),))
    response = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    assert response.status_code == 400
    assert "encoded" in response.json()["error"]["message"]
    scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 100))
    assert neighbour.result.json()["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("code", [wire.BAD_VERSION, wire.BAD_DIGEST])
def test_a_scheduler_of_another_build_ends_the_process_with_an_error(make_service: MakeService, code: str) -> None:
    service = make_service()
    scheduler = service.scheduler
    assert scheduler is not None

    def refuse() -> None:
        scheduler.refuse_hello = Refused(code, "another build")
        for peer in scheduler.channel.peers:
            scheduler.channel.drop(peer)

    scheduler.call(refuse)
    assert service.join() == 1
    service.close()


def test_ids_are_never_used_twice(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    for _ in range(3):
        service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x", "n": 5})
    ids = [s.id for s in scheduler.record.submits]
    assert len(set(ids)) == 15
    assert all(0 <= i < 2**64 for i in ids)
