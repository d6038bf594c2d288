"""What a client sees of the scheduler's decisions: deadlines of waiting, ends with a reason, and timelines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from protocol.messages import Control, ControlReply, Finished, Outputs, Rejected, RequestStatus, Submit
from tests.services.fake_scheduler import FakeScheduler
from tests.services.service_kit import MODEL, MakeService, Service, payloads, stream_lines


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 8} | fields


def repetition(**fields: int) -> dict[str, Any]:
    return {"repetition_detection": fields}


def post(service: Service, **fields: Any) -> httpx.Response:
    return service.http.post("/v1/completions", json=body(**fields))


def end(service: Service, **fields: Any) -> None:
    """Have the scheduler end every live request."""
    scheduler = service.scheduler
    assert scheduler is not None

    def work() -> None:
        ended = [Finished(live.submit.id, num_output_tokens=live.count, **fields) for live in scheduler.live.values()]
        scheduler.live.clear()
        scheduler._to_all(Outputs(scheduler.epoch, 1, finished=ended))

    scheduler.call(work)


def scheduler_of(service: Service) -> FakeScheduler:
    assert service.scheduler is not None
    return service.scheduler


def the_submit(service: Service) -> Submit:
    (submit,) = scheduler_of(service).record.submits
    return submit


def held(service: Service, condition: Callable[[FakeScheduler], bool] = lambda s: bool(s.live)) -> None:
    scheduler = scheduler_of(service)
    scheduler.wait_for(lambda: condition(scheduler), "the request")


# --- request fields -----------------------------------------------------------------------------------------------


def test_timeout_deadline_and_routing_key_reach_the_scheduler(service: Service) -> None:
    assert post(service, timeout=2.5, deadline=60, routing_key="blue").status_code == 200
    submit = the_submit(service)
    assert 2000 < submit.timeout_ms <= 2500 and 59_000 < submit.deadline_ms <= 60_000
    assert submit.routing_key == "blue" and not submit.resumed


def test_without_these_fields_the_scheduler_decides(service: Service) -> None:
    post(service)
    submit = the_submit(service)
    assert (submit.timeout_ms, submit.deadline_ms, submit.routing_key) == (0, 0, "")
    assert submit.params.repetition_max_pattern == 0


def test_repetition_detection_reaches_the_scheduler(service: Service) -> None:
    post(service, repetition_detection={"max_pattern_size": 6, "min_count": 4})
    params = the_submit(service).params
    assert (params.repetition_max_pattern, params.repetition_min_pattern, params.repetition_min_count) == (6, 1, 4)


def test_a_maximum_of_zero_switches_repetition_detection_off(service: Service) -> None:
    assert post(service, repetition_detection={"min_pattern_size": 3}).status_code == 200
    assert the_submit(service).params.repetition_max_pattern == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"deadline": -1}, "deadline"),
        ({"routing_key": "k" * 1025}, "routing_key"),
        (repetition(max_pattern_size=4, min_count=1), "repetition_detection"),
        (repetition(max_pattern_size=4), "repetition_detection"),
        (repetition(max_pattern_size=2, min_pattern_size=3, min_count=2), "repetition_detection"),
        (repetition(max_pattern_size=-1, min_count=2), "repetition_detection"),
    ],
)
def test_values_that_make_no_sense_name_their_field(service: Service, fields: dict[str, Any], param: str) -> None:
    answer = post(service, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


# --- ends ---------------------------------------------------------------------------------------------------------

ENDS = [
    ("kv_capacity_exceeded", RequestStatus.IGNORED, 400),
    ("context_length_exceeded", RequestStatus.IGNORED, 400),
    ("invalid_grammar", RequestStatus.ERROR, 400),
    ("displaced", RequestStatus.ERROR, 503),
    ("waiting_timeout", RequestStatus.ERROR, 503),
    ("draining", RequestStatus.ERROR, 503),
    ("queue_full", RequestStatus.ERROR, 503),
    ("non_finite_logits", RequestStatus.ERROR, 500),
    ("", RequestStatus.ABORTED, 500),
]


@pytest.mark.parametrize(("code", "status", "http"), ENDS, ids=[code or "aborted" for code, _, _ in ENDS])
def test_an_end_by_the_scheduler_is_the_status_that_fits(
    service: Service, code: str, status: RequestStatus, http: int
) -> None:
    scheduler_of(service).held = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, service)
        held(service)
        end(service, status=status, code=code, message="because")
        found = answer.result()
    assert found.status_code == http
    assert found.json()["error"]["message"] == "because" and found.json()["error"]["code"] == (code or "aborted")
    assert ("retry-after" in found.headers) == (http == 503)


def test_an_end_after_the_first_text_is_an_error_event(service: Service) -> None:
    scheduler_of(service).tokens_allowed = 2
    with ThreadPoolExecutor(1) as pool:
        lines = pool.submit(stream_lines, service, "/v1/completions", body(timeout=30))
        held(service, lambda s: any(live.count == 2 for live in s.live.values()))
        end(service, status=RequestStatus.ERROR, code="displaced", message="because")
        *texts, error, done = lines.result()
    assert done == "[DONE]" and json.loads(error)["error"]["code"] == "displaced"
    assert not any("error" in json.loads(text) for text in texts)


def test_a_repetition_is_a_finish_reason(service: Service) -> None:
    scheduler_of(service).tokens_allowed = 2
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, service)
        held(service, lambda s: any(live.count == 2 for live in s.live.values()))
        end(service, status=RequestStatus.REPETITION)
        (choice,) = answer.result().json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


# --- waiting timeouts ---------------------------------------------------------------------------------------------


def test_a_stream_that_waits_too_long_is_a_503(service: Service) -> None:
    scheduler_of(service).held = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, service, stream=True, timeout=1)
        held(service)
        end(service, status=RequestStatus.ERROR, code="waiting_timeout", message="not admitted within 1.0 s")
        found = answer.result()
    assert found.status_code == 503 and int(found.headers["retry-after"]) >= 1
    assert found.json()["error"]["code"] == "waiting_timeout"


@pytest.fixture
def bound_waiting(service: Service, wait_until: Callable[..., Any]) -> Callable[[int], None]:
    """Let the scheduler bound how long requests wait (ms; 0: not), and wait until the API has heard of it."""

    def bound(limit_ms: int) -> None:
        scheduler, chain = scheduler_of(service), service.state.engine.chain
        scheduler.call(lambda: setattr(scheduler, "waiting_timeout_ms", limit_ms))
        wait_until(lambda: chain.bounds_waiting == bool(limit_ms), 60, "the scheduler's report")

    return bound


def test_while_the_scheduler_bounds_waiting_streams_hold_their_headers(
    service: Service, bound_waiting: Callable[[int], None]
) -> None:
    scheduler_of(service).held = True
    bound_waiting(30_000)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, service, stream=True)
        held(service)
        end(service, status=RequestStatus.ERROR, code="waiting_timeout", message="too late")
        assert answer.result().status_code == 503


def test_once_it_no_longer_does_streams_begin_at_once_again(
    service: Service, bound_waiting: Callable[[int], None]
) -> None:
    scheduler_of(service).held = True
    bound_waiting(30_000)
    bound_waiting(0)
    with service.http.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
        assert answer.status_code == 200, "the headers are here before any token"
        end(service, status=RequestStatus.ERROR, code="waiting_timeout", message="too late")
        text = "".join(answer.iter_text())
    assert json.loads(payloads(text)[-2])["error"]["code"] == "waiting_timeout"


def test_a_stream_with_a_timeout_is_the_same_stream(service: Service) -> None:
    def texts(**fields: Any) -> list[str]:
        lines = stream_lines(service, "/v1/completions", body(n=2, max_tokens=20, **fields))
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        return ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]

    assert texts(timeout=20) == texts()


# --- resubmission -------------------------------------------------------------------------------------------------


def test_a_resubmission_is_marked_and_keeps_the_time_that_is_left(make_service: MakeService) -> None:
    service = make_service()
    scheduler_of(service).held = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, service, timeout=600)
        held(service)
        first = the_submit(service)
        scheduler_of(service).stop()
        service.scheduler = service.new_scheduler(epoch=2)
        assert answer.result().status_code == 200
    again = the_submit(service)
    assert again.id == first.id and again.resumed and not first.resumed
    assert 0 < again.timeout_ms < first.timeout_ms


# --- timelines ----------------------------------------------------------------------------------------------------


class Historian:
    """Lets the fake scheduler answer questions about requests that it knows by number or label."""

    def __init__(self, service: Service) -> None:
        self.asked: list[dict[str, str]] = []
        self.by_label: dict[str, list[str]] = {}
        self.tenants: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        self.refusal = "not_found"
        scheduler, handle = scheduler_of(service), scheduler_of(service)._handle

        def record_of(number: str) -> dict[str, Any]:
            tenant = {"tenant": self.tenants[number]} if number in self.tenants else {}
            return {"id": number, **tenant, "events": self.events}

        def answer(peer: bytes, message: object) -> None:
            if not isinstance(message, Control):
                handle(peer, message)
                return
            self.asked.append(message.arguments)
            self.tenants |= {str(submit.id): submit.tenant for submit in scheduler.record.submits}
            record: Any = None
            if message.arguments.get("id") in {str(submit.id) for submit in scheduler.record.submits}:
                record = record_of(message.arguments["id"])
            elif message.arguments.get("label") in self.by_label:
                record = {"requests": [record_of(one) for one in self.by_label[message.arguments["label"]]]}
            reply = record or {"code": self.refusal, "message": "no such request"}
            scheduler.channel.send(peer, ControlReply(message.nonce, record is not None, msgspec.json.encode(reply)))

        scheduler._handle = answer  # type: ignore[method-assign]


@pytest.fixture
def historian(make_service: MakeService) -> tuple[Service, Historian]:
    service = make_service()
    return service, Historian(service)


def timeline(service: Service, name: str) -> httpx.Response:
    return service.http.get(f"/v1/requests/{name}/timeline")


def test_a_request_is_found_by_all_of_its_names(historian: tuple[Service, Historian]) -> None:
    service, _ = historian
    answer = service.http.post("/v1/completions", json=body(), headers={"X-Request-Id": "order/66"})
    assert answer.json()["id"] == "cmpl-order/66"
    number = str(the_submit(service).id)
    for name in ("cmpl-order/66", "order/66", number):
        found = timeline(service, name)
        assert found.status_code == 200 and found.json() == {"id": number, "tenant": "", "events": []}


def test_each_choice_has_a_timeline_of_its_own(historian: tuple[Service, Historian]) -> None:
    service, _ = historian
    answer = post(service, n=3).json()
    found = timeline(service, answer["id"]).json()
    assert [one["id"] for one in found] == [str(submit.id) for submit in scheduler_of(service).record.submits]


def test_a_request_of_another_api_process_is_found_by_its_label(historian: tuple[Service, Historian]) -> None:
    service, known = historian
    known.by_label["abc"] = ["77", "78"]
    assert [one["id"] for one in timeline(service, "chatcmpl-abc").json()] == ["77", "78"]


def test_an_unknown_request_is_a_404_in_the_usual_shape(historian: tuple[Service, Historian]) -> None:
    service, known = historian
    answer = timeline(service, "chatcmpl-nobody")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "request_not_found"
    assert {"label": "nobody"} in known.asked


@pytest.mark.parametrize(("code", "status"), [("unsupported", 501), ("not_ready", 503)])
def test_a_scheduler_that_keeps_no_timelines_is_not_a_404(
    historian: tuple[Service, Historian], code: str, status: int
) -> None:
    service, known = historian
    known.refusal = code
    assert timeline(service, "x").status_code == status


@pytest.fixture
def shared(make_service: MakeService) -> Iterator[Service]:
    """A server with the keys of two tenants and an administrator's."""
    service = make_service(keys=["ada", "bob"], admin_key=("root",))
    yield service
    service.close()


