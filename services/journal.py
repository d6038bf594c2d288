"""What is known about live requests: for each generation its Submit and every token received so far.

A `Call` is one HTTP request, a `Generation` one Submit of it (one choice). Plain data and wake-ups; `services.engine`
fills it from the link, the routes read it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from protocol.columns import pack_i32
from protocol.messages import Finished, RequestStatus, SamplingParams, Submit, TokenLogprobs
from services.errors import ApiError
from services.limits import Account
from services.prompt_logprobs import PromptReport


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request wants to be queued, as in its Submit. Zero and "" leave a thing to the scheduler."""

    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    timeout_ms: int = 0
    deadline_ms: int = 0
    routing_key: str = ""


class Generation:
    """One choice of one request. Either `finished` or `error` is set, once, and nothing arrives after it."""

    __slots__ = (
        "accepted",
        "arrived",
        "call",
        "error",
        "finished",
        "first_token",
        "index",
        "last_token",
        "logprobs",
        "outcome",
        "pending",
        "prompt_report",
        "released",
        "sent",
        "stopped_at",
        "submit",
        "tokens",
    )

    def __init__(self, call: Call, index: int, submit: Submit, arrived: float) -> None:
        self.call = call
        self.index = index
        self.submit = submit
        self.arrived = arrived
        self.sent = False
        self.accepted = False
        self.pending = False
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_report = PromptReport(self.num_prompt_tokens) if submit.params.prompt_logprobs >= 0 else None
        self.finished: Finished | None = None
        self.error: ApiError | None = None
        self.first_token = 0.0
        self.last_token = 0.0
        self.stopped_at = 0.0
        self.outcome = ""
        self.released = False

    @property
    def id(self) -> int:
        """The id on the wire."""
        return self.submit.id

    @property
    def params(self) -> SamplingParams:
        """How it samples."""
        return self.submit.params

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.submit.prompt) // 4

    @property
    def over(self) -> bool:
        """True once its terminal event is known."""
        return self.finished is not None or self.error is not None

    @property
    def begun(self) -> bool:
        """True once it can't end for having waited too long."""
        return bool(self.tokens) or self.over

    @property
    def decided(self) -> bool:
        """True once the scheduler has said whether it takes the request."""
        return self.accepted or bool(self.tokens) or self.over

    def resume(self, now: float) -> Submit:
        """The Submit that makes a scheduler go on after the tokens that are here, in the time that is left."""
        submit, waited_ms = self.submit, int((now - self.arrived) * 1000)
        return msgspec.structs.replace(
            submit,
            emitted=pack_i32(self.tokens),
            resumed=self.accepted or bool(self.tokens),
            timeout_ms=submit.timeout_ms and max(1, submit.timeout_ms - waited_ms),
            deadline_ms=submit.deadline_ms and max(1, submit.deadline_ms - waited_ms),
            prompt_logprobs_from=self.prompt_report.next if self.prompt_report is not None else 0,
        )

    def settled(self) -> Finished | None:
        """The terminal event that follows from the tokens alone, if the one from the scheduler was lost with it."""
        params, count = self.params, len(self.tokens)
        if not count:
            return None
        last = self.tokens[-1]
        ends = last in params.stop_token_ids or (last in params.eos_token_ids and not params.ignore_eos)
        if ends and count > params.min_tokens:
            return Finished(self.id, RequestStatus.STOPPED, last, count)
        if count >= params.max_tokens:
            return Finished(self.id, RequestStatus.LENGTH, -1, count)
        return None

    def touch(self) -> None:
        """Tell the call's handler that there is something to read here."""
        if not self.pending:
            self.pending = True
            self.call.ready.append(self)
            self.call.wake()


class Call:
    """One HTTP request and the one thing its handler waits on. Belongs to one event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        label: str = "",
        tenant: str = "",
        account: Account | None = None,
        ignored: list[str] | None = None,
    ) -> None:
        self.clock = clock
        self.label = label
        self.tenant = tenant
        self.account = account
        self.ignored = [] if ignored is None else ignored
        self.arrived = clock()
        self.generations: list[Generation] = []
        self.ready: list[Generation] = []
        self.disconnected = False
        self.streaming = False
        self.ping_due = False
        self.last_write = self.arrived
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Callable[[], bool] | None = None
        self._offered = False

    @classmethod
    def of(cls, state: Mapping[str, Any], clock: Callable[[], float]) -> Self:
        """The call of an HTTP request, as the middleware has described it."""
        return cls(clock, state["request_id"], state.get("tenant", ""), state.get("account"), state["ignored"])

    def charge(self, tokens: int) -> None:
        """The call has cost that many tokens (more)."""
        if self.account is not None:
            self.account.spend(tokens)

    def wake(self) -> None:
        """Let `changed` return, or its reader see what there is: in the next turn of the loop, with all of this one."""
        if self._waiter is None or self._waiter.done():
            return
        if self._reader is None:
            self._waiter.set_result(None)
        elif not self._offered:
            self._offered = True
            self._waiter.get_loop().call_soon(self._offer)

    def _offer(self) -> None:
        self._offered = False
        if self._waiter is None or self._waiter.done() or self._reader is None:
            return
        try:
            taken = not self.disconnected and not self.ping_due and self._reader()
        except Exception as error:
            self._waiter.set_exception(error)
        else:
            if not taken:
                self._waiter.set_result(None)

    def keep(self, now: float, ping_s: float) -> None:
        """Ask for a ping after `ping_s` of silence on a stream."""
        if ping_s and self.streaming and now - self.last_write > ping_s:
            self.ping_due = True
            self.wake()

    def disconnect(self) -> None:
        """The client has gone away."""
        self.disconnected = True
        self.wake()

    def close(self) -> None:
        """Let go of the generations. Each of them knows its call: together they would wait for a collection."""
        self.generations.clear()
        self.ready.clear()

    async def changed(self, reader: Callable[[], bool] | None = None) -> list[Generation]:
        """The generations with news since the last call. Empty: a ping is due or the client has gone.

        A `reader` is called instead for as long as it returns True: whoever waits here sleeps on, which is what makes
        a token cheap. It gets the news with `take`, and what it raises is raised here.
        """
        if not self.ready and not self.disconnected and not self.ping_due:
            self._waiter, self._reader = asyncio.get_running_loop().create_future(), reader
            try:
                await self._waiter
            finally:
                self._waiter = self._reader = None
        return self.take()

    def take(self) -> list[Generation]:
        """The generations with news since the last time, possibly none."""
        news, self.ready = self.ready, []
        for generation in news:
            generation.pending = False
        return news


class RecentCalls:
    """The wire ids of the calls that came last, by label. A label that is used again stands for the newer call."""

    def __init__(self, size: int = 1000) -> None:
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._size = size

    def add(self, call: Call, request_id: int) -> None:
        """Note one more generation of a call."""
        if not call.generations:
            self._ids.pop(call.label, None)
        self._ids.setdefault(call.label, []).append(request_id)
        if len(self._ids) > self._size:
            self._ids.popitem(last=False)

    def ids(self, label: str) -> list[int]:
        """The ids of a call's generations in the order of its choices; empty if the call is not known (any more)."""
        return list(self._ids.get(label, ()))
