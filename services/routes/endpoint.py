"""What all generation endpoints do around their own fields: body, model, limits, sampling, then the generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from protocol.messages import Limits, SamplingParams
from services import schema
from services.bodies import may_answer_unread
from services.choice import TextOptions
from services.errors import invalid, unavailable
from services.formats import Head
from services.generate import Generator, Job, Prompt
from services.journal import Call, Terms
from services.ranges import MAX_NAME, ranged, within
from services.sampling import build_params, milliseconds, output_limit, room, seed_of, stop_strings
from services.sse import DisconnectWatch, Outlet
from services.state import ApiState
from services.structured import form_of

R = TypeVar("R", bound=schema.Sampling)


class GenerationEndpoint(ABC, Generic[R]):
    """An ASGI application for one POST route. Subclasses turn the body into a Job."""

    request_type: type[R]
    id_prefix = ""

    def __init__(self, state: ApiState) -> None:
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError or ClientGone for the middleware."""
        state = self.state
        if state.draining:
            raise unavailable("The server is shutting down", "shutting_down")
        if may_answer_unread(scope):
            self._turn_away()
        body = await state.read_body(scope, receive)
        self._turn_away()
        call = Call.of(scope["state"], state.clock)
        with DisconnectWatch(receive, call):
            try:
                await self.respond(await self._job(body, call), call, Outlet(scope, send))
            finally:
                self.over(call)

    async def respond(self, job: Job, call: Call, send: Send) -> None:
        """Run the job and send the answer."""
        generator = Generator(self.state, call, job)
        await generator.begin()
        await generator.answer(send)

    def over(self, call: Call) -> None:
        """Let go of a call, whatever happened to it."""
        call.charge(sum(len(generation.tokens) for generation in call.generations))
        self.state.engine.release(call)
        if self.state.recording is not None:
            self.state.recording.over(call)
        call.close()

    def _turn_away(self, priority: int | None = None) -> None:
        """ApiError 503 for a request that the scheduler would refuse; the earlier, the less it costs."""
        refusal = self.state.engine.door.refusal(priority)
        if refusal is not None:
            self.state.metrics.turned_away()
            raise refusal

    async def _job(self, body: bytes, call: Call) -> Job:
        request, unknown = schema.decode(body, self.request_type)
        self.state.note_unknown(unknown, call.ignored)
        return await self._checked(request, call)

    async def _checked(self, request: R, call: Call) -> Job:
        """The job for a request whose types are right."""
        asked = within(request.priority, None, "priority")
        request.priority = call.account.urgency(asked) if call.account is not None else asked
        self._turn_away(request.priority or 0)
        self.state.check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options: only allowed with stream", "stream_options")
        if request.cache_salt == "":
            raise invalid("cache_salt: must not be empty", "cache_salt")
        names = {"cache_salt": request.cache_salt, "user": request.user, "routing_key": request.routing_key}
        for name, text in names.items():
            if text is not None and len(text) > MAX_NAME:
                raise invalid(f"{name}: {len(text)} characters, at most {MAX_NAME} are allowed", name, "out_of_range")
        return await self.prepare(request, await self.state.engine.chain.wait_for_limits(), call)

    @abstractmethod
    async def prepare(self, request: R, limits: Limits, call: Call) -> Job:
        """The job for a body; raises ApiError for anything that can't be served."""

    # --- shared steps ---------------------------------------------------------------------------------------

    def head(self, call: Call) -> Head:
        """A new answer's id (the request's with the endpoint's prefix, as vLLM makes it), time and model."""
        return Head(f"{self.id_prefix}-{call.label}", int(self.state.wall()), self.state.model)

    def terms(self, request: R, call: Call) -> Terms:
        """How the request is queued. With API keys the key stands for the tenant, else the user does."""
        return Terms(
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            tenant=call.tenant or request.user or "",
            timeout_ms=milliseconds(request.timeout, "timeout"),
            deadline_ms=milliseconds(request.deadline, "deadline"),
            routing_key=request.routing_key or "",
        )

    async def grammar(self, request: R) -> str:
        """The grammar that the answer has to keep, checked; "" if there is none."""
        form = form_of(request)
        return "" if form is None else await self.state.grammars.check(form)

    def params(self, request: R, limits: Limits, logprobs: int, grammar: str) -> SamplingParams:
        """Sampling parameters without a token limit, with a seed."""
        seed = seed_of(request)
        if seed is None:
            seed = self.state.engine.draw_seed()
        ends = self.state.eos_token_ids
        return build_params(request, self.state.defaults, limits, ends, logprobs, seed, grammar)

    def listed(self, request: R, limits: Limits) -> int:
        """How many alternatives vLLM's list of the prompt's log-probabilities has; -1: there is none."""
        listed: int = ranged(request.prompt_logprobs, -1, "prompt_logprobs", 0, limits.max_logprobs)
        if listed >= 0 and request.stream:
            raise invalid("prompt_logprobs: not available with stream", "prompt_logprobs")
        return listed

    def options(self, request: R, logprobs: int, *, silent: bool = False) -> TextOptions:
        """How tokens become text. `silent`: none is wanted."""
        return TextOptions(
            silent=silent,
            skip_special_tokens=request.skip_special_tokens is not False,
            stop=stop_strings(request.stop),
            include_stop=bool(request.include_stop_str_in_output),
            logprobs=logprobs >= 0,
        )

    def prompt(
        self,
        ids: list[int],
        request: R,
        params: SamplingParams,
        limits: Limits,
        asked: int | None,
        default: int | None,
        names: tuple[str, str],
    ) -> Prompt:
        """A prompt with its limit; `names` are the fields of the limit and of the prompt."""
        ids = self._truncate(ids, request.truncate_prompt_tokens, limits)
        most = output_limit(asked, default, len(ids), limits, *names)
        if params.min_tokens > most:
            raise invalid(
                f"min_tokens: {params.min_tokens} is more than the limit of {most} output tokens", "min_tokens"
            )
        return Prompt(ids, msgspec.structs.replace(params, max_tokens=most))

    def _truncate(self, ids: list[int], keep: int | None, limits: Limits) -> list[int]:
        """The last `keep` ids; -1 keeps what the model's context can hold with one output token."""
        if keep is None:
            return ids
        if keep == -1:
            keep = limits.max_model_len - 1
        if not 1 <= keep <= limits.max_model_len:
            raise invalid(
                f"truncate_prompt_tokens: {keep} is neither -1 nor in [1, {limits.max_model_len}]",
                "truncate_prompt_tokens",
                "out_of_range",
            )
        return ids[-keep:]

    def check_room(self, num_prompt: int, limits: Limits, param: str) -> None:
        """ApiError 400 if a prompt of that many tokens can never run."""
        room(num_prompt, limits, param)
