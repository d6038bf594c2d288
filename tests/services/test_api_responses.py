"""/v1/responses through the official client: what goes to the model, what comes back, and what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from services.errors import invalid
from services.responses.items import read_input, to_messages
from services.responses.translate import CHAT_NAMES, CHAT_WORDS
from services.schema import Message
from services.translate import rename
from tests.services.fake_scheduler import FakeScheduler, prompt_of
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service

PATH = "/v1/responses"
QUESTION = "What is the capital of France?"
WaitUntil = Callable[..., Any]


def ask(service: Service, **fields: Any) -> Any:
    return service.client.responses.create(**{"model": MODEL, "input": QUESTION, **fields})


def events_of(service: Service, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed response; the name of each is its type."""
    body = {"model": MODEL, "input": QUESTION, "stream": True, **fields}
    with service.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, response.read()
        text = "".join(response.iter_text())
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def scheduler_of(service: Service) -> FakeScheduler:
    assert service.scheduler is not None
    return service.scheduler


def prompted(service: Service, chat: list[dict[str, Any]]) -> bool:
    """Whether the last prompt is this conversation."""
    ids = service.http.post("/tokenize", json={"messages": chat}).json()["tokens"]
    return prompt_of(scheduler_of(service).record.submits[-1]) == list(ids)


def test_a_response_has_openais_shape(service: Service) -> None:
    response = ask(service, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50)
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.output_text == ANSWER
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert item.id.startswith("msg_") and response.id.startswith("resp_")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 1.0, 50)
    assert response.usage.output_tokens == len(service.answer) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert prompted(service, chat)


def test_the_events_come_in_openais_order(service: Service) -> None:
    events = events_of(service)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["item_id"] for event in events if "item_id" in event} | {events[2]["item"]["id"]}) == 1
    assert {event["output_index"] for event in events if "output_index" in event} == {0}
    text = "".join(event["delta"] for event in events[4:-4])
    last = events[-1]["response"]
    assert text == ANSWER == events[-4]["text"] == events[-3]["part"]["text"]
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == ANSWER
    first = events[0]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert {event["response"]["id"] for event in (events[0], events[1], events[-1])} == {first["id"]}


@pytest.mark.parametrize("limit", [None, 3])
def test_the_streamed_response_is_the_whole_one(service: Service, limit: int | None) -> None:
    whole = ask(service, max_output_tokens=limit)
    events = events_of(service, max_output_tokens=limit)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole.status}"
    assert last["output"][0]["content"][0]["text"] == whole.output_text
    assert last["usage"] == whole.usage.model_dump(exclude_none=True)
    kept = service.client.responses.retrieve(last["id"])
    assert json.loads(kept.model_dump_json(exclude_unset=True)) == last


def test_the_clients_own_stream_assembles_it(service: Service) -> None:
    with service.client.responses.stream(model=MODEL, input=QUESTION) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == ANSWER


def test_a_stream_that_breaks_ends_with_a_failed_response(make_service: MakeService) -> None:
    service = make_service(shutdown_grace_s=0.0)
    scheduler_of(service).tokens_allowed = 2
    kinds = []
    event: Any
    for event in service.client.responses.create(model=MODEL, input=QUESTION, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            service.request_stop()
    assert kinds[-1] == "response.failed"
    assert event.response.error.code == "shutting_down"
    service.close()


def test_a_cut_response_is_incomplete_and_says_why(service: Service) -> None:
    response = ask(service, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_an_empty_answer_is_an_item_with_an_empty_text(service: Service) -> None:
    service.answer = []
    assert ask(service).output_text == ""
    assert events_of(service)[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_items_reach_the_model_as_chat_messages(service: Service) -> None:
    ask(
        service,
        instructions="A",
        input=[
            {"role": "developer", "content": "B"},
            {"role": "user", "content": [{"type": "input_text", "text": "C"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "D"}]},
            {"role": "user", "content": "E"},
        ],
    )
    chat = [("system", "A\n\nB"), ("user", "C"), ("assistant", "D"), ("user", "E")]
    assert prompted(service, [{"role": role, "content": text} for role, text in chat])


def test_calls_and_their_outputs_become_one_assistant_message_and_tool_messages() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Graz"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city":"Linz"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12 °C"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13 °C"}]},
    ]
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "weather", "arguments": f'{{"city":"{city}"}}'}}
        for n, city in ((1, "Graz"), (2, "Linz"))
    ]
    made = to_messages(None, read_input(json_raw(items)))
    assert made == [
        Message("user", "Weather?"),
        Message("assistant", "I look.", tool_calls=calls, reasoning_content="Ask."),
        Message("tool", "12 °C", tool_call_id="c1"),
        Message("tool", "13 °C", tool_call_id="c2"),
    ]


