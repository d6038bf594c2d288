"""What is accepted and refused in `tools`, `tool_choice` and messages with calls."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import ApiError
from services.tools.history import check_calls
from services.tools.request import MAX_SCHEMA, MAX_SCHEMAS, MAX_TOOLS, tool_use


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "parallel", "forced", "names", "several"),
    [
        (None, None, False, {"f", "g"}, True),
        ("auto", True, False, {"f", "g"}, True),
        ("auto", False, False, {"f", "g"}, False),
        ("required", None, True, {"f", "g"}, True),
        (NAMED, None, True, {"f"}, False),
    ],
)
def test_the_choice_says_what_may_and_what_must_be_called(
    choice: Any, parallel: bool | None, forced: bool, names: set[str], several: bool
) -> None:
    use = tool_use([tool("f"), tool("g", strict=True)], choice, parallel)
    assert use is not None
    assert (use.forced, set(use.schemas), use.parallel) == (forced, names, several)
    assert use.strict == {"g"} & names
    assert len(use.tools) == 2


@pytest.mark.parametrize(("tools", "choice"), [(None, None), ([], "auto"), ([], "none"), ([tool()], "none")])
def test_without_tools_or_with_none_chosen_nothing_is_called(tools: Any, choice: Any) -> None:
    assert tool_use(tools, choice, None) is None


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([{"type": "retrieval"}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool(), tool(None)], None, "tools[1].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool("é")], None, "tools[0].function.name"),
        ([tool(), tool()], None, "tools[1].function.name: 'f' is there twice"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], None, "tools[0].function.parameters"),
        ([tool(parameters={"description": "x" * MAX_SCHEMA})], None, str(MAX_SCHEMA)),
        ([tool(description=1)], None, "tools[0].function.description"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(f"f{n}") for n in range(MAX_TOOLS + 1)], None, f"at most {MAX_TOOLS}"),
        ([tool(f"f{n}", parameters={"description": "x" * 65_000}) for n in range(17)], None, f"at most {MAX_SCHEMAS}"),
        (None, "required", "tool_choice: needs tools"),
        ([], NAMED, "tool_choice: needs tools"),
        ([tool()], "any", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice.function"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "'g' is not among the tools"),
        ([tool()], {"type": "allowed_tools"}, "tool_choice"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        tool_use(tools, choice, None)
    assert caught.value.status == 400 and words in caught.value.message
    assert caught.value.param == ("tool_choice" if "tool_choice" in caught.value.message else "tools")


def call(**changes: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | changes


def called(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "tool_calls": [call()]}], "messages[0].tool_calls"),
        ([called(call(), call(type="code"))], "messages[0].tool_calls[1].type"),
        ([called(call(function="f"))], "tool_calls[0].function"),
        ([called(call(function={"name": "a b"}))], "tool_calls[0].function.name"),
        ([called(call(function={"name": "f", "arguments": [1]}))], "tool_calls[0].function.arguments"),
        ([called(call(id=None))], "tool_calls[0].id"),
        ([called(*[call()] * 129)], "at most 128"),
        ([called(call()), {"role": "tool", "content": "x"}], "messages[1].tool_call_id: required"),
        ([called(call()), {"role": "tool", "content": "x", "tool_call_id": "c2"}], "no earlier call has the id 'c2'"),
    ],
)
def test_a_wrong_call_in_the_conversation_is_a_400_that_names_its_place(messages: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_calls(messages)
    assert caught.value.status == 400 and words in caught.value.message


def test_results_may_come_in_any_order_and_alone() -> None:
    results = [{"role": "tool", "content": "", "tool_call_id": name} for name in ("c2", "c1")]
    check_calls([called(call(), call(id="c2")), *results])
    check_calls([results[0]])
