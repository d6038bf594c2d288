"""Calls, thoughts and forms of an answer on /v1/messages and /v1/responses, through the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from protocol.messages import SamplingParams
from services.anthropic.formats import MessagesFormat
from services.choice import Piece
from services.tools.calls import CallDelta
from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import MODEL, MakeService, Service

QUESTION = "Which weather is it in Graz and in Linz?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'
ONE = "I look.\n" + CALL.format("Graz")
TWO = CALL.format("Graz") + "\n" + CALL.format("Linz")
CUT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Gra'
THOUGHTS = "<think>\nStyria first.\n</think>\n\nSunny."

BLOCK_TOOLS = [{"name": "weather", "description": "Looks.", "input_schema": SCHEMA}]
ITEM_TOOLS = [{"type": "function", "name": "weather", "description": "Looks.", "parameters": SCHEMA, "strict": False}]


class Blocks:
    """The Messages API: an answer's blocks without their ids, whole and streamed."""

    def __init__(self, service: Service, **fields: Any) -> None:
        client = anthropic.Anthropic(base_url=service.address, api_key="none", max_retries=0, timeout=20)
        user = [{"role": "user", "content": QUESTION}]
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": user, **fields}
        self.whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            self.events = list(stream)
            self.streamed = stream.get_final_message()

    @staticmethod
    def short(message: Any) -> list[Any]:
        """Each block as its type and what it says."""
        found: list[Any] = []
        for block in message.content:
            if block.type == "tool_use":
                found.append(("tool_use", block.name, block.input))
            else:
                found.append((block.type, block.text if block.type == "text" else block.thinking))
        return found


class Items:
    """The Responses API: an answer's items without their ids, whole and streamed."""

    def __init__(self, service: Service, **fields: Any) -> None:
        asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, **fields}
        self.whole = service.client.responses.create(**asked)
        self.events = list(service.client.responses.create(stream=True, **asked))
        last: Any = self.events[-1]
        self.streamed = last.response

    @staticmethod
    def short(response: Any) -> list[Any]:
        """Each item as its type and what it says."""
        found: list[Any] = []
        for item in response.output:
            if item.type == "function_call":
                found.append(("function_call", item.name, item.arguments))
            else:
                found.append((item.type, item.content[0].text))
        return found


def last_params(service: Service) -> SamplingParams:
    assert service.scheduler is not None
    return service.scheduler.record.submits[-1].params


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        (ONE, [("text", "I look."), ("tool_use", "weather", {"city": "Graz"})]),
        (TWO, [("tool_use", "weather", {"city": "Graz"}), ("tool_use", "weather", {"city": "Linz"})]),
        ("Sunny.", [("text", "Sunny.")]),
    ],
    ids=["one", "two", "none"],
)
def test_calls_are_blocks_of_their_own(service: Service, text: str, blocks: list[Any]) -> None:
    service.say(text)
    answer = Blocks(service, tools=BLOCK_TOOLS)
    assert Blocks.short(answer.whole) == Blocks.short(answer.streamed) == blocks
    reason = "tool_use" if blocks[-1][0] == "tool_use" else "end_turn"
    assert answer.whole.stop_reason == answer.streamed.stop_reason == reason
    starts = [event.index for event in answer.events if event.type == "content_block_start"]
    stops = [event.index for event in answer.events if event.type == "content_block_stop"]
    assert starts == stops == list(range(len(blocks)))
    ids = {block.id for block in answer.whole.content if block.type == "tool_use"}
    assert len(ids) == sum(block[0] == "tool_use" for block in blocks)


def test_calls_are_items_of_their_own(service: Service) -> None:
    service.say(ONE)
    answer = Items(service, tools=ITEM_TOOLS)
    items = Items.short(answer.whole)
    assert items == Items.short(answer.streamed)
    assert [item[:2] for item in items] == [("message", "I look."), ("function_call", "weather")]
    assert json.loads(items[1][2]) == {"city": "Graz"}
    assert answer.whole.status == answer.streamed.status == "completed"
    kinds = [event.type.removeprefix("response.") for event in answer.events]
    calls = [kind for kind in kinds if "arguments" in kind]
    assert calls == ["function_call_arguments.delta"] * (len(calls) - 1) + ["function_call_arguments.done"]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 2
    assert [event.sequence_number for event in answer.events] == list(range(len(answer.events)))
    said = "".join(e.delta for e in answer.events if e.type == "response.function_call_arguments.delta")
    assert said == items[1][2]
    assert [e.output_index for e in answer.events if e.type == "response.output_item.done"] == [0, 1]


