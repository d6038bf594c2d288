"""POST /v1/messages through the official client: what goes to the model, what comes back, whole and as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from protocol.messages import Rejected, Submit
from services.anthropic.schema import MessagesRequest
from services.anthropic.translate import to_chat
from services.errors import ApiError
from services.schema import ContentPart, Message, decode
from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service, raw_request

PATH = "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def client_of(service: Service, **changes: Any) -> Any:
    """The official client, without retries."""
    settings: dict[str, Any] = {"api_key": service.keys[0] if service.keys else "none", "max_retries": 0, "timeout": 20}
    return anthropic.Anthropic(base_url=service.address, **settings | changes)


def ask(service: Service, **fields: Any) -> Any:
    return client_of(service).messages.create(**{"model": MODEL, "max_tokens": 100, "messages": USER, **fields})


def events_of(service: Service, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer; the name of each is its type."""
    body = {"model": MODEL, "max_tokens": 100, "messages": USER, "stream": True, **fields}
    with service.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, response.read()
        text = "".join(response.iter_text())
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def seen(service: Service) -> str:
    """The prompt of the last request as the model sees it."""
    assert service.scheduler is not None
    return service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)


def translated(**fields: Any) -> list[Message]:
    """The chat messages that a body becomes."""
    body = {"model": MODEL, "max_tokens": 5, "messages": USER, **fields}
    request, unknown = decode(json.dumps(body).encode(), MessagesRequest)
    assert unknown == []
    return to_chat(request).messages


def test_an_answer_has_anthropics_shape(service: Service) -> None:
    message = ask(service)
    assert message.id.startswith("msg_") and (message.type, message.role) == ("message", "assistant")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": ANSWER}]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, MODEL)
    tokens = client_of(service).messages.count_tokens(model=MODEL, messages=USER).input_tokens
    assert (message.usage.input_tokens, message.usage.output_tokens) == (tokens, len(service.answer) + 1)


def test_the_events_come_in_anthropics_order(service: Service) -> None:
    events = events_of(service)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {event["index"] for event in events if "index" in event} == {0}
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == ANSWER
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}, {"stop_sequences": ["France"]}], ids=str)
def test_the_streamed_message_is_the_whole_one(service: Service, fields: dict[str, Any]) -> None:
    whole = ask(service, **fields)
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": USER, **fields}
    with client_of(service).messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == whole.content[0].text == message.content[0].text
    assert (message.stop_reason, message.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert message.usage == whole.usage


def test_tokens_from_the_cache_are_not_counted_twice(service: Service) -> None:
    assert service.scheduler is not None
    service.scheduler.cached_tokens = 16
    total = client_of(service).messages.count_tokens(model=MODEL, messages=USER).input_tokens
    usage = ask(service).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (total - 16, 16)
    assert events_of(service)[-2]["usage"] == {
        "input_tokens": total - 16,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": usage.output_tokens,
    }


def test_the_stop_sequence_that_ended_it_is_named_and_left_out(service: Service) -> None:
    message = ask(service, stop_sequences=["Rome", " France"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " France")
    assert message.content[0].text == "The capital of"


def test_an_answer_that_is_cut_says_whose_limit_it_was(service: Service) -> None:
    short = ask(service, max_tokens=2)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    service.answer = service.answer[:1] * 5000
    long = ask(service, max_tokens=100_000)
    assert long.stop_reason == "model_context_window_exceeded"
    # The pool of 64 blocks is smaller than the context; the newest token has no slot in it.
    assert long.usage.output_tokens == 64 * 16 - long.usage.input_tokens + 1


def test_an_empty_answer_has_no_blocks(service: Service) -> None:
    service.answer = []
    assert ask(service).content == []
    assert [event["type"] for event in events_of(service)] == ["message_start", "message_delta", "message_stop"]


def test_system_text_and_turns_reach_the_model_as_chat_messages(service: Service) -> None:
    ask(service, system="Be brief.", messages=[*USER, {"role": "assistant", "content": "Paris."}, *USER])
    chat = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "Paris."}, *USER]
    ids = service.http.post("/tokenize", json={"messages": chat}).json()["tokens"]
    assert service.scheduler is not None
    assert prompt_of(service.scheduler.record.submits[-1]) == ids


def test_turns_of_one_role_become_one(service: Service) -> None:
    blocks = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "c"}]
    ask(service, messages=[{"role": "user", "content": "a"}, {"role": "user", "content": blocks}])
    assert "<|im_start|>user\na\nb\nc<|im_end|>" in seen(service)


def test_a_final_assistant_turn_is_continued(service: Service) -> None:
    ask(service, messages=[*USER, {"role": "assistant", "content": "The capital"}])
    assert seen(service).endswith("<|im_start|>assistant\nThe capital")


