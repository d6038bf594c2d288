"""Responses that are kept: continued, listed, cancelled, deleted, and run without their client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from protocol.messages import Rejected
from tests.services.fake_scheduler import FakeScheduler, prompt_of
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service

PATH = "/v1/responses"
QUESTION = "What is the capital of France?"
WaitUntil = Callable[..., Any]


def ask(service: Service, **fields: Any) -> Any:
    return service.client.responses.create(**{"model": MODEL, "input": QUESTION, **fields})


def scheduler_of(service: Service) -> FakeScheduler:
    assert service.scheduler is not None
    return service.scheduler


def prompted(service: Service, chat: list[dict[str, Any]]) -> bool:
    """Whether the last prompt is this conversation."""
    ids = service.http.post("/tokenize", json={"messages": chat}).json()["tokens"]
    return prompt_of(scheduler_of(service).record.submits[-1]) == list(ids)


def test_a_conversation_goes_on_after_a_kept_response(service: Service) -> None:
    first = ask(service, instructions="Be brief.")
    second = ask(service, input="Are you sure?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    chat = [("user", QUESTION), ("assistant", ANSWER), ("user", "Are you sure?")]
    assert prompted(service, [{"role": role, "content": text} for role, text in chat])
    ask(service, input="Really?", previous_response_id=second.id, instructions="Swear.")
    chat = [("system", "Swear."), *chat, ("assistant", ANSWER), ("user", "Really?")]
    assert prompted(service, [{"role": role, "content": text} for role, text in chat])


def test_the_input_items_are_listed_in_pages(service: Service) -> None:
    first = ask(service)
    second = ask(service, input="And Austria's?", previous_response_id=first.id)
    client: Any = service.client.responses.input_items
    texts = [item.content[0].text for item in client.list(second.id, order="asc")]
    assert texts == [QUESTION, ANSWER, "And Austria's?"]
    page = client.list(second.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["And Austria's?", ANSWER]
    assert page.has_more
    assert [item.content[0].text for item in page] == texts[::-1]
    limits = ("0", "x", "101", "000000001999", "000000001" + "9" * 5000)
    for query in (*(f"limit={limit}" for limit in limits), "order=up", "after=msg_1"):
        assert service.http.get(f"{PATH}/{second.id}/input_items?{query}").status_code == 400


def test_a_deleted_response_is_gone(service: Service) -> None:
    response = ask(service)
    assert service.client.responses.retrieve(response.id).output_text == ANSWER
    answer = service.http.delete(f"{PATH}/{response.id}")
    assert answer.json() == {"id": response.id, "object": "response", "deleted": True}
    for method in (service.http.get, service.http.delete):
        answer = method(f"{PATH}/{response.id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert service.http.post(f"{PATH}/{response.id}/cancel").status_code == 404
    with pytest.raises(openai.NotFoundError):
        ask(service, previous_response_id=response.id)


@pytest.mark.parametrize("id", ["x", "resp_", "resp_zz12", "resp_09abcdef", "resp_" + "0" * 5000])
def test_an_id_that_nobody_made_is_a_404(service: Service, id: str) -> None:
    assert service.http.get(f"{PATH}/{id}").status_code == 404


def test_what_is_not_to_be_stored_is_not_kept(service: Service) -> None:
    response = ask(service, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        service.client.responses.retrieve(response.id)


def test_the_metrics_say_how_much_is_kept(make_service: MakeService) -> None:
    service = make_service()
    metrics = service.state.metrics
    assert (metrics.value("kept_responses"), metrics.value("kept_responses_bytes")) == (0, 0)
    ask(service)
    assert metrics.value("kept_responses") == 1
    assert metrics.value("kept_responses_bytes") > 100
    service.close()


def test_an_old_response_is_forgotten(make_service: MakeService, wait_until: WaitUntil) -> None:
    service = make_service(responses_max_age_s=0.5)
    id = ask(service).id
    wait_until(lambda: service.state.metrics.value("kept_responses") == 0, 60, "its end")
    assert service.http.get(f"{PATH}/{id}").status_code == 404
    service.close()


def test_a_server_that_keeps_nothing_says_so(make_service: MakeService) -> None:
    service = make_service(responses_max_count=0)
    response = ask(service)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        service.client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        ask(service, background=True)
    service.close()


def test_a_background_response_runs_without_its_client(service: Service, wait_until: WaitUntil) -> None:
    scheduler = scheduler_of(service)
    scheduler.tokens_allowed = 2
    response = ask(service, background=True)
    assert (response.status, response.output, response.background) == ("in_progress", [], True)
    assert service.client.responses.retrieve(response.id).status == "in_progress"
    scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 1000))
    wait_until(lambda: service.client.responses.retrieve(response.id).status == "completed", 60, "its end")
    assert service.client.responses.retrieve(response.id).output_text == ANSWER
    assert service.client.responses.cancel(response.id).status == "completed"


def test_a_background_response_survives_a_scheduler(make_service: MakeService, wait_until: WaitUntil) -> None:
    service = make_service()
    scheduler = scheduler_of(service)
    scheduler.tokens_allowed = 2
    id = ask(service, background=True).id
    scheduler.wait_for(lambda: [live.count for live in scheduler.live.values()] == [2], "two tokens")
    scheduler.stop()
    service.scheduler = service.new_scheduler(epoch=2)
    wait_until(lambda: service.client.responses.retrieve(id).status == "completed", 60, "its end")
    assert service.client.responses.retrieve(id).output_text == ANSWER
    service.close()


def test_a_background_response_has_failed_when_the_server_stops(make_service: MakeService) -> None:
    service = make_service(shutdown_grace_s=0.0)
    scheduler_of(service).tokens_allowed = 2
    id = ask(service, background=True).id
    service.close()
    response = service.state.responses.store.get(id, None)
    assert response is not None and response.error is not None
    assert (response.status, response.error["code"]) == ("failed", "shutting_down")


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_background_response_that_is_cancelled_is_aborted(service: Service, how: str) -> None:
    scheduler = scheduler_of(service)
    scheduler.tokens_allowed = 2
    response = ask(service, background=True)
    scheduler.wait_for(lambda: len(scheduler.live) == 1, "the submit")
    if how == "cancel":
        assert service.client.responses.cancel(response.id).status == "cancelled"
    else:
        service.client.responses.delete(response.id)
    scheduler.wait_for(lambda: not scheduler.live and len(scheduler.record.aborted) == 1, "the abort")
    if how == "cancel":
        assert service.client.responses.retrieve(response.id).status == "cancelled"
        assert service.client.responses.cancel(response.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="that response is cancelled"):
            ask(service, previous_response_id=response.id)
    assert service.state.engine.num_live() == 0


def test_a_foreground_response_cannot_be_cancelled(service: Service) -> None:
    with pytest.raises(openai.BadRequestError, match="created with background"):
        service.client.responses.cancel(ask(service).id)


def test_only_so_many_run_in_the_background(make_service: MakeService) -> None:
    service = make_service(responses_background_max=2, shutdown_grace_s=0.0)
    scheduler = scheduler_of(service)
    scheduler.tokens_allowed = 1
    running = [ask(service, background=True).id for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as refused:
        ask(service, background=True)
    assert refused.value.code == "background_full"
    assert refused.value.response.headers["retry-after"] == "1"
    service.client.responses.cancel(running[0])
    scheduler.wait_for(lambda: len(scheduler.live) == 1, "the abort")
    assert ask(service, background=True).status == "in_progress"
    service.close()


def test_a_refused_request_leaves_nothing_behind(service: Service) -> None:
    before = len(service.state.responses.store)
    scheduler_of(service).refuse = lambda submit: Rejected(submit.id, "queue_full", "full", 503, 1)
    for fields in ({}, {"background": True}, {"stream": True}):
        with pytest.raises(openai.InternalServerError):
            ask(service, **fields)
    assert len(service.state.responses.store) == before


def test_a_stream_whose_client_left_is_kept_as_cancelled(service: Service, wait_until: WaitUntil) -> None:
    scheduler_of(service).tokens_allowed = 2
    with service.client.responses.create(model=MODEL, input=QUESTION, stream=True) as stream:
        first: Any = next(iter(stream))
        id = first.response.id
        assert service.client.responses.retrieve(id).status == "in_progress"
    wait_until(lambda: service.client.responses.retrieve(id).status == "cancelled", 60, "the abort")


@pytest.fixture(scope="module")
def locked(make_service: MakeService) -> Iterator[Service]:
    service = make_service(keys=["sk-one", "sk-two"], admin_key=("sk-admin",))
    yield service
    service.close()


def test_a_response_is_its_keys_own(locked: Service) -> None:
    id = ask(locked).id
    for key, status in (("sk-one", 200), ("sk-two", 404), ("sk-admin", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert locked.http.get(f"{PATH}/{id}", headers=headers).status_code == status
        assert locked.http.get(f"{PATH}/{id}/input_items", headers=headers).status_code == status
        body = {"model": MODEL, "input": "x", "previous_response_id": id}
        assert locked.http.post(PATH, json=body, headers=headers).status_code == status
    other = {"Authorization": "Bearer sk-two"}
    assert locked.http.delete(f"{PATH}/{id}", headers=other).status_code == 404
    assert locked.http.post(f"{PATH}/{id}/cancel", headers=other).status_code == 404
    assert locked.http.get(f"{PATH}/{id}").status_code == 200
