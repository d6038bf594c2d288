"""Tokenizing and rendering for the routes: errors for the client, long texts in threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from services.errors import ApiError
from services.text.chat_template import ChatTemplate
from services.text.tokenizer import Tokenizer
from services.textpool import TextPool

REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}ok"


def render(pool: TextPool, messages: list[dict[str, Any]], size: int = 1) -> str:
    return asyncio.run(pool.render(messages, size, add_generation_prompt=None, continue_final_message=False, kwargs={}))


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_templates_refusal_is_a_400_with_its_words(smollm2: Tokenizer, size: int) -> None:
    pool = TextPool(smollm2, ChatTemplate(REFUSING), 1)
    with pytest.raises(ApiError, match="system role not supported") as caught:
        render(pool, [{"role": "system", "content": "x"}], size)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert render(pool, [{"role": "user", "content": "x"}], size) == "ok"
    pool.close()


def test_a_model_without_a_template_refuses_chats_and_nothing_else(smollm2: Tokenizer) -> None:
    pool = TextPool(smollm2, None, 1)
    with pytest.raises(ApiError, match="no chat template") as caught:
        render(pool, [{"role": "user", "content": "x"}])
    assert caught.value.status == 400
    assert asyncio.run(pool.encode(["x"], True, "prompt")) == [smollm2.encode("x")]
    pool.close()


def test_only_long_texts_are_tokenized_in_another_thread(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TextPool(smollm2, None, 1)
    threads: list[threading.Thread] = []
    original = smollm2.encode_many

    def watched(*arguments: Any) -> list[list[int]]:
        threads.append(threading.current_thread())
        return original(*arguments)

    monkeypatch.setattr(smollm2, "encode_many", watched)
    text = "word " * 1000
    assert asyncio.run(pool.encode(["short"], True, "prompt")) == [smollm2.encode("short")]
    assert asyncio.run(pool.encode([text], True, "prompt")) == original([text], True)
    assert threads[0] is threading.main_thread()
    assert threads[-1] is not threading.main_thread()
    pool.close()


def test_the_event_loop_turns_while_a_very_long_prompt_is_tokenized(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TextPool(smollm2, None, 1)
    original, inside, turns = smollm2.encode_many, threading.Event(), 0

    def watched(*arguments: Any) -> list[list[int]]:
        inside.set()
        try:
            return original(*arguments)
        finally:
            inside.clear()

    monkeypatch.setattr(smollm2, "encode_many", watched)

    async def tokenize() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        encoding = loop.create_task(pool.encode([" word" * 100_000], True, "prompt"))

        def turn() -> None:
            nonlocal turns
            turns += inside.is_set()
            if not encoding.done():
                loop.call_soon(turn)

        turn()
        return await encoding

    assert len(asyncio.run(tokenize())[0]) >= 100_000
    assert turns > 10, "the thread kept the interpreter's lock"
    pool.close()


def test_text_that_is_not_unicode_is_a_400(smollm2: Tokenizer) -> None:
    pool = TextPool(smollm2, None, 1)
    with pytest.raises(ApiError) as caught:
        asyncio.run(pool.encode(["a\ud83d"], True, "prompt"))
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    pool.close()
