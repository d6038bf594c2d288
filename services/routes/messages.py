"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over what serves chat completions."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from starlette.types import Receive, Scope, Send

from services import schema
from services.anthropic.formats import MessagesFormat
from services.anthropic.schema import CountRequest, MessagesRequest
from services.anthropic.translate import CHAT_NAMES, CHAT_WORDS, conversation, to_chat
from services.bodies import send_body
from services.conversation import tokenize_chat
from services.errors import ApiError, invalid
from services.generate import Job
from services.journal import Call
from services.routes.chat import Chat
from services.schema import ChatRequest
from services.state import ApiState
from services.tools.request import tool_use
from services.translate import rename


class Messages(Chat):
    """Turns in, a message of blocks out."""

    async def _job(self, body: bytes, call: Call) -> Job:
        request, unknown = schema.decode(body, MessagesRequest)
        self.state.note_unknown(unknown, call.ignored)
        chat = to_chat(request)
        assert request.max_tokens is not None
        try:
            job = await self._checked(chat, call)
        except ApiError as error:
            rename(error, CHAT_NAMES, CHAT_WORDS)
            raise
        return self._limited(job, request.max_tokens, call)

    def _limited(self, job: Job, asked: int, call: Call) -> Job:
        """The chat's job with Anthropic's limit, which is always there: what can't fit is cut and said at the end."""
        (prompt,) = job.prompts
        most = min(asked, prompt.params.max_tokens)
        if prompt.params.min_tokens > most:
            raise invalid(f"min_tokens: {prompt.params.min_tokens} is more than the limit of {most}", "min_tokens")
        return replace(
            job,
            prompts=[replace(prompt, params=msgspec.structs.replace(prompt.params, max_tokens=most))],
            format=MessagesFormat(self.state.model, call.label, len(prompt.ids), cut=most < asked),
            include_usage=True,
        )


class CountTokens:
    """How many tokens the prompt of a message would have."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `{"input_tokens"}`."""
        body = await self._state.read_body(scope, receive)
        request, unknown = schema.decode(body, CountRequest)
        self._state.note_unknown(unknown, scope["state"]["ignored"])
        self._state.check_model(request.model)
        chat: ChatRequest = conversation(request)
        try:
            ids = await self._ids(chat)
        except ApiError as error:
            rename(error, CHAT_NAMES, CHAT_WORDS)
            raise
        await send_body(send, msgspec.json.encode({"input_tokens": len(ids)}))

    async def _ids(self, chat: ChatRequest) -> list[int]:
        return await tokenize_chat(
            self._state.text,
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            kwargs=chat.chat_template_kwargs,
            add_special_tokens=chat.add_special_tokens,
            tools=tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls),
        )
