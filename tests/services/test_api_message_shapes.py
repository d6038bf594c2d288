"""The shapes that chat messages come in: refusals, developers, nothing to say, parts that aren't text, and effort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service

PATH = "/v1/chat/completions"
HI: Any = {"role": "user", "content": "Hi"}


def rendered(service: Service, messages: list[Any], **fields: Any) -> str:
    assert service.scheduler is not None
    answer = service.client.chat.completions.create(model=MODEL, messages=messages, **fields)
    assert answer.choices[0].message.content == ANSWER
    return service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "content": "No.", "refusal": None, "audio": None, "function_call": None},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}], "name": "bob", "annotations": []},
    ],
)
def test_what_the_assistant_has_said_is_said_in_every_shape(service: Service, message: Any) -> None:
    assert "<|im_start|>assistant\nNo.<|im_end|>" in rendered(service, [HI, message, HI])


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": []}])
def test_an_assistant_may_have_said_nothing(service: Service, message: Any) -> None:
    assert "<|im_start|>assistant\n<|im_end|>" in rendered(service, [HI, message, HI])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_every_role_may_speak_in_parts(service: Service, role: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    shown = {"developer": "system"}.get(role, role)
    assert f"<|im_start|>{shown}\none\ntwo<|im_end|>" in rendered(service, [HI, {"role": role, "content": parts}, HI])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "messages[1].content: required"),
        ({"role": "tool", "tool_call_id": "a", "content": None}, "messages[1].content: required"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, "needs a refusal"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "'input_audio'"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "'file'"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio"),
    ],
)
def test_what_is_no_text_is_refused_where_it_is(service: Service, message: Any, words: str) -> None:
    answer = service.http.post(PATH, json={"model": MODEL, "messages": [HI, message]})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


@pytest.fixture(scope="module")
def knowing(make_service: MakeService, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose template knows developers and effort."""
    path: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(
        "{{ reasoning_effort | default('-') }}|{{ enable_thinking | default('-') }}|"
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{# 'developer' #}"
    )
    service = make_service(chat_template=str(path))
    yield service
    service.close()


def test_a_template_that_knows_developers_sees_them(knowing: Service) -> None:
    assert "developer:x;" in rendered(knowing, [{"role": "developer", "content": "x"}])


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({}, "-|-|"),
        ({"reasoning_effort": "low"}, "low|-|"),
        ({"reasoning_effort": "none"}, "none|False|"),
        ({"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, "none|True|"),
    ],
)
def test_the_effort_reaches_a_template_that_asks_for_it(knowing: Service, fields: Any, begins: str) -> None:
    assert rendered(knowing, [HI], **fields) == f"{begins}user:Hi;"
    body = {"messages": [HI], "reasoning_effort": fields.get("reasoning_effort"), **fields.get("extra_body", {})}
    ids = knowing.http.post("/tokenize", json=body).json()["tokens"]
    assert knowing.tokenizer.decode(ids, skip_special_tokens=False) == f"{begins}user:Hi;"
    if "extra_body" not in fields and fields:
        knowing.client.responses.create(model=MODEL, input="Hi", reasoning={"effort": fields["reasoning_effort"]})
        assert knowing.scheduler is not None
        shown = knowing.tokenizer.decode(prompt_of(knowing.scheduler.record.submits[-1]), skip_special_tokens=False)
        assert shown == f"{begins}user:Hi;"


def test_the_effort_of_a_message_does_too(knowing: Service) -> None:
    body: Any = {"model": MODEL, "max_tokens": 5, "messages": [HI], "output_config": {"effort": "high"}}
    assert knowing.http.post("/v1/messages", json=body).status_code == 200
    assert knowing.scheduler is not None
    shown = knowing.tokenizer.decode(prompt_of(knowing.scheduler.record.submits[-1]), skip_special_tokens=False)
    assert shown == "high|-|user:Hi;"
    answer = knowing.http.post("/v1/messages", json={**body, "output_config": {"effort": "huge"}})
    assert answer.status_code == 400 and "output_config.effort: 'huge'" in answer.json()["error"]["message"]


def test_an_effort_that_nobody_knows_is_refused(service: Service) -> None:
    answer = service.http.post(PATH, json={"model": MODEL, "messages": [HI], "reasoning_effort": "huge"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize(
    "field",
    ["prediction", "verbosity", "modalities", "store", "metadata", "service_tier", "safety_identifier",
     "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"],
)  # fmt: skip
def test_hints_of_openais_clients_change_nothing(service: Service, field: str) -> None:
    values: Any = {
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "modalities": ["text"],
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
    }
    before = service.state.metrics.unknown_fields._value.get()
    rendered(service, [HI], **{field: values.get(field, "x")})
    assert service.state.metrics.unknown_fields._value.get() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("web_search_options", {"x": 1}),
        ("audio", {"voice": "a"}),
        ("modalities", ["audio"]),
        ("moderation", {"model": "x"}),
    ],
)
def test_what_only_openai_does_is_refused(service: Service, field: str, value: Any) -> None:
    answer = service.http.post(PATH, json={"model": MODEL, "messages": [HI], field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported")