def test_two_calls_are_two_items(service: Service) -> None:
    service.say(TWO)
    answer = Items(service, tools=ITEM_TOOLS)
    assert Items.short(answer.whole) == Items.short(answer.streamed)
    assert [json.loads(item[2])["city"] for item in Items.short(answer.whole)] == ["Graz", "Linz"]
    assert len({item.call_id for item in answer.whole.output}) == 2


def test_a_cut_call_is_not_passed_off_as_a_complete_one(service: Service) -> None:
    service.say(CUT)
    limit = len(service.answer)
    blocks = Blocks(service, tools=BLOCK_TOOLS, max_tokens=limit)
    assert blocks.whole.stop_reason == blocks.streamed.stop_reason == "max_tokens"
    items = Items(service, tools=ITEM_TOOLS, max_output_tokens=limit)
    assert items.whole.status == items.streamed.status == "incomplete"
    assert items.whole.output[-1].status == items.streamed.output[-1].status == "incomplete"
    assert Items.short(items.whole) == Items.short(items.streamed)


def test_results_of_calls_reach_the_model_the_same_way_on_all_routes(service: Service) -> None:
    service.say("Sunny.")
    call = {"id": "call1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Graz"}'}}
    function = {"name": "weather", "description": "Looks.", "parameters": SCHEMA}
    service.http.post(
        "/v1/chat/completions",
        json={
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": "I look.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call1", "content": "12 °C"},
            ],
            "tools": [{"type": "function", "function": function}],
        },
    ).raise_for_status()
    use = {"type": "tool_use", "id": "call1", "name": "weather", "input": {"city": "Graz"}}
    Blocks(
        service,
        tools=BLOCK_TOOLS,
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call1", "content": "12 °C"}]},
        ],
    )
    tools = [{key: value for key, value in ITEM_TOOLS[0].items() if key != "strict"}]
    Items(
        service,
        tools=tools,
        input=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "call1", "name": "weather", "arguments": '{"city":"Graz"}'},
            {"type": "function_call_output", "call_id": "call1", "output": "12 °C"},
        ],
    )
    assert service.scheduler is not None
    prompts = [prompt_of(submit) for submit in service.scheduler.record.submits]
    assert len(prompts) == 5
    assert prompts == prompts[:1] * 5


def test_a_conversation_with_calls_goes_on_after_a_kept_response(service: Service) -> None:
    service.say(ONE)
    responses: Any = service.client.responses
    first = responses.create(model=MODEL, input=QUESTION, tools=ITEM_TOOLS)
    service.say("Sunny.")
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "12 °C"}
    arguments: dict[str, Any] = {"input": [output], "previous_response_id": first.id, "tools": ITEM_TOOLS}
    assert responses.create(model=MODEL, **arguments).output_text == "Sunny."
    assert service.scheduler is not None
    seen = service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)
    assert '"city": "Graz"' in seen and "12 °C" in seen


