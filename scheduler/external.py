"""Requests that wait for something that is not the GPU: a grammar, KV from elsewhere, or the rest of their prompt.

They sit apart from the queue and block nobody in it. What they wait for is asked of the runner (`orders`) or comes from
the API, and every answer is matched to its request by comparison: late ones change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from protocol.columns import pack_i32
from protocol.messages import CompileGrammar, Extend, FetchKv, GrammarStatus, KvStatus, RequestStatus
from protocol.validation import wrong_token
from scheduler.arrivals import limit_length
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler

S = RequestStatus


class External:
    """The second queue's comings and goings. `orders` are messages that the runner has yet to be sent."""

    def __init__(self, core: CoreScheduler) -> None:
        self._core = core
        self.orders: list[msgspec.Struct] = []
        self._transfers: dict[tuple[int, int], list[int]] = {}
        self._open_rows: set[int] = set()

    # --- grammars -------------------------------------------------------------------------------------------

    def wait_for_grammar(self, request: Request) -> None:
        """A request that isn't queued may enter once the (present) runner has compiled its grammar."""
        request.transition(S.WAITING_FOR_GRAMMAR)
        self._core.waiting.parked[request.id] = request
        self.order_grammar(request)

    def order_grammar(self, request: Request) -> None:
        """Ask the (present) runner."""
        self.orders.append(CompileGrammar(request.id, request.params.grammar))

    def on_grammar_status(self, status: GrammarStatus) -> None:
        """A grammar is ready, or its request ends alone."""
        core = self._core
        request = core.requests.get(status.id)
        if request is None or request.status != S.WAITING_FOR_GRAMMAR:
            return
        if status.message:
            request.end_code, request.end_message = "invalid_grammar", status.message
            core.finish(request, S.ERROR)
            return
        request.timeline.add(core.now(), "grammar_ready")
        self._queue_again(request)

    # --- KV from elsewhere ----------------------------------------------------------------------------------

    def fetch_kv(self, request: Request, blocks: list[int], num_hit: int) -> None:
        """Let a KV source fill these blocks (held already) while the request waits; the first `num_hit` are known.

        The transfer holds its blocks itself: until the runner says that it has ended, nobody else may write there,
        whatever becomes of the request.
        """
        core = self._core
        core.waiting.remove(request)
        request.let_go(core.now())
        request.transition(S.WAITING_FOR_REMOTE_KV)
        core.renew(request)
        request.blocks = blocks
        request.queued_ns = core.now()
        core.waiting.parked[request.id] = request
        fetched = blocks[num_hit:]
        self._transfers[request.id, request.incarnation] = fetched
        core.pool.hold(fetched)
        num_tokens = len(blocks) * core.block_size
        self.orders.append(FetchKv(request.id, request.incarnation, request.kv_source, num_tokens, pack_i32(fetched)))
        request.timeline.add(core.now(), "fetching_kv", tokens=num_tokens)

    def on_kv_status(self, status: KvStatus) -> None:
        """A transfer has ended: its pages are free of it, and its request goes on with what arrived."""
        self._core.pool.release(self._transfers.pop((status.id, status.incarnation), []))
        self._kv_arrived(status.id, status.incarnation, status.num_tokens, status.message)

    def expire_transfers(self) -> None:
        """Requests whose KV takes too long compute it themselves. The transfer keeps its blocks until it ends."""
        core = self._core
        limit = core.config.kv_fetch_timeout_s * 1e9
        for request in list(core.waiting.parked.values()):
            if request.status == S.WAITING_FOR_REMOTE_KV and core.now() - request.queued_ns > limit:
                self._kv_arrived(request.id, request.incarnation, 0, "timed out")

    def _kv_arrived(self, request_id: int, incarnation: int, num_tokens: int, message: str) -> None:
        core, size = self._core, self._core.block_size
        request = core.requests.get(request_id)
        if request is None or request.incarnation != incarnation or request.status != S.WAITING_FOR_REMOTE_KV:
            return
        whole = min(num_tokens // size, len(request.blocks))
        core.pool.release(request.blocks[whole:])
        del request.blocks[whole:]
        request.kept = whole * size
        request.kv_source = ""
        request.timeline.add(core.now(), "kv_arrived", tokens=request.kept, message=message)
        self._queue_again(request)

    # --- prompts in parts -----------------------------------------------------------------------------------

    def wait_for_input(self, request: Request, blocks: list[int], kept: int) -> None:
        """An open request has nothing to compute: it keeps its blocks, and waits for its next part without a slot."""
        self._core.waiting.remove(request)
        request.transition(S.RUNNING)  # it was admitted, to nothing
        self._core.note_admission(request)
        self._park(request, blocks, kept)

    def saw_admission(self, request: Request) -> None:
        """A request has got a slot; an open one will give it up when its known tokens are all on their way."""
        if request.open:
            self._open_rows.add(request.id)

    def park_idle_sessions(self) -> None:
        """Open requests whose known tokens are all on their way give up their slot."""
        core, table = self._core, self._core.table
        for request in [core.requests[request_id] for request_id in self._open_rows if request_id in core.requests]:
            if request.open and request.slot >= 0 and table.computed[request.slot] >= table.final[request.slot]:
                self._leave_row(request)
        still = (core.requests.get(request_id) for request_id in self._open_rows)
        self._open_rows = {request.id for request in still if request and request.open and request.slot >= 0}

    def _leave_row(self, request: Request) -> None:
        self._park(request, request.blocks, self._core.leave_row(request))

    def _park(self, request: Request, blocks: list[int], kept: int) -> None:
        request.transition(S.WAITING_FOR_INPUT)
        request.blocks, request.kept = blocks, kept
        self._core.waiting.parked[request.id] = request

    def extend(self, request: Request, message: Extend) -> None:
        """Append to an open request's prompt; it goes on from the blocks it has kept."""
        core = self._core
        if request.slot >= 0:
            self._leave_row(request)
        wrong = wrong_token(message.tokens, core.limits)
        if wrong:
            request.end_code, request.end_message = "invalid_token_id", "tokens" + wrong
            core.finish(request, S.IGNORED)
            return
        request.data += message.tokens
        request.num_prompt = request.num_tokens
        request.open = not message.last
        limit_length(core, request)
        if request.num_tokens >= request.max_total:
            request.end_code = "context_length_exceeded"
            fits = request.max_total - 1
            request.end_message = f"the prompt has grown to {request.num_tokens} tokens; {fits} fit"
            core.finish(request, S.IGNORED)
        elif request.status == S.WAITING_FOR_INPUT:
            self._queue_again(request)

    # --- for all of them ------------------------------------------------------------------------------------

    def _queue_again(self, request: Request) -> None:
        del self._core.waiting.parked[request.id]
        request.transition(S.WAITING)
        self._core.waiting.rejoin(request, self._core.now())

    def runner_lost(self) -> None:
        """Nothing asked of the former runner will be answered, and no block holds anything any more."""
        core = self._core
        self.orders, self._transfers, self._open_rows = [], {}, set()
        for request in list(core.waiting.parked.values()):
            if request.status == S.WAITING_FOR_REMOTE_KV:
                self._queue_again(request)
            elif request.status == S.WAITING_FOR_GRAMMAR:
                self.order_grammar(request)
        queued = (*core.waiting.queue, *core.waiting.quarantined.values())
        for request in [request for request in queued if request.params.grammar]:
            core.waiting.remove(request)
            self.wait_for_grammar(request)

    def holders(self) -> Iterable[list[int]]:
        """The blocks that transfers hold."""
        return self._transfers.values()
