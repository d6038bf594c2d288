"""Runs one generation request from its Submits to the last byte, streamed or whole. All endpoints use it.

Everything that can be refused is refused before the headers of a stream are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.types import Send

from protocol.columns import pack_i32
from protocol.messages import SamplingParams
from services.bodies import ClientGone, send_body
from services.choice import Choice, Piece, TextOptions
from services.errors import ApiError, internal
from services.formats import Format, Usage, Whole
from services.journal import Call, Generation, Terms
from services.prompt_logprobs import ToldPrompts
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
    told: ToldPrompts | None = None


class Generator:
    """Drives one job. The caller releases the call afterwards, whatever happened."""

    def __init__(self, state: ApiState, call: Call, job: Job) -> None:
        self._state = state
        self._call = call
        self._job = job
        self._choices: list[Choice] = []
        self._prompt_ids: list[list[int]] = []
        self._begun: set[int] = set()
        self._incomplete = 0
        self._failure: ApiError | None = None

    async def begin(self) -> None:
        """Submit, and wait until it is taken. Raises ApiError for a refusal, ClientGone if nobody is left."""
        if self._call.disconnected:
            raise ClientGone
        self._submit()
        await self._decided()
        self._call.charge(sum(len(prompt.ids) for prompt in self._job.prompts))

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
        self._incomplete = len(self._choices)

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

    async def _changed(self, reader: Callable[[], bool] | None = None) -> list[Generation]:
        news = await self._call.changed(reader)
        if self._call.disconnected:
            raise ClientGone
        return news

    async def _told(self, stream: EventStream | None = None) -> None:
        """Wait for what was asked of the prompts, and write it down: an answer begins with it."""
        told, asked = self._job.told, self._choices[:: self._job.n]
        if told is None:
            return
        while True:
            reports = [choice.generation.prompt_report for choice in asked]
            for choice, report in zip(asked, reports, strict=True):
                if choice.error is not None:
                    raise choice.error
                if report is not None and not report.complete and choice.generation.over:
                    raise ApiError(500, "Log-probabilities of the prompt are missing", code="logprobs_lost")
            if all(report is None or report.complete for report in reports):
                break
            await self._changed()
            if stream is not None:
                await stream.ping()
        for number, report in enumerate(reports):
            assert report is not None
            await told.write(number, report)

    async def _whole(self, send: Send) -> None:
        await self._told()
        wholes = [Whole("", [], [], "", None, ids) for ids in self._prompt_ids]
        texts: list[list[str]] = [[] for _ in wholes]
        news = [choice.generation for choice in self._choices]
        while True:
            for generation in news:
                choice, index = self._choices[generation.index], generation.index
                piece = choice.advance()
                if choice.error is not None:
                    raise choice.error
                whole = wholes[index]
                texts[index].append(piece.text)
                whole.reasoning += piece.reasoning
                whole.add_calls(piece.calls)
                whole.token_ids += piece.token_ids
                whole.logprobs += piece.logprobs
                if piece.text:
                    whole.said = len(whole.logprobs)
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
        """Send what comes until every choice is complete. Raises ApiError if one never will be."""
        await self._told(stream)
        pour = partial(self._pour, stream)
        news = [choice.generation for choice in self._choices]
        while True:
            await stream.events(self._events(news))
            if self._failure is not None:
                raise self._failure
            if not self._incomplete:
                return
            news = await self._changed(pour)
            await stream.ping()

    def _pour(self, stream: EventStream) -> bool:
        """Write what is new at once. False: `_pump` has to wake, to wait for the client or because this is the end."""
        if not stream.writable():
            return False
        stream.write(self._events(self._call.take()))
        return self._failure is None and self._incomplete > 0

    def _events(self, news: Sequence[Generation]) -> list[bytes]:
        """What these have to say to the client: of each choice one event, the first time with what it begins with."""
        events: list[bytes] = []
        job = self._job
        for generation in news:
            index = generation.index
            choice = self._choices[index]
            piece = choice.advance()
            if index not in self._begun and piece:
                self._begun.add(index)
                usage = self._usage() if job.continuous_usage else None
                events.append(job.format.first(index, self._prompt_ids[index], usage))
            if piece.text or self._worth_sending(piece):
                events.append(job.format.chunk(index, piece, self._usage() if job.continuous_usage else None))
            if piece.finish_reason is not None:
                self._incomplete -= 1
            elif generation.error is not None:
                self._failure = self._failure or choice.error
        return events

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
    """The parameters of a choice. What is known of a prompt is told with its first one."""
    return params if choice == params.choice else msgspec.structs.replace(params, choice=choice, prompt_logprobs=-1)