def test_tool_choices_mean_the_same_as_in_chat(service: Service) -> None:
    service.say(ONE)
    chosen: list[tuple[Any, Any]] = [
        ({"type": "tool", "name": "weather"}, {"type": "function", "name": "weather"}),
        ({"type": "any"}, "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
    ]
    grammars = []
    for blocks, items in chosen:
        Blocks(service, tools=BLOCK_TOOLS, tool_choice=blocks)
        first = last_params(service).grammar
        Items(service, tools=ITEM_TOOLS, tool_choice=items)
        assert last_params(service).grammar == first
        grammars.append(first)
    assert [bool(grammar) for grammar in grammars] == [True, True, False, False]


def test_only_one_call_where_one_is_asked_for(service: Service) -> None:
    service.say(TWO)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(Blocks(service, tools=BLOCK_TOOLS, tool_choice=choice).whole.content) == 1
    assert len(Items(service, tools=ITEM_TOOLS, parallel_tool_calls=False).whole.output) == 1


def test_tools_count_as_input_tokens(service: Service) -> None:
    service.say("Sunny.")
    client: Any = anthropic.Anthropic(base_url=service.address, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    counted = client.messages.count_tokens(**asked, tools=BLOCK_TOOLS)
    assert counted.input_tokens == Blocks(service, tools=BLOCK_TOOLS).whole.usage.input_tokens
    assert counted.input_tokens > client.messages.count_tokens(**asked).input_tokens


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "nope"}}),
        ("/v1/messages", {"tool_choice": {"type": "some"}}),
        ("/v1/messages", {"tools": [{"name": "with blanks", "input_schema": SCHEMA}]}),
        ("/v1/responses", {"tool_choice": {"type": "function", "name": "nope"}}),
        ("/v1/responses", {"tool_choice": {"type": "mcp"}}),
        ("/v1/responses", {"tools": [{"type": "function"}]}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ],
    ids=str,
)
def test_wrong_tools_and_forms_are_a_400(service: Service, path: str, fields: dict[str, Any]) -> None:
    base: dict[str, Any] = {"model": MODEL, "tools": BLOCK_TOOLS if path == "/v1/messages" else ITEM_TOOLS}
    base |= {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} if path == "/v1/messages" else {}
    base |= {"input": "x"} if path == "/v1/responses" else {}
    response = service.http.post(path, json={**base, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_form_of_an_answer_is_kept(service: Service) -> None:
    service.say('{"city": "Graz"}')
    Blocks(service, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    blocks = last_params(service).grammar
    Items(service, text={"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}})
    assert blocks and last_params(service).grammar == blocks
    Items(service, text={"format": {"type": "json_object"}})
    assert last_params(service).grammar not in ("", blocks)
    Items(service, text={"format": {"type": "text"}, "verbosity": "low"})
    assert last_params(service).grammar == ""


@pytest.fixture(scope="module")
def thinker(make_service: MakeService) -> Iterator[Service]:
    """A model that writes its thoughts as Qwen3 does."""
    service = make_service(reasoning_parser="qwen3")
    service.say(THOUGHTS)
    yield service
    service.close()


def test_thoughts_are_a_block_for_who_asks_for_them(thinker: Service) -> None:
    answer = Blocks(thinker, thinking={"type": "enabled", "budget_tokens": 1024})
    assert Blocks.short(answer.whole) == Blocks.short(answer.streamed)
    assert [block[0] for block in Blocks.short(answer.whole)] == ["thinking", "text"]
    assert "Styria first." in answer.whole.content[0].thinking
    assert answer.whole.content[1].text.strip() == "Sunny."
    assert answer.whole.usage.output_tokens_details.thinking_tokens > 0
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        answer = Blocks(thinker, **fields)
        assert [block[0] for block in Blocks.short(answer.whole)] == ["text"]
        assert Blocks.short(answer.whole) == Blocks.short(answer.streamed)


def test_thoughts_are_an_item(thinker: Service) -> None:
    answer = Items(thinker)
    assert Items.short(answer.whole) == Items.short(answer.streamed)
    assert [item[0] for item in Items.short(answer.whole)] == ["reasoning", "message"]
    assert "Styria first." in Items.short(answer.whole)[0][1]
    assert answer.whole.output_text.strip() == "Sunny."
    assert answer.whole.usage.output_tokens_details.reasoning_tokens > 0
    kinds = [event.type for event in answer.events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


def test_the_rest_of_a_call_comes_before_text_that_follows_it() -> None:
    pieces = [
        Piece(calls=[CallDelta(0, "call1", "weather", '{"city":')]),
        Piece(text="Done.", calls=[CallDelta(0, arguments='"Graz"}'), CallDelta(1, "call2", "weather", "{}")]),
        Piece(finish_reason="tool_calls"),
    ]
    blocks = MessagesFormat(MODEL, "id", 5, cut=False)
    made = b"".join(blocks.chunk(0, piece) for piece in pieces).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in made.splitlines() if line.startswith("data: ")]
    deltas = [(event["index"], *event["delta"].values()) for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, "input_json_delta", '{"city":'),
        (0, "input_json_delta", '"Graz"}'),
        (1, "text_delta", "Done."),
        (2, "input_json_delta", "{}"),
    ]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["tool_use", "text", "tool_use"]


def test_the_clients_own_helpers_read_forms_and_run_tools(service: Service) -> None:
    class Place(BaseModel):
        city: str

    client: Any = anthropic.Anthropic(base_url=service.address, api_key="none", max_retries=0)
    user = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": user}
    service.say('{"city": "Graz"}')
    assert client.messages.parse(**asked, output_format=Place).parsed_output == Place(city="Graz")
    assert last_params(service).grammar
    responses: Any = service.client.responses
    assert responses.parse(model=MODEL, input=QUESTION, text_format=Place).output_parsed == Place(city="Graz")
    looked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Looks."""
        looked.append(city)
        service.say("Sunny.")
        return "12 °C"

    for stream in (False, True):
        service.say(ONE)
        *_, last = client.beta.messages.tool_runner(**asked, tools=[weather], stream=stream)
        message = last.get_final_message() if stream else last
        assert (message.content[0].text, looked.pop()) == ("Sunny.", "Graz")
