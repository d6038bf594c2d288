"""Runs one generation request from its Submits to the last byte, streamed or whole. All endpoints use it.

Everything that can be refused is refused before the headers of a stream are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.types import Send

from protocol.columns import pack_i32
from protocol.messages import SamplingParams
from services.bodies import ClientGone, send_body
from services.choice import Choice, Piece, TextOptions
from services.errors import ApiError, internal
from services.formats import Format, Usage, Whole
from services.journal import Call, Terms
from services.sse import EventStream
from services.state import ApiState

log = logging.getLogger("triptych.api")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and how each of its choices samples."""

    ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has passed all checks. Choice `p * n + c` is choice `c` of prompt `p`."""

    prompts: Sequence[Prompt]
    n: int
    options: TextOptions
    format: Format
    terms: Terms
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    chunk_token_ids: bool = False


class Generator:
    """Drives one job. The caller releases the call afterwards, whatever happened."""

    def __init__(self, state: ApiState, call: Call, job: Job) -> None:
        self._state = state
        self._call = call
        self._job = job
        self._choices: list[Choice] = []
        self._prompt_ids: list[list[int]] = []

    async def begin(self) -> None:
        """Submit, and wait until it is taken. Raises ApiError for a refusal, ClientGone if nobody is left."""
        if self._call.disconnected:
            raise ClientGone
        self._submit()
        await self._decided()

    async def answer(self, send: Send) -> None:
        """Send what comes. Raises ApiError while a status can still be sent, ClientGone if nobody is left."""
        if self._job.stream:
            await self._stream(EventStream(send, self._call, self._job.format))
        else:
            await self._whole(send)

    def _submit(self) -> None:
        job, engine = self._job, self._state.engine
        for prompt in job.prompts:
            column = pack_i32(prompt.ids)
            for index in range(job.n):
                generation = engine.submit(
                    self._call,
                    column,
                    _with_choice(prompt.params, index),
                    job.terms,
                )
                choice = Choice(generation, self._state.text.tokenizer, prompt.ids, job.options, engine.stop)
                self._choices.append(choice)
                self._prompt_ids.append(prompt.ids)

    async def _decided(self) -> None:
        """Wait until the scheduler has taken every choice; its refusal of one refuses the request.

        Where waiting may end in a refusal, a stream's headers also wait for the first token of every choice: with a
        limit of its time, or with a grammar, which the runner may not be able to compile.
        """
        bound = self._job.terms.timeout_ms or self._state.engine.chain.bounds_waiting
        grammar = any(prompt.params.grammar for prompt in self._job.prompts)
        hold = self._job.stream and bool(bound or grammar)
        while True:
            for choice in self._choices:
                if choice.error is not None:
                    raise choice.error
            generations = [choice.generation for choice in self._choices]
            if all(generation.begun if hold else generation.decided for generation in generations):
                return
            await self._changed()

    async def _changed(self) -> list[Choice]:
        news = await self._call.changed()
        if self._call.disconnected:
            raise ClientGone
        return [self._choices[generation.index] for generation in news]

    async def _whole(self, send: Send) -> None:
        wholes = [Whole("", [], [], "", None, ids) for ids in self._prompt_ids]
        texts: list[list[str]] = [[] for _ in wholes]
        news = list(self._choices)
        while True:
            for choice in news:
                piece, index = choice.advance(), choice.generation.index
                if choice.error is not None:
                    raise choice.error
                whole = wholes[index]
                texts[index].append(piece.text)
                whole.reasoning += piece.reasoning
                whole.add_calls(piece.calls)
                whole.token_ids += piece.token_ids
                whole.logprobs += piece.logprobs
                if piece.finish_reason is not None:
                    whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
            if all(choice.done for choice in self._choices):
                break
            news = await self._changed()
        for whole, parts in zip(wholes, texts, strict=True):
            whole.text = "".join(parts)
        await self._costs()
        await send_body(send, self._job.format.answer(wholes, self._usage()))

    async def _stream(self, stream: EventStream) -> None:
        await stream.start()
        try:
            await stream.events((self._job.format.opening(),))
            await self._pump(stream)
            last = b""
            if self._job.include_usage:
                await self._costs()
                last = self._job.format.usage_chunk(self._usage())
            await stream.finish(last)
        except ApiError as error:
            await stream.fail(error)
        except ClientGone:
            raise
        except Exception:
            log.exception("a stream broke")
            await stream.fail(internal())

    async def _pump(self, stream: EventStream) -> None:
        begun: set[int] = set()
        news = list(self._choices)
        while True:
            events: list[bytes] = []
            failed: ApiError | None = None
            for choice in news:
                piece, index = choice.advance(), choice.generation.index
                if piece and index not in begun:
                    begun.add(index)
                    events.append(self._job.format.first(index, self._prompt_ids[index]))
                if self._worth_sending(piece):
                    usage = self._usage() if self._job.continuous_usage else None
                    events.append(self._job.format.chunk(index, piece, usage))
                failed = failed or choice.error
            await stream.events(events)
            if failed is not None:
                raise failed
            if all(choice.done for choice in self._choices):
                return
            news = await self._changed()
            await stream.ping()

    def _worth_sending(self, piece: Piece) -> bool:
        return bool(
            piece.shown or piece.finish_reason or piece.logprobs or (piece.token_ids and self._job.chunk_token_ids)
        )

    async def _costs(self) -> None:
        """Wait for what stopped choices cost; the engine bounds the wait."""
        while any(choice.generation.finished is None for choice in self._choices):
            await self._changed()
            self._call.ping_due = False

    def _usage(self) -> Usage:
        cached = 0
        for choice in self._choices[:: self._job.n]:
            if choice.generation.finished is not None:
                cached += min(choice.generation.finished.num_cached_tokens, choice.generation.num_prompt_tokens)
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self._job.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=cached,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices),
        )


def _with_choice(params: SamplingParams, choice: int) -> SamplingParams:

    return params if choice == params.choice else msgspec.structs.replace(params, choice=choice)
