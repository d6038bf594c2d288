"""LiteLLM, through its providers for OpenAI's API, for vLLM and for Anthropic's."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from place import MODEL, PARIS, QUESTION, USER, Place, full, full_until_refused, wait_until

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network at import
litellm = pytest.importorskip("litellm")

CLIENTS = ("litellm",)
PROVIDERS = ("openai", "hosted_vllm")
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WRONG_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def asked(place: Place, provider: str = "openai", **changes: Any) -> dict[str, Any]:
    """Arguments of `completion` for the question that has one answer."""
    base = place.root if provider == "anthropic" else place.base
    fields: dict[str, Any] = {"messages": USER, "temperature": 0, "max_tokens": 40, "num_retries": 0, "max_retries": 0}
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": place.key, **fields, **changes}


@pytest.mark.parametrize("provider", [*PROVIDERS, "anthropic"])
def test_completion_answers_with_text_finish_reason_and_usage(server: Place, provider: str) -> None:
    answer = litellm.completion(**asked(server, provider))
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8 and answer.usage.total_tokens == answer.usage.prompt_tokens + 8


@pytest.mark.parametrize("provider", [*PROVIDERS, "anthropic"])
def test_a_stream_joins_to_the_whole_answer_with_usage_at_its_end(server: Place, provider: str) -> None:
    chunks = list(litellm.completion(**asked(server, provider), stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=USER)
    assert built.choices[0].message.content == PARIS and built.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == 8
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 3


def test_acompletion_whole_and_streamed_many_at_once(server: Place) -> None:
    async def streamed() -> str:
        stream = await litellm.acompletion(**asked(server), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        whole = [litellm.acompletion(**asked(server)) for _ in range(4)]
        streams = await asyncio.gather(*[streamed() for _ in range(4)])
        return streams + [answer.choices[0].message.content for answer in await asyncio.gather(*whole)]

    assert asyncio.run(all_of_them()) == [PARIS] * 8


def test_text_completion_takes_text_a_list_and_token_ids(server: Place) -> None:
    fields: dict[str, Any] = {"api_base": server.base, "api_key": "none", "max_tokens": 3, "temperature": 0}
    one = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="The sea is", **fields)
    assert one.choices[0].text and one.usage.completion_tokens == 3
    two = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=["The sea is", "A b c"], **fields)
    assert two.choices[0].text == one.choices[0].text and len(two.choices) == 2
    ids = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=[504, 3121, 314], **fields)
    assert ids.usage.prompt_tokens == 3


@pytest.mark.parametrize("provider", [*PROVIDERS, "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_and_its_result_is_taken(server: Place, provider: str, stream: bool) -> None:
    fields = asked(server, provider, tools=[WEATHER], tool_choice="required", max_tokens=100)
    answer = litellm.completion(**fields, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=USER)
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in CITIES
    history = [*USER, message.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": each.id, "content": "sunny"} for each in message.tool_calls]
    next_answer = litellm.completion(**asked(server, provider, messages=history, tools=[WEATHER], tool_choice="none"))
    assert next_answer.choices[0].message.content


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_named_tool_and_parallel_calls_are_understood(server: Place, provider: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = asked(server, provider, tools=[WEATHER], tool_choice=named, parallel_tool_calls=False, max_tokens=100)
    (call,) = litellm.completion(**fields).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES


@pytest.mark.parametrize("provider", [*PROVIDERS, "anthropic"])
def test_a_json_schema_is_kept(server: Place, provider: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = litellm.completion(**asked(server, provider, response_format=form, max_tokens=200))
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99


@pytest.mark.parametrize("provider", PROVIDERS)
def test_logprobs_n_stop_and_seed_reach_the_model(server: Place, provider: str) -> None:
    answer = litellm.completion(**asked(server, provider, logprobs=True, top_logprobs=3, stop=["Paris"]))
    choice = answer.choices[0]
    assert choice.message.content == PARIS.partition("Paris")[0]
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    drawn = [litellm.completion(**asked(server, provider, temperature=1.5, seed=5, n=2)) for _ in range(2)]
    texts = [[each.message.content for each in one.choices] for one in drawn]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_the_responses_api_whole_and_streamed(server: Place) -> None:
    fields = {"model": f"openai/{MODEL}", "api_base": server.base, "api_key": "none", "temperature": 0}
    answer = litellm.responses(input=QUESTION, **fields)
    assert answer.output[0].content[0].text == PARIS
    events = list(litellm.responses(input=QUESTION, stream=True, **fields))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == PARIS
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"top_p": 7}, "BadRequestError"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "ContextWindowExceededError"),
        ({"model": "{provider}/absent"}, "NotFoundError"),
        ({"response_format": WRONG_FORM}, "BadRequestError"),
    ],
    ids=["a-wrong-value", "a-prompt-that-is-too-long", "no-such-model", "a-wrong-schema"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_error_is_the_exception_that_stands_for_it(
    server: Place, provider: str, stream: bool, changes: dict[str, Any], error: str
) -> None:
    fields = asked(server, provider, **changes)
    fields["model"] = fields["model"].format(provider=provider)
    with pytest.raises(getattr(litellm, error)) as raised:
        list(litellm.completion(**fields, stream=stream))
    assert type(raised.value).__name__ == error


@pytest.mark.parametrize("provider", [*PROVIDERS, "anthropic"])
def test_a_wrong_key_is_an_authentication_error(narrow: Place, provider: str) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked(narrow, provider, api_key="wrong"))


@pytest.mark.parametrize(
    ("provider", "errors"),
    [
        ("openai", "ServiceUnavailableError"),
        ("hosted_vllm", "ServiceUnavailableError"),
        ("anthropic", "InternalServerError"),
    ],
)
def test_a_full_queue_is_an_error_that_asks_to_come_back(narrow: Place, provider: str, errors: str) -> None:
    with full(narrow), pytest.raises(getattr(litellm, errors)):
        litellm.completion(**asked(narrow, provider))


def test_retries_bridge_a_full_queue(narrow: Place) -> None:
    with full_until_refused(narrow):
        answer = litellm.completion(**asked(narrow, num_retries=5, max_retries=None))
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_router_comes_back_to_a_full_queue(narrow: Place, provider: str) -> None:
    there = {"model": f"{provider}/{MODEL}", "api_base": narrow.base, "api_key": narrow.key, "max_retries": 0}
    router = litellm.Router(
        model_list=[{"model_name": "it", "litellm_params": there}], num_retries=5, disable_cooldowns=True
    )
    with full_until_refused(narrow):
        answer = router.completion(model="it", messages=USER, max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_a_timeout_ends_the_request_at_the_server(narrow: Place) -> None:
    slow = asked(narrow, max_tokens=1500, timeout=0.5, extra_body={"ignore_eos": True})
    with pytest.raises(litellm.Timeout):
        litellm.completion(**slow)
    wait_until(lambda: narrow.live() == (0, 0), "the request to end")


def test_the_router_goes_on_to_a_server_that_works(server: Place, narrow: Place) -> None:
    wrong = {"model": f"openai/{MODEL}", "api_base": narrow.base, "api_key": "wrong"}
    right = {"model": f"openai/{MODEL}", "api_base": server.base, "api_key": "none"}
    router = litellm.Router(
        model_list=[
            {"model_name": "first", "litellm_params": wrong},
            {"model_name": "second", "litellm_params": right},
        ],
        fallbacks=[{"first": ["second"]}],
        num_retries=0,
    )
    answer = router.completion(model="first", messages=USER, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content == PARIS