def timeline_as(service: Service, key: str, name: str) -> httpx.Response:
    return httpx.get(f"{service.address}/v1/requests/{name}/timeline", headers={"Authorization": f"Bearer {key}"})


def test_timelines_need_a_key_like_all_other_routes(shared: Service) -> None:
    Historian(shared)
    assert httpx.get(f"{shared.address}/v1/requests/x/timeline").status_code == 401
    assert timeline(shared, "x").status_code == 404


def test_a_timeline_is_for_the_key_that_asked_for_the_request_and_for_administrators(shared: Service) -> None:
    Historian(shared)
    answer = post(shared)
    number = str(the_submit(shared).id)
    for name in (answer.json()["id"], number):
        assert timeline_as(shared, "ada", name).json()["id"] == number
        assert timeline_as(shared, "root", name).json()["id"] == number
        others = timeline_as(shared, "bob", name)
        assert others.status_code == 404 and others.json()["error"]["code"] == "request_not_found"


def test_a_label_that_two_tenants_use_shows_each_its_own_request(shared: Service) -> None:
    known = Historian(shared)
    known.by_label["same"] = ["77", "78"]
    known.tenants = {"77": "key-0", "78": "key-1"}
    assert timeline_as(shared, "ada", "same").json()["id"] == "77"
    assert timeline_as(shared, "bob", "same").json()["id"] == "78"
    assert [one["id"] for one in timeline_as(shared, "root", "same").json()] == ["77", "78"]


def test_a_timeline_does_not_name_the_requests_of_others(shared: Service) -> None:
    known = Historian(shared)
    known.events = [{"ms": 1.0, "event": "preempted", "by": "78", "by_label": "bob's", "computed": 9}]
    name = post(shared).json()["id"]
    assert timeline_as(shared, "ada", name).json()["events"] == [{"ms": 1.0, "event": "preempted", "computed": 9}]
    assert timeline_as(shared, "root", name).json()["events"] == known.events


def test_a_record_that_names_no_tenant_is_for_administrators_only(shared: Service) -> None:
    known = Historian(shared)
    known.by_label["foreign"] = ["77"]
    assert timeline_as(shared, "ada", "foreign").status_code == 404
    assert timeline_as(shared, "root", "foreign").status_code == 200


def test_without_a_scheduler_a_timeline_is_a_503(make_service: MakeService) -> None:
    service = make_service(scheduler=False)
    assert timeline(service, "x").status_code == 503


def test_a_refusal_while_draining_asks_to_retry(service: Service) -> None:
    scheduler_of(service).refuse = lambda submit: Rejected(submit.id, "draining", "draining", 503, 5)
    answer = post(service)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
