"""Tokenizing and template rendering that never holds up the event loop: short texts inline, long ones in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.errors import ApiError, invalid
from services.text.chat_template import ChatTemplate, TemplateError
from services.text.tokenizer import TextError, Tokenizer

INLINE_CHARACTERS = 2000
MESSAGE_CHARACTERS = 100  # what a message costs to render beside its text

T = TypeVar("T")


class TextPool:
    """The tokenizer and the chat template of the served model, with a few threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, threads: int) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")

    def close(self) -> None:
        """Let the threads end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, param: str) -> list[list[int]]:
        """The ids of each text. Raises ApiError 400 for text that can't be tokenized."""

        def work() -> list[list[int]]:
            return self.tokenizer.encode_many(texts, add_special_tokens)

        try:
            return await self._do(work, sum(map(len, texts)))
        except TextError as error:
            raise invalid(f"{param}: {error}", param, "invalid_unicode") from error

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids that exist."""
        return await self._do(lambda: self.tokenizer.decode(token_ids, skip_special_tokens), 4 * len(token_ids))

    async def render(
        self,
        messages: list[dict[str, Any]],
        size: int,
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        kwargs: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt of a conversation with `size` characters. Raises ApiError 400 with what the template says."""
        template = self.template
        if template is None:
            raise ApiError(
                400,
                "messages: the model has no chat template, use /v1/completions",
                code="no_chat_template",
                param="messages",
            )

        def work() -> str:
            return template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **kwargs,
            )

        try:
            return await self._do(work, size + MESSAGE_CHARACTERS * len(messages))
        except TemplateError as error:
            raise invalid(f"messages: {error}", "messages", "chat_template_error") from error

    async def _do(self, work: Callable[[], T], size: int) -> T:
        if size <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
