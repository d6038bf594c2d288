"""Which formats a model's template shows, and what of special tokens its readers and clients see."""

from __future__ import annotations

import string

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from services.errors import ApiError
from services.text.chat_template import ChatTemplate
from services.text.detokenizer import Detokenizer
from services.text.parts import TokenizerParts
from services.text.tokenizer import Tokenizer
from services.tools.dialect import Dialect, call_id
from services.tools.request import ToolUse

USE = ToolUse([], {"now": {"type": "object"}})
SPECIAL = ["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|other|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A character a token, and markers that are special tokens."""
    vocab = {text: index for index, text in enumerate([*SPECIAL, *string.printable])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(TokenizerParts(backend=backend, bos_token_id=0, eos_token_ids=(1,), max_context=None))


def dialect(tokenizer: Tokenizer, source: str, parser: str = "auto", thoughts: str = "auto") -> Dialect:
    return Dialect.of(tokenizer, ChatTemplate(source), parser, thoughts)


@pytest.mark.parametrize(
    ("source", "parser", "reasoning"),
    [
        ("{{ tools }}<tool_call></tool_call>", "hermes", ""),
        ("{{ tools }}<tool_call><think></think>", "hermes", "qwen3"),
        ("{{ tools }}<tool_call><function=x><parameter=y>", "qwen3_coder", ""),
        ('{{ tools }}{{ "<|python_tag|>" }}', "llama3_json", ""),
        ('{{ tools }}{"name": function name, "parameters": dictionary of ...}', "llama3_json", ""),
        ("{{ tools }}[func_name1(params_name1=...)]", "pythonic", ""),
        ("{{ tools }}[TOOL_CALLS]", "mistral", ""),
        ("{{ tools }}", "", ""),
        ("{{ messages }}", "hermes", ""),
    ],
)
def test_the_template_shows_the_formats(tokenizer: Tokenizer, source: str, parser: str, reasoning: str) -> None:
    found = dialect(tokenizer, source)
    assert (found.parser, found.reasoning) == (parser, reasoning)


def test_settings_go_before_what_the_template_shows(tokenizer: Tokenizer) -> None:
    found = dialect(tokenizer, "{{ tools }}<tool_call><think></think>", "mistral", "none")
    assert (found.parser, found.reasoning) == ("mistral", "")
    assert Dialect.of(tokenizer, None, "auto", "auto").reasoning == ""


def test_tools_are_refused_if_the_format_is_unknown(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError) as caught:
        dialect(tokenizer, "{{ tools }}").fit(USE)
    assert caught.value.status == 400 and "--tool-call-parser" in caught.value.message
    assert dialect(tokenizer, "{{ tools }}").fit(None) is None


def test_calls_are_not_parallel_if_the_template_could_not_take_them_back(tokenizer: Tokenizer) -> None:
    source = "{{ tools }}<|python_tag|>{{ raise_exception('This model only supports single tool-calls at once!') }}"
    fitted = dialect(tokenizer, source).fit(USE)
    assert fitted is not None and not fitted.parallel
    assert dialect(tokenizer, "{{ tools }}<|python_tag|>").fit(USE) == USE


def test_without_tools_and_thoughts_there_is_nothing_to_read(tokenizer: Tokenizer) -> None:
    assert dialect(tokenizer, "[TOOL_CALLS]").reader(None, [], lambda: 1) is None
    assert dialect(tokenizer, "[TOOL_CALLS]").reader(USE, [], lambda: 1) is not None


def test_markers_that_are_special_tokens_reach_the_reader_and_no_other_special_token_does(tokenizer: Tokenizer) -> None:
    found = dialect(tokenizer, "{{ tools }}[TOOL_CALLS]")
    make = found.reader(USE, [], lambda: 7)
    assert make is not None
    reader = make()
    detokenizer = Detokenizer(tokenizer, shown=found.shown(USE))
    for token in tokenizer.encode("Hi<|other|>[TOOL_CALLS]now[ARGS]{}", add_special_tokens=False):
        reader.feed(detokenizer.push([token]).text)
    reader.finish()
    reasoning, content, calls = reader.take()
    assert (reasoning, content, [call.name for call in calls]) == ("", "Hi", ["now"])


@pytest.mark.parametrize(("hide", "content"), [(True, "Hi no"), (False, "Hi[TOOL_CALLS] no")])
def test_a_special_marker_without_a_call_shows_only_if_special_tokens_do(
    tokenizer: Tokenizer, hide: bool, content: str
) -> None:
    make = dialect(tokenizer, "{{ tools }}[TOOL_CALLS]").reader(USE, [], lambda: 7, hide_special=hide)
    assert make is not None
    reader = make()
    reader.feed("Hi[TOOL_CALLS] no")
    reader.finish()
    assert reader.take().content == content


@pytest.mark.parametrize(
    ("parser", "prompt", "opened"),
    [
        ("qwen3", "say<think>\n", True),
        ("qwen3", "say", False),
        ("qwen3", "say<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "say", True),
        ("deepseek_r1", "say<think>\n", True),
        ("deepseek_r1", "say<think>\n\n</think>\n\n", False),
    ],
)
def test_the_prompts_end_tells_whether_a_thought_has_begun(
    tokenizer: Tokenizer, parser: str, prompt: str, opened: bool
) -> None:
    found = dialect(tokenizer, "{{ messages }}", "none", parser)
    assert found.opened(tokenizer.encode(prompt, add_special_tokens=False)) is opened


def test_ids_of_calls_are_nine_letters_and_digits() -> None:
    ids = {call_id(number) for number in (0, 1, 2**63 - 1, 61, 62)}
    assert len(ids) == 5
    assert all(len(name) == 9 and name.isalnum() and name.isascii() for name in ids)


def test_marks_in_a_grammar_are_tokens_where_the_model_has_them(tokenizer: Tokenizer) -> None:
    found = dialect(tokenizer, "{{ tools }}[TOOL_CALLS]")
    assert found.as_token("[TOOL_CALLS]") == "<[2]>"
    assert found.as_text("[TOOL_CALLS]") == '"[TOOL_CALLS]"' == dialect(tokenizer, "x").as_token("[TOOL_CALLS]")
