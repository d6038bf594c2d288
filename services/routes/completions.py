"""POST /v1/completions."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from protocol.messages import Limits
from services.errors import invalid, unsupported
from services.formats import CompletionFormat
from services.generate import Job
from services.journal import Call
from services.prompt_logprobs import ToldPrompts
from services.ranges import MAX_PROMPTS, ranged
from services.routes.endpoint import GenerationEndpoint
from services.sampling import check_ids, num_choices
from services.schema import CompletionRequest, decode_field

DEFAULT_MAX_TOKENS = 16

P = TypeVar("P")


class Completions(GenerationEndpoint[CompletionRequest]):
    """Text or token ids in, text out."""

    request_type = CompletionRequest
    id_prefix = "cmpl"

    async def prepare(self, request: CompletionRequest, limits: Limits, call: Call) -> Job:
        """Check everything and build the job."""
        logprobs: int = ranged(request.logprobs, -1, "logprobs", 0, limits.max_logprobs)
        listed, echoed = self.listed(request, limits), logprobs if request.echo else -1
        silent = request.max_tokens == 0 and (bool(request.echo) or listed >= 0)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise unsupported("best_of", "best_of other than n")
        texts = self._texts(request)
        num_prompts = len(texts) if texts is not None else 0
        ids: list[list[int]]
        if texts is not None:
            n = num_choices(request, num_prompts, self.state.config.max_choices)
            ids = await self.state.text.encode(texts, request.add_special_tokens is not False, "prompt")
        else:
            ids = self._ids(request, limits)
            n = num_choices(request, len(ids), self.state.config.max_choices)
        params = self.params(request, limits, logprobs, await self.grammar(request))
        params = msgspec.structs.replace(params, prompt_logprobs=max(listed, echoed))
        most = 1 if silent else request.max_tokens
        places = [f"prompt[{index}]" for index in range(len(ids))] if len(ids) > 1 else ["prompt"]
        prompts = [
            self.prompt(one, request, params, limits, most, DEFAULT_MAX_TOKENS, ("max_tokens", place))
            for one, place in zip(ids, places, strict=True)
        ]
        shown: list[str] = []
        if request.echo and texts is not None and request.truncate_prompt_tokens is None:
            shown = texts
        elif request.echo:
            shown = [await self.state.text.decode(p.ids, request.skip_special_tokens is not False) for p in prompts]
        tokenizer, options = self.state.text.tokenizer, request.stream_options
        told = None
        if max(listed, echoed) >= 0:
            told = ToldPrompts(tokenizer, [p.ids for p in prompts], n, listed=listed, echoed=echoed, texts=shown)
        return Job(
            prompts=prompts,
            n=n,
            options=self.options(request, logprobs, silent=silent),
            format=CompletionFormat(
                self.head(call),
                tokenizer,
                logprobs=logprobs,
                usage_null=bool(options and options.include_usage),
                token_ids=bool(request.return_token_ids),
                echo=[text for text in shown for _ in range(n)],
                told=told,
            ),
            told=told,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            chunk_token_ids=bool(request.return_token_ids),
            terms=self.terms(request, call),
        )

    def _texts(self, request: CompletionRequest) -> list[str] | None:
        """The prompts if they are text, None if they are token ids."""
        raw = bytes(request.prompt).lstrip()
        if not raw or raw == b"null":
            raise invalid("prompt: required", "prompt", "missing")
        if raw[:1] == b'"':
            return [decode_field(request.prompt, str, "prompt")]
        if raw[:1] != b"[":
            raise invalid("prompt: expected a string, strings, token ids or lists of token ids", "prompt")
        if raw[1:].lstrip()[:1] == b'"':
            return _bounded(decode_field(request.prompt, list[str], "prompt"))
        return None

    def _ids(self, request: CompletionRequest, limits: Limits) -> list[list[int]]:
        start = bytes(request.prompt).lstrip()[1:].lstrip()[:1]
        if start == b"[":
            lists: list[list[int]] = _bounded(decode_field(request.prompt, list[list[int]], "prompt"))
        else:
            lists = [decode_field(request.prompt, list[int], "prompt")]
        for index, ids in enumerate(lists):
            name = f"prompt[{index}]" if start == b"[" else "prompt"
            self.check_room(len(ids) if request.truncate_prompt_tokens is None else min(1, len(ids)), limits, "prompt")
            check_ids(ids, name, limits.vocab_size)
        return lists


def _bounded(prompts: list[P]) -> list[P]:
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt: {len(prompts)} prompts, at most {MAX_PROMPTS}", "prompt", "out_of_range")
    return prompts
