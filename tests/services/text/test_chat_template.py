"""Chat templates: byte for byte what transformers renders, within bounds, with clear refusals."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from services.text.chat_template import ChatTemplate, TemplateError
from services.text.tokenizer import Tokenizer

Messages = list[dict[str, Any]]

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Exercises what the environment adds: generation blocks, loop controls, macros, dict, whitespace control.
EXTRAS = """
{% macro show(m) %}<{{ m.role }}>{% endmacro %}
    {% for m in messages %}
        {% if m.role == 'skip' %}{% continue %}{% endif %}
        {% if loop.index > 3 %}{% break %}{% endif %}
{{ show(m) }}{% generation %}{{ m.content }}{% endgeneration %}

    {% endfor %}
{% set d = dict(a=1, b="<&>") %}
{{ d | tojson }} {{ range(3) | list | tojson }} {{ "é漢" | tojson }} {{ pad_token }}
"""

# Reads content parts itself and takes strings too, like the templates of multimodal families.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
PARTS_ONLY = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}[{{ p['text'] }}]{% endfor %}{% endfor %}"

CHAT: Messages = [
    {"role": "user", "content": "  What is 1 < 2 & 'x'? 漢 "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTrue.  "},
    {"role": "user", "content": 'And "y"?\n\n'},
]
SYSTEM: Messages = [{"role": "system", "content": " Be brief.\n"}, *CHAT]
TOOL_CHAT: Messages = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "call it",
        "refusal": None,
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "get", "arguments": {"city": "Zürich <&>"}}},
        ],
    },
    {"role": "tool", "content": "5°", "tool_call_id": "c1"},
]
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "<b> & 'q'", "parameters": {"type": "object"}}}
]


def reference(template: str, messages: Messages, **kwargs: Any) -> str:
    """What transformers renders."""
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


def ours(template: str, messages: Messages, **kwargs: Any) -> str:
    return ChatTemplate(template, "<s>", "</s>", special_tokens={"pad_token": "<pad>"}).render(messages, **kwargs)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "kwargs"),
    [
        (LLAMA3, CHAT, {"date_string": "26 Jul 2024"}),
        (LLAMA3, SYSTEM, {"date_string": "26 Jul 2024", "tools": TOOLS}),
        (LLAMA3, TOOL_CHAT, {"date_string": "26 Jul 2024", "tools": TOOLS}),
        (MISTRAL, CHAT, {}),
        (QWEN3, CHAT, {}),
        (QWEN3, SYSTEM, {"enable_thinking": False}),
        (QWEN3, TOOL_CHAT, {"tools": TOOLS, "documents": [{"title": "t", "text": "x"}]}),
        (EXTRAS, [*SYSTEM, {"role": "skip", "content": "x"}], {}),
        (PARTS, CHAT, {}),
    ],
)
def test_rendering_matches_transformers(
    template: str, messages: Messages, kwargs: dict[str, Any], add_generation_prompt: bool
) -> None:
    kwargs = kwargs | {"add_generation_prompt": add_generation_prompt}
    assert ours(template, messages, **kwargs) == reference(template, messages, **kwargs)


@pytest.mark.parametrize("messages", [CHAT, SYSTEM, CHAT[:1], [{"role": "banana", "content": "x"}]])
def test_the_real_models_template_matches_transformers(smollm2: Tokenizer, messages: Messages) -> None:
    template = ChatTemplate.of(smollm2)
    assert template is not None and smollm2.chat_template is not None
    expected = reference(smollm2.chat_template, messages, add_generation_prompt=True)
    assert template.render(messages) == expected


@pytest.mark.parametrize("template", [LLAMA3, MISTRAL, QWEN3, PARTS])
@pytest.mark.parametrize("final", ["The answer is", "The answer is  ", "\n x", "a</think>b"])
def test_continuing_the_final_message_matches_transformers(template: str, final: str) -> None:
    messages = [*CHAT[:1], {"role": "assistant", "content": final}]
    kwargs = {"continue_final_message": True, "date_string": "x"}
    try:
        expected = reference(template, messages, **kwargs)
    except ValueError:
        with pytest.raises(TemplateError):
            ours(template, messages, **kwargs)
    else:
        assert ours(template, messages, **kwargs) == expected
        assert expected.rstrip().endswith(final.strip())


def test_continuing_a_message_of_parts_continues_its_last_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    messages = [*CHAT[:1], {"role": "assistant", "content": parts}]
    assert ours(PARTS, messages, continue_final_message=True).endswith("<assistant>ab ")
    assert parts[1] == {"type": "text", "text": "b "}  # the caller's message is left alone


def test_continuing_and_beginning_an_answer_exclude_each_other() -> None:
    with pytest.raises(TemplateError, match="exclude"):
        ours(MISTRAL, CHAT, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("final", [{"role": "assistant"}, {"role": "assistant", "content": []}])
def test_a_final_message_without_text_cannot_be_continued(final: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="text content to continue"):
        ours(PARTS, [*CHAT[:1], final], continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(TemplateError, match="drops or changes"):
        ours("{{ messages[0].content }}", CHAT[:2], continue_final_message=True)


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("template", [PARTS, LLAMA3, QWEN3])
def test_text_parts_render_like_the_plain_string(template: str, role: str) -> None:
    def conversation(content: Any) -> Messages:
        first = [] if role == "system" else CHAT[:1]
        return [*first, {"role": role, "content": content}, *CHAT[:1]]

    plain = ours(template, conversation("hello"), date_string="x")
    assert "hello" in plain
    parts = ours(template, conversation([part("hello")]), date_string="x")
    assert parts == plain
    assert "{'type'" not in parts and '"type"' not in parts


def test_string_templates_get_the_parts_joined_by_a_newline() -> None:
    messages = [{"role": "user", "content": [part("a"), part(""), part("b")]}]
    assert ours(MISTRAL, messages) == "<s>[INST] a\n\nb [/INST]"


def test_templates_that_read_parts_get_them_as_they_are() -> None:
    messages = [{"role": "user", "content": [part("a"), part("b")]}]
    assert ours(PARTS, messages) == "<user>ab"


def test_templates_that_read_only_parts_get_strings_as_one_part() -> None:
    messages = [
        *CHAT[:1],
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": [part("a"), part("b")]},
    ]
    assert ours(PARTS_ONLY, messages) == f"<user>[{CHAT[0]['content']}]<assistant>[fine]<user>[a][b]"


def test_no_parts_are_an_empty_text() -> None:
    assert ours(MISTRAL, [{"role": "user", "content": []}]) == "<s>[INST]  [/INST]"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[0].content[1] has the type 'image_url'"),
        ({"type": "dream", "text": "x"}, "the type 'dream'"),
        ({"type": "text"}, "messages[0].content[1] has no text"),
        ({"type": "text", "text": 5}, "has no text"),
        (7, "must be a content part, not int"),
    ],
)
def test_parts_that_are_not_text_are_refused_by_place(bad: Any, reason: str) -> None:
    with pytest.raises(TemplateError) as error:
        ours(PARTS, [{"role": "user", "content": [part("a"), bad]}])
    assert reason in str(error.value)


@pytest.mark.parametrize("content", [5, {"text": "x"}])
def test_content_that_is_neither_text_nor_parts_is_refused(content: Any) -> None:
    with pytest.raises(TemplateError, match="must be a string or a list of parts"):
        ours(PARTS, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (SYSTEM, "Conversation roles must alternate user/assistant/user/assistant/..."),
        ([CHAT[0], CHAT[0]], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ([CHAT[1]], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ([CHAT[0], {"role": "tool", "content": "x"}], "Only user and assistant roles are supported!"),
        ([CHAT[0], {"role": "banana", "content": "x"}], "Only user and assistant roles are supported!"),
    ],
)
def test_the_templates_own_refusal_is_the_message(messages: Messages, said: str) -> None:
    with pytest.raises(TemplateError) as error:
        ours(MISTRAL, messages)
    assert str(error.value) == said


def test_a_conversation_that_breaks_the_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="can't render these messages"):
        ours(MISTRAL, [{"role": "user", "content": "x"}, {"role": "assistant"}])
    with pytest.raises(TemplateError, match="must not be empty"):
        ours(MISTRAL, [])


def test_a_model_without_a_template_has_none(byte_fallback: Tokenizer) -> None:
    assert ChatTemplate.of(byte_fallback) is None


def test_a_template_that_is_not_jinja_names_its_line() -> None:
    with pytest.raises(TemplateError, match="not valid Jinja.*line 2"):
        ChatTemplate("a\n{% for %}")


def test_the_tool_template_is_used_when_tools_are_given() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools: {{ tools | length }}"})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "tools: 1"
    with pytest.raises(TemplateError, match="no default"):
        ChatTemplate({"rag": "x"})


def test_the_clock_is_the_callers() -> None:
    template = ChatTemplate(LLAMA3, "<s>", "</s>", now=lambda: datetime(2031, 5, 4))
    assert "Today Date: 04 May 2031" in template.render(CHAT)


def test_a_requests_own_arguments_reach_the_template_but_not_its_reserved_names() -> None:
    assert ChatTemplate("{{ mood }}{{ bos_token }}", "<s>").render(CHAT, mood="calm", bos_token="!") == "calm!"
    odd = {"self": 1, "variables": 2, "template": 3}
    assert ChatTemplate("{{ variables }}{{ template }}{{ messages | length }}").render(CHAT, **odd) == f"23{len(CHAT)}"
    with pytest.raises(TemplateError, match="can't set messages"):
        ChatTemplate("x").render(CHAT, messages=[])
