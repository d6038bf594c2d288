"""How tools, calls and results get into the prompt, with templates that know tools and with one that doesn't.

The templates are small ones of our own, which read messages the way the published ones of each family do.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.text.chat_template import ChatTemplate
from services.tools.history import spelled_out, template_messages

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Ask f"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "aaaaaaaa1", "type": "function", "function": {"name": "f", "arguments": '{"a": "漢"}'}},
            {"id": "aaaaaaaa2", "type": "function", "function": {"name": "f", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "aaaaaaaa1", "content": "1"},
    {"role": "tool", "tool_call_id": "aaaaaaaa2", "content": [{"type": "text", "text": "2"}]},
]

HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
)
LLAMA = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id|length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{{ c.function | tojson }}{% endfor %}]{% elif m.role == "tool" %}{{ m.tool_call_id }}={{ m.content }}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CODER = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>{% endfor %}"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (HERMES, ['<tool_call>f {"a": "漢"}</tool_call>', "<tool_call>f {}</tool_call>", "<tool>1", "<tool>2"]),
        (LLAMA, ['{"name": "f", "parameters": {"a": "漢"}}', '"parameters": {}']),
        (MISTRAL, ['[TOOL_CALLS][{"name": "f", "arguments": {"a": "漢"}}', "aaaaaaaa1=1", "aaaaaaaa2=2"]),
        (CODER, ["<function=f><parameter=a>漢</parameter>"]),
    ],
)
def test_templates_get_arguments_as_objects(template: str, words: list[str]) -> None:
    text = ChatTemplate(template).render(template_messages(HISTORY), tools=TOOLS)
    for word in words:
        assert word in text
    assert "None" not in text


def test_ids_from_elsewhere_are_made_fit_for_templates_that_count_their_letters() -> None:
    history = json.loads(json.dumps(HISTORY).replace("aaaaaaaa1", "call_0123456789").replace("aaaaaaaa2", "call-2"))
    shown = template_messages(history, MISTRAL)
    ids = [call["id"] for call in shown[1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in shown[2:]] and len(set(ids)) == 2
    assert "TOOL_CALLS" in ChatTemplate(MISTRAL).render(shown)
    assert template_messages(HISTORY, MISTRAL) == template_messages(HISTORY)
    assert template_messages(history, HERMES)[1]["tool_calls"][0]["id"] == "call_0123456789"


def test_arguments_that_are_an_object_already_or_no_json_stay() -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": value}} for value in ({"a": 1}, "{broken", "[1]")]
    (message,) = template_messages([{"role": "assistant", "tool_calls": calls}])
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"a": 1}, "{broken", "[1]"]


def test_the_messages_of_the_client_are_not_changed() -> None:
    before = json.dumps(HISTORY)
    template_messages(HISTORY)
    spelled_out(HISTORY, TOOLS)
    assert json.dumps(HISTORY) == before


def test_a_template_without_tools_gets_them_described_and_the_calls_as_text() -> None:
    system, user, assistant, results = spelled_out(HISTORY, TOOLS)
    assert system["role"] == "system" and json.dumps(TOOLS[0]) in system["content"]
    assert user == HISTORY[0]
    assert assistant["content"].startswith('<tool_call>\n{"name": "f", "arguments": {"a": "漢"}}\n</tool_call>')
    assert "tool_calls" not in assistant
    assert results["role"] == "user"
    assert results["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_the_description_joins_a_system_message(content: Any) -> None:
    first, *rest = spelled_out([{"role": "system", "content": content}, HISTORY[0]], TOOLS)
    assert len(rest) == 1
    text = first["content"] if isinstance(content, str) else "".join(part["text"] for part in first["content"])
    assert text.startswith("Be brief.") and "<tools>" in text


def test_a_conversation_without_tools_and_calls_is_left_alone() -> None:
    messages = [HISTORY[0], HISTORY[2]]
    assert spelled_out(messages, None) == messages


def test_a_template_that_reads_tools_is_known_by_it() -> None:
    assert ChatTemplate(HERMES).takes_tools
    assert not ChatTemplate(LLAMA).takes_tools
    assert ChatTemplate({"default": LLAMA, "tool_use": HERMES}).takes_tools
    assert not ChatTemplate("{% set tools = [] %}{{ tools }}").takes_tools
