"""What request bodies may hold, and what is said about those that can't be served. All through real HTTP."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from services.errors import ApiError
from services.ranges import ranged
from tests.services.service_kit import MODEL, Service

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def post(service: Service, path: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    body = {"model": MODEL, "max_tokens": 1, **base, **fields}
    return service.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def refused(response: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    """The error of a refusal in OpenAI's shape that names `param`."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    if param is not None:
        assert param in error["message"]
    return error


RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.01, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.1, 10.0),
}


@pytest.mark.parametrize("field", RANGES)
@pytest.mark.parametrize("raw", ["1e308", "-1e308", "1e999", '"nan"', "true", "[]", "3000000000000000000000000"])
def test_numbers_out_of_range_or_of_the_wrong_type_name_the_field(service: Service, field: str, raw: str) -> None:
    body = f'{{"model":"{MODEL}","prompt":"x","{field}":{raw}}}'
    response = service.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    refused(response, field)


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_json_are_refused(service: Service, raw: str) -> None:
    body = f'{{"model":"{MODEL}","prompt":"x","temperature":{raw}}}'
    response = service.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert refused(response, None)["code"] == "invalid_json"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_range_holds_a_number_that_is_not_finite(value: float) -> None:
    for low, high in (*RANGES.values(), (-1.0, math.inf)):
        with pytest.raises(ApiError, match="x: "):
            ranged(value, 1.0, "x", low, high)


@pytest.mark.parametrize("field", RANGES)
def test_both_ends_of_a_range_and_null_are_accepted(service: Service, field: str) -> None:
    for value in (*RANGES[field], None):
        assert post(service, COMPLETIONS, **{field: value}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0), ("top_k", -2), ("top_k", 1.5), ("repetition_penalty", 0), ("n", 0), ("n", 129), ("seed", 2**64),
        ("seed", 1.0), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", True), ("min_tokens", -1),
        ("min_tokens", 2), ("logit_bias", {"a": 1}), ("logit_bias", {"49152": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}), ("logit_bias", [1]), ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 65),
        ("stop", ["x" * 1025]), ("stop", 5), ("stop_token_ids", [49152]), ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]), ("allowed_token_ids", []), ("allowed_token_ids", [999999]), ("priority", 2**31),
        ("cache_salt", ""), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", 4000), ("stream", "yes"),
        ("stream_options", {"include_usage": True}), ("ignore_eos", 1), ("user", 5),
        ("user", "x" * 1025), ("cache_salt", "x" * 1025),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_on_both_endpoints(service: Service, field: str, value: Any) -> None:
    for path in (COMPLETIONS, CHAT):
        refused(post(service, path, **{field: value}), field)


@pytest.mark.parametrize(
    ("field", "value", "sent"),
    [("top_k", -1, 0), ("top_k", 0, 0), ("top_k", 10**9, 49152), ("temperature", 1e-5, 0.0), ("temperature", 0, 0.0)],
)
def test_values_with_a_meaning_are_translated(service: Service, field: str, value: Any, sent: Any) -> None:
    assert service.scheduler is not None
    assert post(service, COMPLETIONS, **{field: value}).status_code == 200
    assert getattr(service.scheduler.record.submits[-1].params, field) == sent


SURROGATE = "\\ud83d"


