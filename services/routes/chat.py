"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from protocol.messages import Limits
from services.choice import TextOptions
from services.conversation import template_kwargs, tokenize_chat
from services.errors import invalid
from services.formats import ChatFormat
from services.generate import Job
from services.journal import Call
from services.prompt_logprobs import ToldPrompts
from services.ranges import ranged
from services.routes.endpoint import GenerationEndpoint
from services.sampling import num_choices
from services.schema import ChatRequest
from services.structured import form_of
from services.tools.forms import answer_grammar
from services.tools.functions import asked_tools
from services.tools.request import ToolUse


class Chat(GenerationEndpoint[ChatRequest]):
    """A conversation in, the assistant's message out."""

    request_type = ChatRequest
    id_prefix = "chatcmpl"

    async def prepare(self, request: ChatRequest, limits: Limits, call: Call) -> Job:
        """Check everything and build the job."""
        n = num_choices(request, 1, self.state.config.max_choices)
        logprobs, listed = self._logprobs(request, limits), self.listed(request, limits)
        name, asked = self._max_tokens(request)
        silent = asked == 0 and listed >= 0
        params = self.params(request, limits, logprobs, "")
        form = form_of(request)
        dialect = self.state.dialect
        use = dialect.fit(asked_tools(request, request.parallel_tool_calls))
        ids = await tokenize_chat(
            self.state.text,
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=template_kwargs(request.reasoning_effort, request.chat_template_kwargs),
            add_special_tokens=request.add_special_tokens,
            tools=use,
        )
        grammar = await answer_grammar(self.state.grammars.check, dialect, use, form, ids)
        params = msgspec.structs.replace(params, grammar=grammar, prompt_logprobs=listed)
        options = request.stream_options
        prompt = self.prompt(ids, request, params, limits, 1 if silent else asked, None, (name, "messages"))
        told = ToldPrompts(self.state.text.tokenizer, [prompt.ids], 1, listed=listed) if listed >= 0 else None
        return Job(
            prompts=[prompt],
            n=n,
            options=replace(self._reading(request, logprobs, use, ids), silent=silent),
            told=told,
            format=ChatFormat(
                self.head(call),
                self.state.text.tokenizer,
                logprobs=logprobs,
                usage_null=bool(options and options.include_usage),
                token_ids=bool(request.return_token_ids),
                may_call=use is not None,
                functions=request.functions is not None,
                told=told,
            ),
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            chunk_token_ids=bool(request.return_token_ids),
            terms=self.terms(request, call),
        )

    def _reading(self, request: ChatRequest, logprobs: int, use: ToolUse | None, prompt_ids: list[int]) -> TextOptions:
        """How tokens become a message."""
        options = self.options(request, logprobs)
        reader = self.state.dialect.reader(
            use,
            prompt_ids,
            self.state.engine.draw_seed,
            show_reasoning=request.include_reasoning is not False,
            hide_special=options.skip_special_tokens,
        )
        return replace(options, reader=reader, shown=self.state.dialect.shown(use))

    def _logprobs(self, request: ChatRequest, limits: Limits) -> int:
        """How many alternatives to report; -1 for no log-probabilities."""
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
        if not request.logprobs:
            return -1
        return int(ranged(request.top_logprobs, 0, "top_logprobs", 0, limits.max_logprobs))

    def _max_tokens(self, request: ChatRequest) -> tuple[str, int | None]:
        """The limit and the field it came from; the new name wins, a contradiction is an error."""
        new, old = request.max_completion_tokens, request.max_tokens
        if new is None:
            return "max_tokens", old
        if old is not None and old != new:
            raise invalid(
                f"max_completion_tokens: {new} contradicts max_tokens: {old}; send one of them",
                "max_completion_tokens",
            )
        return "max_completion_tokens", new
