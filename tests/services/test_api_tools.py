"""Tool calls and reasoning in chat completions: what the official client sees, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service, stream_lines, strict

PATH = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "漢 🙂"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def ask(service: Service, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": USER, "tools": [TOOL, NOW], **fields}
    response = service.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer = strict(response.content)
    ChatCompletion.model_validate(answer)
    return answer


def chunks(service: Service, **fields: Any) -> list[Any]:
    lines = stream_lines(service, PATH, {"messages": USER, "tools": [TOOL, NOW], **fields})
    assert lines[-1] == "[DONE]"
    found = [strict(line) for line in lines[:-1]]
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
    return found


def joined(found: list[Any]) -> tuple[str | None, str, list[tuple[str, str]], str]:
    """Content, thoughts, calls and finish reason of a stream; checks the order of what it is joined from."""
    content, thoughts = None, ""
    calls: list[list[str]] = []
    reasons = []
    for chunk in found:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content") is not None:
                content = (content or "") + delta["content"]
            thoughts += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["type"] == "function" and call["index"] == len(calls)
                    calls.append([call["function"]["name"], call["function"]["arguments"]])
                else:
                    assert call.keys() == {"index", "function"} and call["index"] == len(calls) - 1
                    assert call["function"].keys() == {"arguments"}
                    calls[-1][1] += call["function"]["arguments"]
            reasons.append(choice["finish_reason"])
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return content, thoughts, [(name, arguments) for name, arguments in calls], reasons[-1]


def whole(answer: Any) -> tuple[str | None, str, list[tuple[str, str]], str]:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning_content", ""), calls, choice["finish_reason"]


def test_the_official_client_gets_calls_and_no_markup(service: Service) -> None:
    service.say(f"{CALL}\n{CALL_NOW}")
    answer = service.client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL, NOW], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        first, second = choice.message.tool_calls or ()
        assert first.type == second.type == "function"
        assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", {"city": "漢 🙂"})  # type: ignore[union-attr]
        assert (second.function.name, second.function.arguments) == ("now", "{}")  # type: ignore[union-attr]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4


def test_the_official_clients_accumulated_stream_equals_the_whole_answer(service: Service) -> None:
    service.say(f"Let me look.\n{CALL}\n{CALL_NOW}")
    with service.client.chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL, NOW]) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Let me look."
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert calls == [("get_weather", '{"city": "漢 🙂"}'), ("now", "{}")]
    assert "tool_calls.function.arguments.delta" in events
    assert whole(ask(service)) == ("Let me look.", "", calls, "tool_calls")


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        (CALL, {}),
        (f"Hm. {CALL}{CALL_NOW} ok", {}),
        (f"{CALL}{CALL_NOW}", {"parallel_tool_calls": False}),
        (ANSWER, {}),
        ("a <tool_call> b", {}),
        ("", {}),
        (CALL, {"max_tokens": 14}),
        (CALL, {"max_tokens": 2}),
        (CALL, {"stop": ["city"]}),
        (f"{CALL} END x", {"stop": ["END"]}),
        (CALL, {"tool_choice": "none"}),
        (CALL, {"logprobs": True, "top_logprobs": 1}),
    ],
)
def test_a_stream_says_what_the_whole_answer_says(service: Service, said: str, fields: dict[str, Any]) -> None:
    service.say(said)
    answer, found = ask(service, **fields), chunks(service, **fields)
    expected = whole(answer)
    content, thoughts, calls, reason = joined(found)
    assert (content or None, thoughts, calls, reason) == (expected[0] or None, *expected[1:])
    if fields.get("logprobs"):
        tokens = [entry for chunk in found for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert tokens == answer["choices"][0]["logprobs"]["content"]
        assert len(tokens) == answer["usage"]["completion_tokens"]


def test_a_streams_first_chunk_leaves_open_whether_there_is_content(service: Service) -> None:
    service.say(CALL)
    found = chunks(service)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert joined(found) == (None, "", [("get_weather", '{"city": "漢 🙂"}')], "tool_calls")


def test_a_call_that_is_cut_is_not_reported_as_complete(service: Service) -> None:
    service.say(CALL)
    _, _, calls, reason = whole(ask(service, max_tokens=18))
    assert reason == "length" and calls and calls[0][1] != '{"city": "漢 🙂"}'
    assert whole(ask(service, stop=["city"]))[3] == "stop"


def test_calls_that_may_not_be_parallel_are_one(service: Service) -> None:
    service.say(f"{CALL}\n{CALL_NOW}")
    calls = whole(ask(service, parallel_tool_calls=False))[2]
    assert [name for name, _ in calls] == ["get_weather"]


def test_tools_are_in_the_prompt_unless_none_is_chosen(service: Service) -> None:
    assert service.scheduler is not None
    prompts = []
    for choice in ("auto", "none"):
        ask(service, tool_choice=choice, max_tokens=1)
        prompts.append(service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1])))
    assert json.dumps(TOOL) in prompts[0] and "get_weather" not in prompts[1]


def test_without_tools_markup_is_content(service: Service) -> None:
    service.say(CALL)
    answer = service.http.post(PATH, json={"model": MODEL, "messages": USER}).json()
    assert whole(answer) == (CALL, "", [], "stop")


def test_calls_and_results_of_the_conversation_reach_the_model(service: Service) -> None:
    assert service.scheduler is not None
    service.say(CALL)
    message = service.client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    history: Any = [*USER, message.model_dump(exclude_none=True), result]
    service.say(ANSWER)
    assert whole(ask(service, messages=history))[0] == ANSWER
    text = service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]))
    assert CALL in text and "<tool_response>\nSunny\n</tool_response>" in text


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_a_grammar_for_the_runner(service: Service, choice: Any) -> None:
    assert service.scheduler is not None
    service.say(CALL)
    assert whole(ask(service, tool_choice=choice))[3] == "tool_calls"
    grammar = service.scheduler.record.submits[-1].params.grammar
    assert grammar.startswith("lark:") and "get_weather" in grammar and ("now" in grammar) == (choice == "required")
    ask(service, tool_choice="auto")
    assert service.scheduler.record.submits[-1].params.grammar == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": {"name": "f"}}, "tools"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_field(
    service: Service, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": USER, "tools": [TOOL], "stream": stream, **fields}
    response = service.http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and param in error["message"]


def test_a_strict_schema_that_no_grammar_keeps_is_a_400(service: Service) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such-format"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="format"):
        service.client.chat.completions.create(model=MODEL, messages=USER, tools=[tool], tool_choice="required")  # type: ignore[call-overload]


def test_a_lone_surrogate_in_a_tool_is_a_400(service: Service) -> None:
    body = json.dumps({"model": MODEL, "messages": USER, "tools": [TOOL]}).replace("The weather of", "\\ud83d")
    response = service.http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_unicode"


def test_tokenize_counts_tools_as_generation_does(service: Service) -> None:
    body = {"model": MODEL, "messages": USER, "tools": [TOOL]}
    counted = service.http.post("/tokenize", json=body).json()["count"]
    assert counted == ask(service, tools=[TOOL], max_tokens=1)["usage"]["prompt_tokens"]
    assert counted > service.http.post("/tokenize", json=body | {"tool_choice": "none"}).json()["count"]
    older = {"model": MODEL, "messages": USER, "functions": [TOOL["function"]]}
    assert service.http.post("/tokenize", json=older).json()["count"] == counted


def test_plain_completions_have_no_tools(service: Service) -> None:
    response = service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "tools": [TOOL]})
    assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported"


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
THOUGHT = "<think>\nParis, I think.\n</think>\n\n"


@pytest.fixture(scope="module")
def thinker(make_service: MakeService, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A service whose template shows that the model thinks."""
    path: Path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return make_service(chat_template=str(path))


