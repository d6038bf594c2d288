"""The scheduler process: the APIs' side of one Scheduler object, or of several that have a runner each.

Handshakes, epochs and leases are `protocol.scheduler_links`, a runner's side is `scheduler.replica`.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from protocol.columns import u64
from protocol.messages import (
    Abort,
    Control,
    ControlReply,
    Extend,
    GrammarStatus,
    Heartbeat,
    KvStatus,
    Limits,
    Outputs,
    Rejected,
    SchedulerStatus,
    StepResult,
    Submit,
    Welcome,
)
from protocol.process import StopSignal
from protocol.scheduler_links import LinkSettings, SchedulerLinks
from protocol.security import LinkSecurity
from scheduler.config import SchedulerConfig
from scheduler.dispatch import Dispatch
from scheduler.interface import Scheduler
from scheduler.metrics import Metrics
from scheduler.orders import NOT_READY, Orders, refusal
from scheduler.replica import Replica

log = logging.getLogger("triptych.scheduler")

LOGGED = "the scheduler's log has the details"


def load_scheduler_class(name: str) -> type[Scheduler]:
    """The class at `package.module:Class`. Raises ValueError that says what is wrong with it."""
    module_name, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"scheduler_cls {name!r}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Scheduler)):
        raise ValueError(f"scheduler_cls {name!r} is not a subclass of scheduler.interface.Scheduler")
    return cls


class SchedulerProcess:
    """Runs one scheduler, or one for each of several replicas, until it is told to stop, fenced or refused."""

    def __init__(
        self,
        config: SchedulerConfig,
        context: zmq.Context[Any],
        metrics: Sequence[Metrics],
        *,
        on_bound: Callable[[bool], None] = lambda by_force: None,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`metrics`: for each replica its own (`Metrics.of_replicas`). Raises ValueError for what can't be run."""
        self.config = config
        self.metrics = metrics[0]
        self._clock = clock
        cls = load_scheduler_class(config.scheduler_cls)
        addresses = config.runner_addresses
        several = len(addresses) > 1
        self.replicas = [
            Replica(number, f"replica {number}: " if several else "", config, cls, metrics[number], clock)
            for number in range(len(addresses))
        ]
        self._first = self.replicas[0]
        self._dispatch = Dispatch(self.replicas, config) if several else None
        self._orders = Orders(self.replicas, self._dispatch) if self._dispatch is not None else None
        settings = LinkSettings(
            config.scheduler_address,
            ",".join(addresses),
            config.lease_s,
            config.runner_silence_s,
            config.takeover,
            LinkSecurity.of(config.curve_key_file, config.allow_insecure_bind),
        )
        self.links = SchedulerLinks(
            context, settings, self, runner_owners=self.replicas, on_bound=on_bound, beat=beat, clock=clock
        )
        for replica, link in zip(self.replicas, self.links.runners.links, strict=True):
            replica.link = link
            if self._orders is not None:
                replica.on_welcomed = self._orders.welcome

    @property
    def core(self) -> Scheduler | None:
        """The scheduler object of the only replica, or the first; it exists once a runner has welcomed this process."""
        return self._first.core

    def run(self, stop: StopSignal) -> int:
        """Serve until `stop`; returns the exit status."""
        return self.links.run(stop)

    def close(self) -> None:
        """Close both links. Idempotent."""
        self.links.close()

    def work(self) -> None:
        """Send steps until enough are in flight or there is nothing to compute; tell the APIs."""
        for replica in self.replicas:
            for peer, outputs in replica.work():
                if self._dispatch is not None:
                    self._dispatch.told(replica.number, outputs)
                self.links.send(peer, outputs)

    # --- the runner's side ----------------------------------------------------------------------------------

    def on_welcome(self, welcome: Welcome, limits: Limits) -> None:
        """The only runner, or the first, is there."""
        self._first.on_welcome(welcome, limits)

    def on_runner(self, message: StepResult | GrammarStatus | KvStatus | Heartbeat) -> None:
        """What it says."""
        self._first.on_runner(message)

    # --- the APIs' side -------------------------------------------------------------------------------------

    def on_request(self, peer: int, message: Submit | Extend | Abort | Control) -> None:
        """Hand it to the scheduler. What goes wrong with one request or order is the end of that one."""
        try:
            self._hand_over(peer, message)
        except Exception:
            log.exception("%s of API %d failed", type(message).__name__, peer)
            if isinstance(message, Submit):
                self._refuse(peer, message)
            elif isinstance(message, Extend):
                self._abort(peer, [message.id])
            elif isinstance(message, Control):
                body = msgspec.json.encode({"code": "internal_error", "message": LOGGED})
                self.links.send(peer, ControlReply(message.nonce, False, body))

    def _refuse(self, peer: int, submit: Submit) -> None:
        """A request that can't even be taken in, whatever is wrong with it."""
        stats = next(replica.core.stats for replica in self.replicas if replica.core is not None)
        stats.rejected["internal_error"] = stats.rejected.get("internal_error", 0) + 1
        rejection = Rejected(submit.id, "internal_error", LOGGED, 500)
        self.links.send(peer, Outputs(self.links.epoch, 0, rejected=[rejection]))

    def _hand_over(self, peer: int, message: Submit | Extend | Abort | Control) -> None:
        if isinstance(message, Control):
            self.links.send(peer, self._answer(message))
        elif isinstance(message, Abort):
            whole = len(message.ids) // 8 * 8  # what an API sends must not end this process, whatever it is
            self._abort(peer, u64(message.ids[:whole]).tolist())
        elif self._dispatch is None:
            self._first.begin_work()
            core = self._first.get_core()
            core.add(peer, message) if isinstance(message, Submit) else core.extend(peer, message)
        elif isinstance(message, Submit):
            self._dispatch.submit(peer, message)
        else:
            self._dispatch.extend(peer, message)

    def _abort(self, peer: int, ids: list[int]) -> None:
        (self._dispatch or self._first.get_core()).abort(peer, ids)

    def _answer(self, order: Control) -> ControlReply:
        if self._orders is not None:
            return self._orders.answer(order)
        if "replica" in order.arguments:
            return refusal(order.nonce, "invalid_argument", "there is one runner: replica=N is for several")
        if self.core is None:
            return ControlReply(order.nonce, False, NOT_READY)
        return self.core.control(order)

    def on_gone(self, peer: int) -> None:
        """End everything that an API asked for."""
        if self._dispatch is not None:
            ended = self._dispatch.gone(peer)
        else:
            ended = self.core.drop_peer(peer) if self.core else 0
        if ended:
            log.info("%d requests ended with their API's session", ended)

    # --- what time asks for ---------------------------------------------------------------------------------

    def status(self) -> SchedulerStatus:
        """Let all replicas do what time asks for, move what waits for a runner in vain; how things stand."""
        now = self._clock()
        found = [(replica, stats) for replica in self.replicas if (stats := replica.keep_time(now)) is not None]
        self.metrics.sync_apis(len(self.links.peers), self.links.apis.stats)
        if self._dispatch is not None:
            self._move(self._dispatch, now)
        up = [replica for replica in self.replicas if replica.up]
        doors = [replica.get_core().door() for replica, _ in found if replica.up or not up]
        free = sum(stats.free_blocks for _, stats in found)
        usable = sum(stats.usable_blocks for _, stats in found)
        config = found[0][0].get_core().config if found else self.config
        return self.links.status(
            running=sum(stats.running for _, stats in found),
            waiting=sum(stats.waiting for _, stats in found) if found else len(self.links.backlog),
            kv_usage=1 - free / usable if usable else 0.0,
            stalled_ms=max((replica.stalled_ms() for replica in up or self.replicas), default=0),
            draining=bool(found) and all(stats.draining for _, stats in found),
            waiting_timeout_ms=int(1000 * config.waiting_timeout_s),
            queue_limit=sum(door.limit for door in doors) if all(door.limit for door in doors) else 0,
            queued=sum(door.queued for door in doors),
            displaces=any(door.displaces for door in doors),
            least_urgent=max((door.least_urgent for door in doors), default=0),
        )

    def _move(self, dispatch: Dispatch, now: float) -> None:
        for one in dispatch.leaving(now):
            try:
                dispatch.submit(one.peer, one.submit, one)
            except Exception:
                log.exception("request %d could not be moved", one.submit.id)
                self._refuse(one.peer, one.submit)
