"""Answers with a form: the fields of OpenAI, vLLM and SGLang, what they become, and what is refused before a stream."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from protocol.messages import RequestStatus
from tests.services.service_kit import MODEL, Service
from tests.services.test_control import end, held, scheduler_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
EBNF = 'root ::= "a" tail\ntail ::= [0-9]+'


def post(service: Service, path: str = COMPLETIONS, **fields: Any) -> Any:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "x"}
    return service.http.post(path, json={"model": MODEL, "max_tokens": 1, **base, **fields})


def grammars(service: Service) -> list[str]:
    """Of the requests that the scheduler has got."""
    return [submit.params.grammar for submit in scheduler_of(service).record.submits]


def refused(response: Any) -> tuple[str, str, str]:
    """(param, code, message) of a 400."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["code"], error["message"]


def in_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, ""),
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": None, "structured_outputs": {}, "guided_json": None}, ""),
        ({"response_format": {"type": "json_object"}}, 'json_schema:{"type":"object"}'),
        ({"response_format": in_format(SCHEMA)}, f"json_schema:{TEXT}"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "json_schema:true"),
        ({"structured_outputs": {"json": SCHEMA}}, f"json_schema:{TEXT}"),
        ({"structured_outputs": {"json": TEXT}}, f"json_schema:{TEXT}"),
        ({"structured_outputs": {"json_object": True}}, 'json_schema:{"type":"object"}'),
        ({"structured_outputs": {"json_object": False}}, ""),
        ({"structured_outputs": {"regex": "a+/b"}}, "regex:a+/b"),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, r"regex:a\.b|c"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, 'lark:start: "x"'),
        ({"guided_json": SCHEMA}, f"json_schema:{TEXT}"),
        ({"guided_regex": "[0-9]"}, "regex:[0-9]"),
        ({"guided_choice": ["yes", "no"]}, "regex:yes|no"),
        ({"guided_grammar": 'start: "x"'}, 'lark:start: "x"'),
        ({"json_schema": TEXT}, f"json_schema:{TEXT}"),
        ({"regex": "(a|b)"}, "regex:(a|b)"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, f"json_schema:{TEXT}"),
    ],
)
def test_every_spelling_of_a_form_becomes_one_grammar(
    service: Service, path: str, fields: dict[str, Any], grammar: str
) -> None:
    assert post(service, path, **fields).status_code == 200
    assert grammars(service) == [grammar]


@pytest.mark.parametrize("field", ["ebnf", "guided_grammar", "structured_outputs"])
def test_ebnf_becomes_lark(service: Service, field: str) -> None:
    value = {"grammar": EBNF} if field == "structured_outputs" else EBNF
    assert post(service, **{field: value}).status_code == 200
    (grammar,) = grammars(service)
    assert grammar.startswith("lark:") and "start:" in grammar and "/[0-9]/+" in grammar


