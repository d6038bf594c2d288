"""GET /openapi.json says what the server does: its routes, the bodies it takes and refuses, the answers it gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from services.openapi.document import ANSWERS
from services.openapi.operations import OPERATIONS
from services.openapi.parts import ref
from tests.services.service_kit import MODEL, MakeService, Service, stream_lines

Document = dict[str, Any]
# Of what this document uses nothing is newer, and that one takes a tenth of the time.
META = jsonschema.Draft7Validator(jsonschema.Draft7Validator.META_SCHEMA)
ASK = [{"role": "user", "content": "x"}]
CUSTOM = {"type": "custom", "custom": {"name": "g"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 2},
    "/v1/messages": {"messages": ASK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": ASK},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
GENERATING = [path for path, base in BASES.items() if len(base) == 2]
EVERYWHERE: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([None, 0, 2, 0.5], [-0.1, 2.1, "1", True]),
    "top_p": ([0.001, 1], [0, 1.1]),
    "top_k": ([-1, 0, 10**9], [-2, 0.5]),
    "min_p": ([0, 1], [-0.01, 1.01]),
    "repetition_penalty": ([0.1, 10], [0, 10.5]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "seed": ([-1, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1]),
    "priority": ([1 - 2**31, 2**31 - 1], [-(2**31), 2**31]),
    "timeout": ([0.5], [0, 604801]),
    "deadline": ([0.5], [0]),
    "logit_bias": ([{}, {"5": 100}], [{"5": 100.5}, {"x": 1}, {"-1": 1}, []]),
    "stop_token_ids": ([[], [5]], [[-1], [49152], list(range(1025)), [True]]),
    "allowed_token_ids": ([[5]], [[], [49152]]),
    "min_tokens": ([0, 2], [-1]),
    "truncate_prompt_tokens": ([-1, 2], [0, -2, 2049]),
    "cache_salt": (["x" * 1024], ["", "x" * 1025]),
    "routing_key": (["", "x" * 1024], ["x" * 1025]),
    "repetition_detection": (
        [{}, {"max_pattern_size": 0, "min_count": -5}, {"max_pattern_size": 2, "min_count": 2}],
        [{"max_pattern_size": 2}, {"max_pattern_size": 1025, "min_count": 2}, {"max_pattern_size": 2, "min_count": 1}],
    ),
    "structured_outputs": ([{}, {"choice": ["a"]}], [{"choice": []}, {"choice": [""]}, {"regex": " "}, {"x": 1}]),
    "guided_choice": ([["a", "b"]], [[], [""], list("a" * 1025)]),
    "regex": (["a+"], ["", " "]),
    "suffix": ([None, "", False], ["x", 1]),
    "use_beam_search": ([False], [True]),
    "length_penalty": ([1, 0], [2, True]),
    "unheard_of": ([1, None, {}], []),
    "model": ([MODEL, None], ["nope", 1]),
}
OWN: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "/v1/completions": {
        "prompt": (["x", ["x", "y"], [1], [[1], [2]]], [None, 1, [], [[]], [1, "x"], [-1], [[49152]], [[1], ["x"]]]),
        "logprobs": ([None, 0, 20], [-1, 21, True]),
        "max_tokens": ([1, None], [0, -1, 2048]),
        "n": ([1, 2], [0, 129]),
        "stop": (["x", ["x"], []], ["", ["x"] * 65, "x" * 1025, [""], 1]),
        "user": (["", "x"], ["x" * 1025, 1]),
    },
    "/v1/chat/completions": {
        "messages": (
            [
                [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
                [
                    *ASK,
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
                    {"role": "tool", "tool_call_id": "1", "content": "x"},
                ],
                [
                    *ASK,
                    {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                    {"role": "function", "name": "f", "content": "x"},
                ],
                [*ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *ASK],
            ],
            [
                None,
                [],
                [{"content": "x"}],
                [{"role": "user", "content": [{"type": "image_url"}]}],
                [{"role": "user", "content": [{"type": "text"}]}],
                [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
                [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
                [{"role": "user"}],
                [{"role": "function", "content": "x"}],
                [{"role": "user", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}],
                [{"role": "assistant", "content": "x", "audio": {"id": "x"}}],
                [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f g"}}]}],
            ],
        ),
        "logprobs": ([True, False], [1]),
        "top_logprobs": ([None], [2, 21]),
        "max_completion_tokens": ([2], [0]),
        "n": ([1, 2], [0]),
        "reasoning_effort": (["high", None], ["often", 1]),
        "functions": ([[], [{"name": "f"}]], [[{"name": "f g"}], 1]),
        "function_call": (["none"], ["often", {}]),
        "tools": (
            [[], [TOOL], [CUSTOM]],
            [[{"type": "function"}], [{"type": "custom"}], [{**TOOL, "function": {"name": "f g"}}], [TOOL] * 129],
        ),
        "tool_choice": (["none", "auto"], ["banana", {"type": "function"}, {"type": "allowed_tools"}, 1]),
        "response_format": (
            [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}],
            [
                {"type": "json_schema"},
                {"type": "yaml"},
                {"type": "json_schema", "schema": {}},
                {"type": "text", "a": 1},
            ],
        ),
        "chat_template_kwargs": ([{"a": 1}], [{"messages": []}]),
    },
    "/v1/messages": {
        "messages": (
            [
                [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
                [
                    *ASK,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
                ],
            ],
            [
                [],
                [{"role": "system", "content": "x"}],
                [{"role": "user", "content": None}],
                [{"role": "user", "content": [{"type": "image"}]}],
                [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}],
                [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}],
            ],
        ),
        "max_tokens": ([1, 10**6], [None, 0]),
        "system": (["x", [{"type": "text", "text": "x"}]], [[{"type": "text"}], [{"type": "tool_result"}], 1]),
        "stop_sequences": ([["x"], []], ["x", [""]]),
        "tools": ([[], [{"name": "f"}]], [[{"name": "f", "type": "bash_20250124"}], [{"name": ""}]]),
        "tool_choice": ([{"type": "none"}, {"type": "auto"}], [{"type": "banana"}, {"type": "tool"}]),
        "thinking": ([{"type": "disabled"}], [{"type": "often"}]),
        "output_format": ([None], [{"type": "text"}, {"type": "json_schema"}]),
        "n": ([1, None], [2]),
    },
    "/v1/messages/count_tokens": {"system": (["x"], [[{"type": "image"}]]), "messages": ([ASK], [[]])},
    "/v1/responses": {
        "input": (
            [
                "",
                [{"role": "developer", "content": [{"type": "input_text", "text": "x"}]}],
                [
                    {"role": "user", "content": "x"},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "x"},
                ],
                [{"type": "reasoning", "content": None}, {"role": "user", "content": "x"}],
            ],
            [
                None,
                [],
                1,
                [{"role": "tool", "content": "x"}],
                [{"role": "user"}],
                [{"type": "item_reference", "id": "x"}],
                [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}],
                [{"type": "function_call", "call_id": "1", "name": "f"}],
                [{"type": "function_call_output", "call_id": "1"}],
            ],
        ),
        "max_output_tokens": ([1], [0]),
        "max_tokens": ([None], [1]),
        "metadata": ([{"a": "b"}], [{"a": 1}, {"a": "x" * 513}, {"x" * 65: ""}, {str(i): "" for i in range(17)}]),
        "text": ([{"format": {"type": "text"}}], [{"format": {"type": "yaml"}}, {"format": {"type": "json_schema"}}]),
        "tool_choice": (["none"], ["banana", {"type": "function"}, {"type": "allowed_tools", "mode": "auto"}]),
        "tools": ([[], [{"type": "function", "name": "f"}], [{"type": "custom", "name": "f"}]], [[{"name": "f"}]]),
        "truncation": (["auto"], ["often"]),
        "top_logprobs": ([0, 20], [-1, 21]),
        "reasoning": ([{"effort": "low", "summary": "auto"}], [{"effort": "often"}, {"effort": 1}]),
        "store": ([True, False], [1]),
        "previous_response_id": ([None], [1]),
    },
    "/tokenize": {
        "prompt": (["", "x"], [1]),
        "messages": ([None], [ASK, []]),
        "reasoning_effort": ([None, "low"], ["huge"]),
        "tool_choice": (["none"], ["banana", "required"]),
        "functions": ([[{"name": "f"}]], [[{}]]),
        "model": ([MODEL], ["nope"]),
        "temperature": ([5], []),
    },
    "/detokenize": {"tokens": ([[], [0, 49151]], [None, [-1], [49152], ["x"]])},
}


@pytest.fixture(scope="module")
def document(shared_service: Service) -> Document:
    """What the shared server says of itself, once it knows its model."""
    response = shared_service.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found: Document = response.json()
    return found


def validator(document: Document, schema: dict[str, Any], *, strict: bool = False) -> Any:
    """For a schema of the document. `strict`: answers may have no other fields than those that it names."""
    components = document["components"]["schemas"]
    if strict:
        open_ended = {"ResponseItem", "Timeline", "TimelineEvent"}
        names = {kind.__name__ for kind in ANSWERS} | {"CompletionChoice", "ChatChoice", "ChatMessage", "Usage"}
        closed = {name: {**components[name], "additionalProperties": False} for name in names - open_ended}
        components = {**components, **closed}
    return jsonschema.Draft202012Validator({"components": {"schemas": components}, **schema})


def problems(check: Any, value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in check.iter_errors(value)]


def body_schema(document: Document, path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (item for name, item in value.items() if name == "$ref")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from refs(item)


def test_every_route_of_the_application_is_described_and_nothing_else(shared_service: Service) -> None:
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    served = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in shared_service.server._app.routes
        if isinstance(route, Route) and route.methods is not None
        for method in route.methods - {"HEAD"}
    }
    assert described == served
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


def test_the_document_is_sound(document: Document) -> None:
    assert document["openapi"] == "3.1.0"
    for name, schema in document["components"]["schemas"].items():
        assert not list(META.iter_errors(schema)), name
    for target in set(refs(document)):
        _, *path = target.split("/")
        found: Any = document
        for part in path:
            found = found[part]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            names = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"]
            assert names == re.findall(r"{(\w+)}", path)
            assert all(answer["description"] and answer["content"] for answer in operation["responses"].values())


def test_examples_are_accepted_and_answered_as_described(service: Service, document: Document) -> None:
    for path in BASES:
        operation = document["paths"][path]["post"]
        example = operation["requestBody"]["content"]["application/json"]["example"]
        assert validator(document, body_schema(document, path)).is_valid(example)
        response = service.http.post(path, json=example)
        assert response.status_code == 200, response.text
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert problems(validator(document, answer, strict=True), response.json()) == []


def test_other_answers_are_as_described(service: Service, document: Document) -> None:
    kept = service.http.post("/v1/responses", json=BASES["/v1/responses"]).json()["id"]
    service.http.post("/v1/completions", json=BASES["/v1/completions"], headers={"X-Request-Id": "seen"})
    for path, place in (
        ("/v1/responses/{id}", kept),
        ("/v1/responses/{id}/input_items", kept),
        ("/v1/responses/{id}", "nope"),
        ("/v1/models", ""),
        ("/v1/models/{name}", MODEL),
        ("/v1/models/{name}", "nope"),
        ("/health", ""),
        ("/ready", ""),
        ("/version", ""),
        ("/load", ""),
    ):
        response = service.http.get(re.sub(r"{\w+}", place, path))
        answers = document["paths"][path]["get"]["responses"]
        content = answers[str(response.status_code)]["content"]["application/json"]
        assert problems(validator(document, content["schema"], strict=True), response.json()) == []


@pytest.mark.parametrize(
    ("path", "extra", "kind"),
    [
        ("/v1/completions", {"logprobs": 1, "return_token_ids": True}, "Completion"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}, "ChatCompletion"),
    ],
)
def test_answers_with_all_they_can_have_are_as_described(
    service: Service, document: Document, path: str, extra: dict[str, Any], kind: str
) -> None:
    response = service.http.post(path, json={**BASES[path], **extra})
    assert response.status_code == 200, response.text
    assert problems(validator(document, ref(kind), strict=True), response.json()) == []
    events = stream_lines(service, path, {**BASES[path], **extra, "stream_options": {"include_usage": True}})
    event = kind if path == "/v1/completions" else f"{kind}Chunk"
    check = validator(document, ref(event), strict=True)
    for line in events[:-1]:
        assert problems(check, json.loads(line)) == []


@pytest.mark.parametrize("path", BASES)
def test_what_the_server_takes_and_refuses_is_what_the_schema_takes_and_refuses(
    service: Service, document: Document, path: str
) -> None:
    check = validator(document, body_schema(document, path))
    table = {**(EVERYWHERE if path in GENERATING else {}), **OWN[path]}
    wrong: list[str] = []
    for field, (good, bad) in table.items():
        for value, right in [*((one, True) for one in good), *((one, False) for one in bad)]:
            body = {**BASES[path], field: value}
            status = service.http.post(path, json=body).status_code
            if check.is_valid(body) is not right or status not in ((200,) if right else (400, 404)):
                wrong.append(f"{field}={str(value)[:80]}: status {status}, schema {check.is_valid(body)}, {right=}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", BASES)
def test_a_body_without_a_required_field_is_refused_by_both(service: Service, document: Document, path: str) -> None:
    schema = document["components"]["schemas"][body_schema(document, path)["$ref"].rpartition("/")[2]]
    for name in schema.get("required", []):
        body = {field: value for field, value in BASES[path].items() if field != name}
        assert service.http.post(path, json=body).status_code == 400, name


def test_with_keys_the_document_says_where_one_is_needed(make_service: MakeService) -> None:
    service = make_service(keys=["sk-a"])
    found = service.http.get("/openapi.json").json()
    assert set(found["components"]["securitySchemes"]) == {"bearer", "key"}
    assert found["paths"]["/v1/models"]["get"]["security"]
    assert "401" in found["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in found["paths"]["/health"]["get"]
    service.close()


@pytest.mark.parametrize(
    "query", ["?stream=maybe", "/input_items?limit=0", "/input_items?limit=x", "/input_items?order=up"]
)
def test_a_query_that_no_schema_takes_is_refused_before_anything_is_looked_for(service: Service, query: str) -> None:
    assert service.http.get(f"/v1/responses/resp_nope{query}").status_code == 400
