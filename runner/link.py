"""The runner's end of the scheduler link: one I/O thread owns the socket; the computing thread takes work from a queue.

Who may command is decided here: one scheduler at a time holds the runner, under an epoch that only grows. Steps of
anyone else, or of an older epoch, never reach the executor. What a step does is not this module's business.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq

from protocol import wire
from protocol.channels import HEARTBEAT_INTERVAL_S, ChannelError, ServerChannel, new_instance
from protocol.messages import (
    CompileGrammar,
    FetchKv,
    Goodbye,
    Heartbeat,
    Hello,
    KvStatus,
    Limits,
    Refused,
    SchedulerToRunner,
    Step,
    StepFailure,
    StepResult,
    Welcome,
)
from protocol.security import OPEN, LinkSecurity
from runner.errands import Answer, Errand, ErrandStatus, Promise, unable
from runner.link_parts import Due, Holder, Kept, Reply, SchedulerStats, Wake, Welcoming, named

log = logging.getLogger("triptych.runner")

FENCED = "fenced"
SHUTDOWN = "shutdown"
RESTART = "restart"
"""The session is out of step: whoever is told this shakes hands again."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step to run. `generation` tells whether the scheduler that sent it still holds the runner."""

    step: Step
    received_ns: int
    generation: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A scheduler waits for its Welcome: forget the former one's residents, then call `SchedulerLink.grant`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A KV transfer has begun or, with `status`, ended: its pages are its own in between."""

    order: FetchKv
    status: KvStatus | None
    generation: int


Item = Work | Grant | Transfer