def test_tool_use_and_results_become_calls_and_tool_messages() -> None:
    turns = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Ask the tool.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Graz"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "12 °C"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Graz"}'}}
    assert translated(messages=turns) == [
        Message("user", "Weather?"),
        Message("assistant", "I look.", tool_calls=[call], reasoning_content="Ask the tool."),
        Message("tool", "12 °C", tool_call_id="toolu_1"),
        Message("user", "And now?"),
    ]


def test_system_blocks_keep_their_parts() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert translated(system=blocks)[0] == Message("system", [ContentPart("text", "a"), ContentPart("text", "b")])
    assert translated(system=blocks[:1])[0] == Message("system", "a")


def test_sampling_fields_reach_the_scheduler(service: Service) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5}
    ask(service, metadata={"user_id": "u-1"}, extra_body=sampling)
    assert service.scheduler is not None
    submit = service.scheduler.record.submits[-1]
    assert (submit.params.temperature, submit.params.top_k, submit.params.seed) == (0.5, 7, 5)
    assert submit.params.top_p == pytest.approx(0.9)
    assert submit.tenant == "u-1"


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
TURNS = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "zz", "content": "x"}]},
]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": None}, "max_tokens: required"),
        ({"max_tokens": 0}, "max_tokens: 0, at least 1"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\].role: 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, r"content\[0\]: a tool_use .* assistant"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "a tool_result .* user"),
        ({"messages": [*USER, *TURNS]}, "messages: no earlier call has the id 'zz'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, r"content\[0\]: parts of type 'image' .* only text$"),
        ({"messages": ...}, "messages: required"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: this feature is not supported"),
        ({"container": "x"}, "container: this feature is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id: required"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "id, name and input"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text: required"),
        ({"messages": 5}, "messages: Expected"),
        ({"system": [{"type": "image"}]}, r"system\[0\]"),
        ({"stop_sequences": [""]}, "stop_sequences: a stop string can't be empty"),
        ({"stop_sequences": ["a"], "stop": "b"}, "excludes stop"),
        ({"temperature": 9}, "temperature: 9"),
        ({"n": 2}, "n other than 1"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_format": {"type": "xml"}}, "output_config.format"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "a"}]},
            r"^tools\[0\]: a tool of type 'web_search_20250305'",
        ),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, r"^tools\[0\].input_schema: must"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"^tools\[0\].name: must"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, r"^tool_choice.name: must"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_400_that_names_it(
    service: Service, fields: dict[str, Any], reason: str, stream: bool
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": USER, "stream": stream, **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    response = service.http.post(PATH, json=body)
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(error["error"]["message"])


def test_errors_have_anthropics_types_and_the_requests_id(service: Service) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(service, model="nope")
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id is not None
    body: Any = missing.value.body
    assert body["request_id"] == missing.value.request_id == missing.value.response.headers["x-request-id"]
    for method, path, status in (("GET", PATH, 405), ("POST", PATH + "/batches", 404)):
        response = service.http.request(method, path)
        assert (response.status_code, response.json()["type"]) == (status, "error")
    assert service.http.get("/v1/nope").json()["error"]["code"] == "route_not_found"


def test_a_prompt_that_is_too_long_is_called_so_by_anthropics_words(service: Service) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .* 2048 tokens"):
        ask(service, messages=[{"role": "user", "content": "word " * 3000}])


def test_a_client_that_would_keep_its_conversation_here_sends_all_of_it_instead(service: Service) -> None:
    """Were `thread` ignored, it would send only what is new in the second turn."""

    @anthropic.beta_tool
    def look(city: str) -> str:
        """Look a city up."""
        return city

    messages = client_of(service).beta.messages
    runner = messages.tool_runner(model=MODEL, max_tokens=100, messages=USER, tools=[look])
    assert runner.until_done().content[0].text == ANSWER
    assert "What is the capital of France?" in seen(service)
    with pytest.raises(anthropic.BadRequestError, match="thread: no conversation is kept here"):
        messages.create(model=MODEL, max_tokens=100, messages=USER, thread={"type": "create"})


def test_a_client_may_name_its_request(service: Service) -> None:
    message = ask(service, extra_headers={"X-Request-Id": "mine-1"})
    assert (message.id, message._request_id) == ("msg_mine-1", "mine-1")


@pytest.fixture(scope="module")
def locked(make_service: MakeService) -> Iterator[Service]:
    service = make_service(keys=["sk-one", "sk-two"])
    yield service
    service.close()


def test_the_key_comes_in_x_api_key_or_as_a_bearer_token(locked: Service) -> None:
    assert locked.scheduler is not None
    for key, tenant in (("sk-one", "key-0"), ("sk-two", "key-1")):
        arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": USER}
        client_of(locked, api_key=key).messages.create(**arguments)
        client_of(locked, api_key=None, auth_token=key).messages.create(**arguments)
        assert [submit.tenant for submit in locked.scheduler.record.submits[-2:]] == [tenant, tenant]
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client_of(locked, api_key="sk-three").messages.create(**arguments)
    assert refused.value.type == "authentication_error"


def test_two_keys_in_one_request_are_a_401(locked: Service) -> None:
    twice = [(b"x-api-key", b"sk-one"), (b"x-api-key", b"sk-one")]
    assert raw_request(locked, "GET", "/v1/models", twice)[0] == 401
    assert raw_request(locked, "GET", "/v1/models", twice[:1])[0] == 200
    wrong = (b"Authorization", b"Bearer wrong")
    assert raw_request(locked, "GET", "/v1/models", [wrong, twice[0]])[0] == 401


@pytest.mark.parametrize(("code", "status"), [("queue_full", 529), ("displaced", 529), ("draining", 503)])
def test_a_full_queue_is_a_529_and_a_server_that_cannot_serve_a_503(service: Service, code: str, status: int) -> None:
    assert service.scheduler is not None

    def refuse(submit: Submit) -> Rejected:
        return Rejected(submit.id, code, "no", 503, 1)

    service.scheduler.refuse = refuse
    with pytest.raises(anthropic.InternalServerError) as refused:
        ask(service)
    assert refused.value.status_code == status
    assert refused.value.type == ("overloaded_error" if status == 529 else "api_error")
    assert refused.value.response.headers["retry-after"] == "1"


def test_what_a_full_queue_would_refuse_is_refused_before_it_is_tokenized(service: Service) -> None:
    assert service.scheduler is not None
    service.scheduler.report(queue_limit=1, queued=200)
    before = service.state.metrics.value("turned_away_total")
    response = service.http.post(PATH, json={"model": MODEL, "max_tokens": 5, "messages": USER})
    assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")
    assert service.scheduler.record.submits == []
    assert service.state.metrics.value("turned_away_total") == before + 1


def test_a_stream_that_breaks_ends_with_one_error_event(make_service: MakeService) -> None:
    service = make_service(shutdown_grace_s=0.0)
    assert service.scheduler is not None
    service.scheduler.tokens_allowed = 2
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": USER}
    with client_of(service).messages.stream(**arguments) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
        service.request_stop()
        with pytest.raises(anthropic.APIStatusError) as broken:
            for _ in stream:
                pass
    assert broken.value.type == "api_error"
    service.close()


def test_silence_is_filled_with_ping_events(make_service: MakeService) -> None:
    service = make_service(sse_ping_s=0.2)
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.held = True
    body = {"model": MODEL, "max_tokens": 5, "messages": USER, "stream": True}
    with service.http.stream("POST", PATH, json=body) as response:
        parts, text = response.iter_text(), ""
        while text.count('event: ping\ndata: {"type":"ping"}\n\n') < 2:
            text += next(parts)
        assert text.startswith("event: message_start\n")
        scheduler.call(lambda: setattr(scheduler, "held", False))
        text += "".join(parts)
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    service.close()


def test_the_asynchronous_client_streams_many_at_once(service: Service) -> None:
    async def one(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(model=MODEL, max_tokens=100, messages=USER) as stream:
            return "".join([text async for text in stream.text_stream])

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=service.address, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(all_of_them()) == [ANSWER] * 8


def test_counting_tokens_asks_nobody(make_service: MakeService) -> None:
    service = make_service(scheduler=False)
    count = client_of(service).messages.count_tokens(model=MODEL, messages=USER, system="Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, *USER]
    assert count.input_tokens == service.http.post("/tokenize", json={"messages": chat}).json()["count"]
    service.close()


def test_a_missing_limit_is_only_an_error_where_something_is_generated() -> None:
    request, _ = decode(json.dumps({"messages": USER}).encode(), MessagesRequest)
    with pytest.raises(ApiError, match="max_tokens: required"):
        to_chat(request)


def test_a_timeline_is_found_by_the_messages_id(service: Service) -> None:
    message = ask(service)
    assert service.state.engine.recent.ids(message.id.removeprefix("msg_"))


def test_a_strict_tool_keeps_its_schema(service: Service) -> None:
    assert service.scheduler is not None
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    for strict, kept in ((True, True), (False, False)):
        ask(service, tools=[{"name": "weather", "input_schema": schema, "strict": strict}])
        assert ('"city"' in service.scheduler.record.submits[-1].params.grammar) is kept


def test_hints_of_anthropics_clients_change_nothing(service: Service) -> None:
    before = service.state.metrics.unknown_fields._value.get()
    fields = {"cache_control": {"type": "ephemeral"}, "context_management": {"edits": []}, "service_tier": "auto"}
    ask(service, extra_body={**fields, "betas": ["x"], "mcp_servers": [], "container": None})
    assert service.state.metrics.unknown_fields._value.get() == before


def test_counting_names_what_is_wrong_in_the_same_words(service: Service) -> None:
    body = {"model": MODEL, "messages": USER, "tools": [{"name": "f", "input_schema": {"type": "array"}}]}
    answer = service.http.post(f"{PATH}/count_tokens", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("tools[0].input_schema: ")