def test_all_choices_of_all_prompts_have_the_grammar(service: Service) -> None:
    assert post(service, prompt=["x", "y"], n=2, regex="a").status_code == 200
    assert grammars(service) == ["regex:a"] * 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"regex": "a", "guided_json": {}}, ("guided_json", "regex")),
        ({"response_format": in_format({}), "guided_choice": ["a"]}, ("response_format", "guided_choice")),
        ({"response_format": {"type": "json_object"}, "ebnf": EBNF}, ("response_format", "ebnf")),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, ("structured_outputs.json", "structured_outputs.regex")),
    ],
)
def test_two_forms_at_once_are_refused_by_their_names(
    service: Service, fields: dict[str, Any], named: tuple[str, str]
) -> None:
    param, _, message = refused(post(service, **fields))
    assert param in named and all(name in message for name in named)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": "json_object"}, "response_format", "object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", "schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", "schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format", "type"),
        ({"response_format": in_format(5)}, "response_format", "int"),
        ({"response_format": in_format({"type": "yaml"})}, "response_format", "yaml"),
        ({"response_format": in_format({"$ref": "#"})}, "response_format", "no text"),
        ({"response_format": in_format({"$ref": "#/$defs/x"})}, "response_format", "/$defs/x"),
        ({"response_format": in_format({"$ref": "https://example.com/x"})}, "response_format", "example.com"),
        ({"response_format": in_format({"type": "string", "pattern": "(a+"})}, "response_format", "unclosed group"),
        ({"response_format": in_format({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"response_format": in_format({"not": {}, "x-guidance": {"lenient": True}})}, "response_format", "not"),
        ({"response_format": in_format({"type": "string", "format": "hex"})}, "response_format", "hex"),
        ({"response_format": in_format({"minimum": 2, "maximum": 1, "type": "integer"})}, "response_format", "minimum"),
        ({"response_format": in_format(False)}, "response_format", "nsatisfiable"),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs", "jsno"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "column"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "object"),
        ({"guided_json": [1]}, "guided_json", "array"),
        ({"regex": "(a+"}, "regex", "unclosed group"),
        ({"regex": ""}, "regex", "empty"),
        ({"regex": "a(?=b)"}, "regex", "look-around"),
        ({"regex": "a\\"}, "regex", ""),
        ({"guided_choice": []}, "guided_choice", "0 choices"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "guided_choice[1]"),
        ({"guided_choice": "a"}, "guided_choice", "array"),
        ({"guided_choice": ["x"] * 1025}, "guided_choice", "1025 choices"),
        ({"ebnf": "root ::= x"}, "ebnf", "'x'"),
        ({"ebnf": " "}, "ebnf", "empty"),
        ({"guided_grammar": 'start: "x"\ny: z\nstart: "y"'}, "guided_grammar", "line"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "line 1, column 8"),
        ({"regex": "a" * 65_537}, "regex", "65536"),
        ({"regex": "a", "allowed_token_ids": [5]}, "regex", "allowed_token_ids"),
    ],
)
def test_what_cannot_be_a_form_is_refused_before_a_stream_begins(
    service: Service, path: str, stream: bool, fields: dict[str, Any], param: str, said: str
) -> None:
    named, _, message = refused(post(service, path, stream=stream, **fields))
    assert named == param and said in message
    assert grammars(service) == []


def test_a_large_schema_is_refused_by_its_size(service: Service) -> None:
    schema = {"enum": ["x" * 100 + str(number) for number in range(20_000)]}
    assert "65536" in refused(post(service, response_format=in_format(schema)))[2]


@pytest.mark.parametrize("where", ["key", "value"])
def test_half_of_a_surrogate_pair_in_a_schema_is_named(service: Service, where: str) -> None:
    schema = '{"\\ud83d":{}}' if where == "key" else '{"enum":["\\ud83d"]}'
    body = f'{{"model":"{MODEL}","prompt":"x","guided_json":{schema}}}'
    response = service.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    param, code, _ = refused(response)
    assert (param, code) == ("guided_json", "invalid_unicode")


NESTED = '{"items":' * 5000 + "{}" + "}" * 5000


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": NESTED},
        {"json_schema": "[" * 60_000},
        {"ebnf": "root ::= " + "(" * 5000},
        {"guided_grammar": "start: " + "(" * 5000},
        {"guided_grammar": "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(4000)) + '\na4000: "x"'},
        {"regex": "(" * 5000 + ")" * 5000},
        {"regex": "((a{1000}){1000}){1000}(b|c){1000}d{1000}|" * 40 + "x"},
    ],
    ids=["schema", "array", "ebnf", "lark", "rules", "groups", "repeats"],
)
def test_a_grammar_that_would_end_or_stall_a_process_costs_nobody_anything(
    service: Service, fields: dict[str, Any]
) -> None:
    hostile = post(service, **fields)
    assert hostile.status_code in (200, 400), hostile.text
    assert post(service, regex="[a-c]+").status_code == 200


def test_a_refusal_by_the_runner_is_a_status_even_of_a_stream(service: Service) -> None:
    scheduler_of(service).held = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, service, stream=True, regex="a")
        held(service)
        end(service, status=RequestStatus.ERROR, code="invalid_grammar", message="not for this model")
        assert refused(answer.result()) == (None, "invalid_grammar", "not for this model")


def test_schemas_keep_the_order_of_their_keys(service: Service) -> None:
    names = [f"k{number}" for number in (3, 1, 2)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    assert post(service, guided_json=schema).status_code == 200
    kept = msgspec.json.decode(grammars(service)[0].removeprefix("json_schema:"))
    assert list(kept["properties"]) == names