class SchedulerLink:
    """Binds at construction (AddressError if it can't), serves from `start()` to `close()`.

    `answer` says what becomes of errands and is called on the link's thread: it must not block.
    `on_beat` is called there too, at each heartbeat, with since when a step runs (ns of wall clock; 0: none does).
    `stop_fd`, where given, ends the link when it becomes readable: `next()` then returns None once the work before it
    has been taken.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        limits: Limits,
        *,
        hash_key: bytes,
        answer: Callable[[Errand], Answer | Promise | None] = unable,
        lease_s: float = 10.0,
        stop_fd: int | None = None,
        on_beat: Callable[[int], None] = lambda busy_since_ns: None,
        security: LinkSecurity = OPEN,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.instance = new_instance()
        self.stats = SchedulerStats()
        self.channel: ServerChannel[SchedulerToRunner] = ServerChannel(
            context, address, SchedulerToRunner, clock=clock, security=security
        )
        self.address = self.channel.bound_address
        self.generation = 0  # of the present holder; a change makes queued work stale
        self.busy_since_ns = 0  # wall clock; written by the computing thread before and after a step
        self._limits = limits
        self._hash_key = hash_key
        self._answer = answer
        self._due: list[Due] = []
        self._numbers = itertools.count()
        self._lease_s = lease_s
        self._stop_fd = stop_fd
        self._on_beat = on_beat
        self._clock = clock
        self._wall_ms = wall_ms
        self._next_beat = clock() + HEARTBEAT_INTERVAL_S
        self._granted = 0
        self._holder: Holder | None = None
        self._heir: Holder | None = None  # takes over once the steps that the holder has sent are done
        self._work: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._out: deque[Reply | Welcoming | Kept] = deque()
        self._wake = Wake()
        self._closing = False
        self._waking = threading.Lock()  # while others may wake the loop, the descriptor that wakes it stays open
        self._thread = threading.Thread(target=self._serve, name="scheduler-link", daemon=True)

    # --- called by the computing thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def next(self, timeout_s: float | None = None) -> Item | None:
        """Wait for the next thing to do; None to end. queue.Empty if there is none within `timeout_s`."""
        return self._work.get(timeout=timeout_s)

    @property
    def pending(self) -> int:
        """How much is queued for the computing thread."""
        return self._work.qsize()

    def is_current(self, work: Item) -> bool:
        """False (and counted) if the scheduler that sent this no longer holds the runner: drop it."""
        if work.generation == self.generation:
            return True
        if isinstance(work, Work):
            self.stats.stale_steps += 1
        return False

    def grant(self, grant: Grant, inventory: tuple[bytes, bytes]) -> None:
        """No older step runs any more: welcome the scheduler that waits, with what the pages hold."""
        self._post(Welcoming(grant.generation, inventory))

    def reply(self, work: Work, result: StepResult) -> None:
        """Send a step's result to whoever sent the step, if it still holds the runner."""
        self._post(Reply(work.generation, result))

    def close(self) -> None:
        """Send what was posted, say goodbye, release the address. Idempotent."""
        if not self._closing:
            self._closing = True
            if self._thread.ident is not None:
                self._wake.set()
                self._thread.join()
            else:
                self.channel.close()
            with self._waking:
                os.close(self._wake.fd)

    def _post(self, item: Reply | Welcoming | Kept) -> None:
        self._out.append(item)
        self._wake.set()

    def _keep(self, generation: int, promise: Promise) -> None:
        """Called by whichever thread made the answer, at any time."""
        if promise.cancelled():
            return
        with self._waking:
            if not self._closing:
                self._post(Kept(generation, promise.result()))

    # --- the I/O thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self.channel.socket, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        if self._stop_fd is not None:
            poller.register(self._stop_fd, zmq.POLLIN)
        try:
            while not self._closing:
                wake_at = min(self._next_beat, self._due[0].at) if self._due else self._next_beat
                ready = dict(poller.poll(max(0, int((wake_at - self._clock()) * 1000) + 1)))
                self._wake.clear()
                self.flush()
                self.receive()
                self.keep_time()
                if self._stop_fd in ready:
                    poller.unregister(self._stop_fd)
                    self._work.put(None)
            self.flush()
            self._dismiss(Goodbye(SHUTDOWN, "the runner stops"))
        except Exception:
            log.exception("the scheduler link broke; the runner ends")
            self._work.put(None)
        finally:
            self.channel.close()

    def keep_time(self) -> None:
        """Send the answers that are due, and a heartbeat if it is time for one."""
        self._answer_due()
        if self._clock() >= self._next_beat:
            self._next_beat = self._clock() + HEARTBEAT_INTERVAL_S
            self._on_beat(self.busy_since_ns)
            self._beat()

    def receive(self) -> None:
        """Take in what has arrived: work is queued, a Hello judged."""
        for identity, message in self.channel.receive():
            if isinstance(message, Step):
                self._take_step(identity, message)
            elif isinstance(message, CompileGrammar | FetchKv):
                self._take_errand(identity, message)
            elif isinstance(message, Hello):
                self._take_hello(identity, message)
            elif isinstance(message, Goodbye) and self._holder is not None and self._holder.identity == identity:
                log.info("the scheduler says goodbye (%s)", message.code)
                self._dismiss(None)

    def _take_step(self, identity: bytes, step: Step) -> None:
        holder = self._holder
        if holder is None or holder.identity != identity or step.epoch != holder.epoch or self._heir is not None:
            self.stats.stale_steps += 1
            return
        self._work.put(Work(step, int(self._clock() * 1e9), self.generation))

    def _take_errand(self, identity: bytes, errand: Errand) -> None:
        holder = self._holder
        if holder is None or holder.identity != identity:
            return
        if isinstance(errand, FetchKv):
            self._work.put(Transfer(errand, None, self.generation))
        answer = self._answer(errand)
        if isinstance(answer, Future):
            answer.add_done_callback(partial(self._keep, self.generation))
        elif answer is not None:
            due = Due(self._clock() + answer.after_s, next(self._numbers), errand, answer.status)
            heapq.heappush(self._due, due)

    def _answer_due(self) -> None:
        """Answer what is due. A step that counts on a transfer's end was sent after it, so it is queued behind it."""
        while self._due and self._due[0].at <= self._clock():
            due = heapq.heappop(self._due)
            if isinstance(due.errand, FetchKv) and isinstance(due.status, KvStatus):
                self._work.put(Transfer(due.errand, due.status, self.generation))
            if self._holder is not None:
                self._send_status(self._holder, due.status)

    def _take_hello(self, identity: bytes, hello: Hello) -> None:
        if hello.role != "scheduler":
            self.stats.refused += 1
            self.channel.refuse(identity, Refused(wire.BAD_FRAME, f"a runner serves schedulers, not {hello.role!r}"))
            return
        holder = self._holder
        if holder is None:
            self._hand_to(Holder(identity, hello))
            return
        # The same process shaking hands again (it lost patience or the connection) is no rival.
        same = hello.instance == holder.hello.instance
        alive = self._is_alive(holder)
        if not same and not hello.takeover and alive:
            self.stats.refused += 1
            held = f"{named(holder.hello)} holds this runner under epoch {holder.epoch}"
            self.channel.refuse(identity, Refused(wire.OCCUPIED, f"{held}; ask for a takeover to replace it"))
        elif holder.identity == identity and holder.epoch == 0:
            holder.hello = hello  # said hello again before we could answer: one Welcome serves both
        elif same and self._heir is not None:
            self._dismiss(None)
            self.channel.refuse(identity, Refused(wire.OCCUPIED, "another scheduler takes over"))
        elif not same and holder.epoch and alive:
            self._name_heir(Holder(identity, hello))
        else:
            if not same:
                self._note_replaced(holder, hello)
            self._dismiss(None if holder.identity == identity else Goodbye(FENCED, f"{named(hello)} took over"))
            if self._holder is None:
                self._hand_to(Holder(identity, hello))
            elif self._holder.identity != identity:  # else it was the heir, and one Welcome serves both its hellos
                self.channel.refuse(identity, Refused(wire.OCCUPIED, f"{named(self._holder.hello)} takes over"))

    def _hand_to(self, holder: Holder) -> None:
        """This scheduler holds the runner, and is welcomed once what still runs for others has ended."""
        self._new_generation()
        self._holder = holder
        self._work.put(Grant(self.generation))

    def _name_heir(self, heir: Holder) -> None:
        """A takeover from a scheduler that lives: it gets the results of what it has sent, and nothing more."""
        former, self._heir = self._heir, heir
        if former is None:
            self._work.put(Grant(self.generation))
        elif former.identity == heir.identity:
            return
        else:
            self.channel.refuse(former.identity, Refused(wire.OCCUPIED, f"{named(heir.hello)} took over"))
        assert self._holder is not None
        self._note_replaced(self._holder, heir.hello)

    def _note_replaced(self, holder: Holder, by: Hello) -> None:
        self.stats.fenced += 1
        log.warning("%s is replaced by %s", named(holder.hello), named(by))

    def _is_alive(self, holder: Holder) -> bool:
        """Whether the holder is still connected and spoke within its lease. A send is what tells."""
        if holder.epoch == 0:
            return True  # about to be welcomed
        if self.channel.silent_for(holder.identity) > self._lease_s:
            return False
        try:
            self.channel.send(holder.identity, self._heartbeat())
        except ChannelError:
            return False
        return True

    def _dismiss(self, goodbye: Goodbye | None) -> None:
        """The holder, if any, holds no more; its queued steps become stale, and nobody waits for its errands."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._new_generation()
        if holder.epoch == 0 and goodbye is not None:
            self.channel.refuse(holder.identity, Refused(wire.OCCUPIED, goodbye.message))
        else:
            self.channel.drop(holder.identity, goodbye)
        if self._heir is not None:
            heir, self._heir = self._heir, None
            self._hand_to(heir)

    def _new_generation(self) -> None:
        self.generation += 1
        self._due.clear()

    def flush(self) -> None:
        """Send what the computing thread has posted, if its scheduler still holds the runner."""
        while self._out:
            item = self._out.popleft()
            holder = self._holder
            if holder is None or item.generation != self.generation:
                self.stats.unsent_results += isinstance(item, Reply)
            elif isinstance(item, Welcoming):
                self._welcome(self._succeed(holder), item.inventory)
            elif isinstance(item, Kept):
                self._send_status(holder, item.status)
            else:
                self._send_result(holder, item.result)

    def _succeed(self, holder: Holder) -> Holder:
        """Who is to be welcomed: the heir, if one waits, now that the holder has all its results."""
        heir, self._heir = self._heir, None
        if heir is None:
            return holder
        self._dismiss(Goodbye(FENCED, f"{named(heir.hello)} took over"))
        self._holder = heir
        return heir

    def _welcome(self, holder: Holder, inventory: tuple[bytes, bytes]) -> None:
        self._granted = max(self._granted + 1, holder.hello.epoch + 1, self._wall_ms())
        welcome = Welcome(
            "runner",
            wire.PROTOCOL_VERSION,
            wire.SCHEMA_DIGEST,
            self.instance,
            self._granted,
            limits=self._limits,
            hash_key=self._hash_key,
            inventory_blocks=inventory[0],
            inventory_hashes=inventory[1],
            lease_ms=int(self._lease_s * 1000),
        )
        holder.epoch = self._granted
        try:
            self.channel.welcome(holder.identity, welcome)
        except ChannelError as error:
            log.warning("scheduler %s left before its welcome: %s", holder.hello.instance, error)
            self._dismiss(None)
            return
        self.stats.grants += 1
        pages = len(inventory[0]) // 4
        log.info("scheduler %s holds epoch %d (%d cached blocks)", holder.hello.instance, holder.epoch, pages)

    def _send_result(self, holder: Holder, result: StepResult) -> None:
        try:
            self.channel.send(holder.identity, result)
        except ChannelError as error:
            # A scheduler that misses a result is out of step for good: end the session, it will shake hands again.
            self.stats.unsent_results += 1
            log.error("result of step %d can't be sent (%s): session ended", result.step_id, error)
            self._dismiss(Goodbye(RESTART, f"the result of step {result.step_id} could not be sent"))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            log.error("result of step %d can't be encoded: %s", result.step_id, error)
            failure = StepFailure("unsendable_result", str(error))
            self._send_result(holder, StepResult(result.epoch, result.step_id, failure=failure))

    def _send_status(self, holder: Holder, status: ErrandStatus) -> None:
        try:
            self.channel.send(holder.identity, status)
        except ChannelError as error:
            log.error("%s for request %d can't be sent (%s): session ended", type(status).__name__, status.id, error)
            self._dismiss(Goodbye(RESTART, f"an answer for request {status.id} could not be sent"))

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(time.time_ns(), self.busy_since_ns)

    def _beat(self) -> None:
        holder = self._holder
        if holder is None or holder.epoch == 0:
            return
        try:
            self.channel.send(holder.identity, self._heartbeat())
        except ChannelError as error:
            log.warning("scheduler %s is gone: %s", holder.hello.instance, error)
            self._dismiss(None)