def json_raw(value: Any) -> Any:
    return msgspec.Raw(msgspec.json.encode(value))


TOOLS = [{"type": "function", "name": "f"}]
CALLED = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input": None}, "input: required"),
        ({"input": []}, "at least one item"),
        ({"input": 5}, "input: expected"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, r"input\[0\].role: 'king'"),
        ({"input": [{"role": "user"}]}, r"input\[0\].content: required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image' are not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "needs a text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "reference"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call' are not supported"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "needs call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "needs call_id"),
        ({"input": [{"role": "user", "content": "x", "id": 5}]}, r"input\[0\]"),
        (
            {"input": [*CALLED, {"type": "function_call_output", "call_id": "z", "output": "x"}]},
            "^input: no earlier .*'z'",
        ),
        ({"tools": [{"type": "function"}]}, r"^tools\[0\].name: must"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, r"^tool_choice.name: must"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "^tool_choice: an object with mode"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "^text.format.schema: required"),
        ({"max_tokens": 5}, "the field is max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens: 0, at least 1"),
        ({"max_output_tokens": 99999}, "context .* max_output_tokens: .* make"),
        ({"n": 2}, "n other than 1"),
        ({"truncation": "middle"}, "truncation: 'middle'"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "needs store"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs: 21"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort: 'huge'"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort: must"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata: 17 entries"),
        ({"metadata": {"k": "x" * 513}}, "512 characters"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: 'xml'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"previous_response_id": "resp_1"}, None),
        ({"temperature": 9}, "temperature: 9"),
    ],
    ids=str,
)
def test_what_is_wrong_is_an_error_that_names_it(service: Service, fields: dict[str, Any], reason: str | None) -> None:
    response = service.http.post(PATH, json={"model": MODEL, "input": QUESTION, **fields})
    assert response.status_code == (400 if reason is not None else 404)
    error = response.json()["error"]
    if reason is None:
        assert error["param"] == "previous_response_id"
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(error["message"])
        assert error["param"] in {**fields, "text.format": 0, "reasoning.effort": 0}


def test_an_error_is_only_renamed_where_the_client_uses_another_name() -> None:
    error = invalid("max_tokens: 0 is too little", "max_tokens")
    rename(error, {"max_tokens": "max_output_tokens"})
    assert (error.message, error.param) == ("max_output_tokens: 0 is too little", "max_output_tokens")
    error = invalid("n: bad", "n")
    rename(error, {"max_tokens": "max_output_tokens"})
    assert (error.message, error.param) == ("n: bad", "n")


def test_what_a_client_wrote_is_quoted_as_it_is() -> None:
    error = invalid("tools[0].function.name: 'a.function.b' is no name", "tools")
    rename(error, CHAT_NAMES, CHAT_WORDS)
    assert error.message == "tools[0].name: 'a.function.b' is no name"


def test_the_asynchronous_client_streams_many_at_once(service: Service) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        async with client.responses.stream(model=MODEL, input=QUESTION) as stream:
            return (await stream.get_final_response()).output_text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(all_of_them()) == [ANSWER] * 8


def test_the_routes_of_responses_are_counted_without_their_ids(service: Service) -> None:
    id = ask(service).id
    service.http.get(f"{PATH}/{id}")
    service.http.get(f"{PATH}/{id}/input_items")
    text = service.http.get("/metrics").text
    assert id not in text
    for endpoint in (PATH, PATH + "/{id}", PATH + "/{id}/input_items"):
        assert f'endpoint="{endpoint}"' in text
