"""POST /v1/chat/completions, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import ANSWER, MODEL, Service, stream_lines, strict

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_official_client_gets_the_assistants_message(service: Service) -> None:
    answer = service.client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(service.answer) + 1


def test_the_official_clients_accumulated_stream_equals_the_whole_answer(service: Service) -> None:
    with service.client.chat.completions.stream(model=MODEL, messages=USER, n=2) as stream:  # type: ignore[arg-type]
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = service.client.chat.completions.create(model=MODEL, messages=USER, n=2)  # type: ignore[arg-type]
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices] == [ANSWER] * 2
    assert [c.finish_reason for c in final.choices] == [c.finish_reason for c in whole.choices]


@pytest.mark.parametrize("body", [{"n": 2, "max_tokens": 1}, {"n": 3}, {"n": 1, "stop": [" France"]}])
def test_chunks_follow_the_rules_for_roles_and_finish_reasons(service: Service, body: dict[str, Any]) -> None:
    lines = stream_lines(service, PATH, {"messages": USER, **body})
    chunks = [strict(line) for line in lines[:-1]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    finished: set[int] = set()
    begun: set[int] = set()
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in finished, "a chunk after the finish reason"
        assert ("role" in choice["delta"]) == (index not in begun)
        begun.add(index)
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] in ("stop", "length")
            finished.add(index)
    assert begun == finished == set(range(body["n"]))


def test_an_immediate_end_gives_a_role_and_a_finish_reason(service: Service) -> None:
    service.answer = []
    lines = stream_lines(service, PATH, {"messages": USER})
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert (choices[1]["delta"], choices[1]["finish_reason"]) == ({}, "stop")
    whole = service.http.post(PATH, json={"model": MODEL, "messages": USER}).json()
    assert whole["choices"][0]["message"]["content"] == ""


def test_the_limit_defaults_to_what_fits_into_context_and_pool(service: Service) -> None:
    assert service.scheduler is not None
    service.http.post(PATH, json={"model": MODEL, "messages": USER})
    submit = service.scheduler.record.submits[-1]
    limits = service.limits
    capacity = (limits.num_blocks - 1) * limits.block_size
    assert submit.params.max_tokens == capacity - len(prompt_of(submit)) + 1


@pytest.mark.parametrize(
    "fields", [{"max_completion_tokens": 5}, {"max_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 5}]
)
def test_both_names_of_the_limit_are_obeyed(service: Service, fields: dict[str, int]) -> None:
    answer = service.http.post(PATH, json={"model": MODEL, "messages": USER, **fields}).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_text_parts_render_like_a_plain_string(service: Service) -> None:
    assert service.scheduler is not None
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in (parts, "a\nb"):
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert service.http.post(PATH, json=body).status_code == 200
    first, second = (prompt_of(submit) for submit in service.scheduler.record.submits[-2:])
    assert first == second


def test_every_role_reaches_the_template(service: Service) -> None:
    assert service.scheduler is not None
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ada"},
        {"role": "assistant", "content": "Hello"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "developer", "content": "x"},
    ]
    assert service.http.post(PATH, json={"model": MODEL, "messages": messages, "max_tokens": 1}).status_code == 200
    text = service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)
    messages[-1]["role"] = "system"  # this template knows no developer
    for message in messages:
        assert f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_the_final_message_may_be_continued(service: Service) -> None:
    assert service.scheduler is not None
    messages = [*USER, {"role": "assistant", "content": "The capital"}]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert service.http.post(PATH, json=body).status_code == 200
    text = service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nThe capital")


def test_a_long_conversation_is_rendered_and_tokenized_the_same_in_a_thread(service: Service) -> None:
    assert service.scheduler is not None
    text = "word " * 900
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    assert service.http.post(PATH, json=body).status_code == 200
    shown = service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)
    assert f"<|im_start|>user\n{text}" in shown


def test_logprobs_have_bytes_and_exactly_the_asked_alternatives(service: Service) -> None:
    assert service.scheduler is not None
    service.say("漢 ok")
    service.scheduler.top = [(11, -0.1), (12, float("-inf")), (13, float("nan"))]
    body = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 3, "logit_bias": {"10": -100}}
    answer = strict(service.http.post(PATH, json=body).content)
    ChatCompletion.model_validate(answer)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [pytest.approx(-0.1), -9999.0, -9999.0]
    raw = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert raw.decode() == "漢 ok"


def test_streamed_logprobs_equal_the_whole_ones(service: Service) -> None:
    service.say("ok\n\nUse 漢")
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1, "stop": ["\n\nUser"]}
    whole = service.http.post(PATH, json={"model": MODEL, **body}).json()["choices"][0]["logprobs"]["content"]
    streamed: list[Any] = []
    text = ""
    for line in stream_lines(service, PATH, body)[:-1]:
        choice = json.loads(line)["choices"][0]
        text += choice["delta"].get("content", "")
        streamed += (choice["logprobs"] or {"content": []})["content"]
        seen = b"".join(bytes(entry["bytes"]) for entry in streamed)
        if choice["finish_reason"] is None:
            assert text.encode().startswith(seen), "a token's log-probability came before its text"
    assert streamed == whole


def test_logprobs_without_alternatives_have_empty_lists(service: Service) -> None:
    body = {"model": MODEL, "messages": USER, "logprobs": True, "max_tokens": 1}
    content = service.http.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []
    assert content[0]["token"] == "The"


def test_neutral_tool_fields_are_accepted(service: Service) -> None:
    fields = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    response = service.http.post(PATH, json={"model": MODEL, "messages": USER, **fields})
    assert response.status_code == 200