@pytest.mark.parametrize(
    ("path", "template", "where"),
    [
        (CHAT, '{"messages":[{"role":"user","content":"a%s"}]}', "messages[0].content"),
        (CHAT, '{"messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}', "messages[0].content[0].text"),
        (CHAT, '{"messages":[{"role":"%s","content":"x"}]}', "messages[0].role"),
        (CHAT, '{"messages":[],"tools":[{"function":{"name":"%s"}}]}', "tools[0].function.name"),
        (CHAT, '{"messages":[],"response_format":{"%s":1}}', "response_format"),
        (COMPLETIONS, '{"prompt":"%s"}', "prompt"),
        (COMPLETIONS, '{"prompt":["a","%s"]}', "prompt[1]"),
        (COMPLETIONS, '{"prompt":"x","stop":["%s"]}', "stop[0]"),
        (COMPLETIONS, '{"prompt":"x","user":"%s"}', "user"),
        (COMPLETIONS, '{"prompt":"x","model":"%s"}', "model"),
        (COMPLETIONS, '{"prompt":"x","cache_salt":"%s"}', "cache_salt"),
        (COMPLETIONS, '{"prompt":"x","logit_bias":{"%s":1}}', "logit_bias"),
    ],
)
def test_a_lone_surrogate_is_refused_by_place(service: Service, path: str, template: str, where: str) -> None:
    for half in (SURROGATE, "\\udc4d", "\\udc4d\\ud83d"):
        body = template.replace("%s", half)
        response = service.http.post(path, content=body, headers={"Content-Type": "application/json"})
        error = refused(response, where.split("[")[0].split(".")[0])
        assert error["code"] == "invalid_unicode"
        assert error["message"].startswith(f"{where}:")


def test_a_paired_surrogate_escape_is_an_emoji(service: Service) -> None:
    body = f'{{"model":"{MODEL}","prompt":"\\ud83d\\udc4d","echo":true,"max_tokens":1}}'
    response = service.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.json()["choices"][0]["text"].startswith("👍")


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"{", b"[]", b"null", b'"x"', b"5", b'{"prompt":"\xff"}', b"\xef\xbb\xbf{}", b"[" * 200_000,
     b'{"a":' * 200_000, b'{"prompt":' + b"[" * 200_000, b'{"n":' + b"9" * 5000 + b"}", b"{} {}", b"{'a':1}"],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(service: Service, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        response = service.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ([1, 2, -1], "prompt[2]"), ([1, 2, 49152], "prompt[2]"), ([2**31], "prompt[0]"), ([2**63], "prompt[0]"),
        ([[1], [99999999]], "prompt[1][0]"), ([True, 2], "prompt[0]"), ([1.0, 2], "prompt[0]"),
        ([[1], ["a"]], "prompt[1][0]"), ([1, "a"], "prompt[1]"), (["a", 1], "prompt[1]"), ([[1], 2], "prompt[1]"),
        ({"a": 1}, "prompt"), (5, "prompt"), (None, "prompt"), ([], "prompt"), ("", "prompt"), ([[]], "prompt"),
        ([[1]] * 1025, "prompt"),
    ],
)  # fmt: skip
def test_a_bad_prompt_is_refused_by_place(service: Service, prompt: Any, place: str) -> None:
    assert place in refused(post(service, COMPLETIONS, prompt=prompt), "prompt")["message"]


def test_the_last_id_of_the_vocabulary_is_a_prompt(service: Service) -> None:
    assert post(service, COMPLETIONS, prompt=[49151]).status_code == 200


def test_a_missing_prompt_or_messages_is_named(service: Service) -> None:
    response = service.http.post(COMPLETIONS, json={"model": MODEL})
    refused(response, "prompt")
    response = service.http.post(CHAT, json={"model": MODEL})
    assert "messages" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "must not be empty"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0]"),
        ([{"role": "user", "content": [{"type": "banana", "text": "x"}]}], "banana"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"content": "x"}], "role"),
        ("hi", "messages"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "tool_calls"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(service: Service, messages: Any, said: str) -> None:
    response = post(service, CHAT, messages=messages)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("web_search_options", {"x": 1}), ("guided_json_object", True), ("guided_whitespace_pattern", " "),
        ("structural_tag", "{}"), ("suffix", "x"),
        ("bad_words", ["x"]), ("logits_processors", ["x"]), ("use_beam_search", True), ("audio", {"voice": "x"}),
        ("chat_template", "{{ x }}"),
    ],
)  # fmt: skip
def test_a_known_feature_that_is_missing_is_refused_and_not_ignored(service: Service, field: str, value: Any) -> None:
    for path in (COMPLETIONS, CHAT):
        assert refused(post(service, path, **{field: value}), field)["code"] == "unsupported"
        assert post(service, path, **{field: None}).status_code == 200