def test_thoughts_are_apart_from_the_answer_and_counted(thinker: Service) -> None:
    thinker.say(THOUGHT + ANSWER)
    answer = ask(thinker, tools=None)
    assert whole(answer) == (ANSWER, "Paris, I think.", [], "stop")
    thoughts = len(thinker.tokenizer.encode("<think>\nParis, I think.\n</think>", add_special_tokens=False))
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    # The token that ends the marker may hold what follows it.
    assert abs(counted - thoughts) <= 1
    found = chunks(thinker, tools=None, stream_options={"include_usage": True})
    assert joined(found[:-1]) == whole(answer)
    assert found[-1]["usage"] == answer["usage"]


def test_the_official_client_reads_thoughts_of_a_stream(thinker: Service) -> None:
    thinker.say(THOUGHT + ANSWER)
    thoughts = said = ""
    for chunk in thinker.client.chat.completions.create(model=MODEL, messages=USER, stream=True):
        delta = chunk.choices[0].delta
        thoughts += getattr(delta, "reasoning_content", None) or ""
        said += delta.content or ""
    assert (thoughts, said) == ("Paris, I think.", ANSWER)


def test_calls_come_after_thoughts(thinker: Service) -> None:
    thinker.say(THOUGHT + CALL)
    expected = (None, "Paris, I think.", [("get_weather", '{"city": "漢 🙂"}')], "tool_calls")
    assert whole(ask(thinker)) == joined(chunks(thinker)) == expected


def test_thoughts_may_be_left_out_but_are_counted(thinker: Service) -> None:
    thinker.say(THOUGHT + ANSWER)
    answer = ask(thinker, tools=None, include_reasoning=False)
    assert whole(answer) == (ANSWER, "", [], "stop")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_an_answer_without_thoughts_has_none(thinker: Service) -> None:
    thinker.say(ANSWER)
    answer = ask(thinker, tools=None, chat_template_kwargs={"enable_thinking": False})
    assert whole(answer) == (ANSWER, "", [], "stop")
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert thinker.scheduler is not None
    prompt = prompt_of(thinker.scheduler.record.submits[-1])
    assert thinker.tokenizer.decode(prompt, skip_special_tokens=False).endswith("<think>\n\n</think>\n\n")


def test_thoughts_that_never_end_are_no_content(thinker: Service) -> None:
    thinker.say(THOUGHT + ANSWER)
    content, thoughts, _, reason = whole(ask(thinker, tools=None, max_tokens=6))
    assert (content, reason) == ("", "length") and "Paris, I think.".startswith(thoughts)


def test_a_form_is_kept_after_thoughts(thinker: Service) -> None:
    assert thinker.scheduler is not None
    thinker.say(THOUGHT + "{}")
    answer = ask(thinker, tools=None, response_format={"type": "json_object"})
    assert whole(answer)[:2] == ("{}", "Paris, I think.")
    assert "thoughts" in thinker.scheduler.record.submits[-1].params.grammar


def test_a_model_that_always_thinks_is_read_so(make_service: MakeService) -> None:
    service = make_service(reasoning_parser="deepseek_r1", tool_call_parser="llama3_json")
    service.say('Hm.\n</think>\n{"name": "now", "parameters": {}}')
    assert whole(ask(service)) == joined(chunks(service)) == (None, "Hm.", [("now", "{}")], "tool_calls")


def test_a_format_that_is_off_refuses_tools(make_service: MakeService) -> None:
    service = make_service(tool_call_parser="none")
    response = service.http.post(PATH, json={"model": MODEL, "messages": USER, "tools": [TOOL]})
    assert response.status_code == 400 and "--tool-call-parser" in response.json()["error"]["message"]
    assert whole(ask(service, tool_choice="none"))[0] == ANSWER
