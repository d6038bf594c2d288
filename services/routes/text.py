"""POST /tokenize and /detokenize, in the shapes that vLLM gave them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from services import schema
from services.bodies import send_body
from services.conversation import template_kwargs, tokenize_chat
from services.errors import invalid
from services.sampling import check_ids
from services.state import ApiState
from services.tools.functions import asked_tools


class Tokenize:
    """Text or a conversation to token ids, exactly as generation would see it."""

    def __init__(self, state: ApiState) -> None:
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `{"count", "max_model_len", "tokens", "token_strs"}`."""
        body = await self.state.read_body(scope, receive)
        request, unknown = schema.decode(body, schema.TokenizeRequest)
        self.state.note_unknown(unknown, scope["state"]["ignored"])
        self.state.check_model(request.model)
        ids = await self._ids(request)
        limits = self.state.engine.chain.limits
        tokenizer = self.state.text.tokenizer
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": limits.max_model_len if limits else tokenizer.max_context,
            "tokens": ids,
            "token_strs": [tokenizer.id_to_token(token) for token in ids] if request.return_token_strs else None,
        }
        await send_body(send, msgspec.json.encode(answer))

    async def _ids(self, request: schema.TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt: exactly one of prompt and messages is required", "prompt")
        kwargs, tools = template_kwargs(request.reasoning_effort, request.chat_template_kwargs), asked_tools(request)
        if request.messages is None:
            special = request.add_special_tokens is not False
            return (await self.state.text.encode([request.prompt or ""], special, "prompt"))[0]
        return await tokenize_chat(
            self.state.text,
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=kwargs,
            add_special_tokens=request.add_special_tokens,
            tools=tools,
        )


class Detokenize:
    """Token ids to text."""

    def __init__(self, state: ApiState) -> None:
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `{"prompt"}`."""
        body = await self.state.read_body(scope, receive)
        request, unknown = schema.decode(body, schema.DetokenizeRequest)
        self.state.note_unknown(unknown, scope["state"]["ignored"])
        self.state.check_model(request.model)
        check_ids(request.tokens, "tokens", self.state.text.tokenizer.vocab_size)
        text = await self.state.text.decode(request.tokens, bool(request.skip_special_tokens))
        await send_body(send, msgspec.json.encode({"prompt": text}))