def test_best_of_above_n_is_refused(service: Service) -> None:
    refused(post(service, COMPLETIONS, best_of=3), "best_of")
    assert post(service, COMPLETIONS, best_of=2, n=2).status_code == 200


def test_logprobs_limits_are_named(service: Service) -> None:
    refused(post(service, COMPLETIONS, logprobs=21), "logprobs")
    refused(post(service, COMPLETIONS, logprobs=-1), "logprobs")
    refused(post(service, CHAT, logprobs=True, top_logprobs=21), "top_logprobs")
    refused(post(service, CHAT, top_logprobs=2), "top_logprobs")
    assert post(service, CHAT, top_logprobs=0).status_code == 200
    assert post(service, CHAT, logprobs=True, top_logprobs=20).status_code == 200


def test_contradicting_limits_are_refused(service: Service) -> None:
    refused(post(service, CHAT, max_completion_tokens=5, max_tokens=6), "max_completion_tokens")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_context_cannot_hold_is_refused_with_the_numbers(service: Service, path: str, stream: bool) -> None:
    error = refused(post(service, path, max_tokens=2048, stream=stream), "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    long = {"prompt": [1] * 2048} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a " * 4000}]}
    error = refused(post(service, path, stream=stream, **long), "prompt" if path == COMPLETIONS else "messages")
    assert error["code"] == "context_length_exceeded"
    words = ("This model's maximum context length is 2048 tokens", "prompt is too long")
    assert all(text in error["message"] for text in words), "what clients look for"


def test_a_prompt_that_fits_the_context_but_not_the_pool_is_refused_with_both_numbers(service: Service) -> None:
    assert post(service, COMPLETIONS, prompt=[1] * 1024).status_code == 200  # its one token needs no slot
    message = refused(post(service, COMPLETIONS, prompt=[1] * 1025), "prompt")["message"]
    assert "1025" in message and "1024" in message


def test_an_unknown_model_is_not_found_and_the_served_ones_are_listed(service: Service) -> None:
    for name in ("nope", "", "/models/x"):
        error = refused(post(service, CHAT, model=name), "model", 404)
        assert error["code"] == "model_not_found"
        assert MODEL in error["message"]
    assert post(service, CHAT, model=None).json()["model"] == MODEL


def test_unknown_fields_are_accepted_and_counted(service: Service) -> None:
    before = service.state.metrics.value("unknown_fields_total")
    fields = {"max_token": 5, "foo": 1, "metadata": {"a": 1}, "store": True, "service_tier": "auto", "user": "u"}
    assert post(service, CHAT, **fields).status_code == 200
    assert service.state.metrics.value("unknown_fields_total") == before + 2


def test_too_many_choices_are_refused(service: Service) -> None:
    refused(post(service, COMPLETIONS, prompt=[[1]] * 10, n=103), "n")


def test_a_bad_request_leaves_its_neighbour_alone(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 1
    with service.http.stream("POST", COMPLETIONS, json={"model": MODEL, "prompt": "x", "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert post(service, COMPLETIONS, temperature=99).status_code == 400
        assert post(service, COMPLETIONS, logit_bias={"999999": 1}).status_code == 400
        scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 100))
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_what_is_missing_is_named_like_what_is_wrong(service: Service) -> None:
    error = service.http.post(CHAT, json={"model": MODEL}).json()["error"]
    assert (error["message"], error["param"], error["code"]) == ("messages: required", "messages", "missing")
    error = refused(post(service, CHAT, messages=[{"content": "x"}]), "messages")
    assert error["message"] == "messages[0].role: required"
    error = refused(post(service, CHAT, tools=[{"type": "file_search"}]), "tools")
    assert error["message"] == "tools[0].type: 'file_search' is not supported"
    assert refused(post(service, COMPLETIONS, prompt=["a", ""]), "prompt")["message"].startswith("prompt[1]: ")
    assert refused(post(service, COMPLETIONS, prompt=""), "prompt")["message"].startswith("prompt: ")
