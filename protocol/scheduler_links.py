"""Both links of a scheduler: API sessions, the runner's epochs, leases, refusals, and the loop that turns it all.

What the contract asks of any scheduler before it decides anything. It knows no request and no page.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from protocol import wire
from protocol.channels import AddressError, AddressTaken, ChannelError, ClientChannel, ServerChannel, new_instance
from protocol.messages import (
    Abort,
    ApiToScheduler,
    Control,
    Extend,
    Goodbye,
    GrammarStatus,
    Heartbeat,
    Hello,
    KvStatus,
    Limits,
    Refused,
    RunnerToScheduler,
    SchedulerStatus,
    StepResult,
    Submit,
    Welcome,
)
from protocol.process import EXIT_REPLACED, StopSignal, ensure_private_dir
from protocol.security import OPEN, LinkSecurity

log = logging.getLogger("triptych.scheduler")

TICK_MS = 200
EAGER_TICK_MS = 5
STATUS_INTERVAL_S = 0.5
EXIT_OK = 0
EXIT_REFUSED = 3
LET_GO_S = 3.0
"""How long a scheduler that has been replaced may keep its socket file: one that hangs never gives it up."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Where the links are, and how long (s) a silent peer is waited for."""

    scheduler_address: str
    runner_address: str
    lease_s: float = 10.0
    runner_silence_s: float = 5.0
    takeover: bool = False
    security: LinkSecurity = OPEN

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LinkSettings:
        """From the variables that `triptych scheduler` reads too. Makes the runtime directory if need be."""
        directory = ensure_private_dir(environ.get("TRIPTYCH_RUNTIME_DIR", "/tmp/triptych"))
        return cls(
            environ.get("TRIPTYCH_SCHEDULER_ADDRESS") or f"ipc://{directory}/scheduler.sock",
            environ.get("TRIPTYCH_RUNNER_ADDRESS") or f"ipc://{directory}/runner.sock",
            float(environ.get("TRIPTYCH_LEASE_S", "10")),
            float(environ.get("TRIPTYCH_RUNNER_SILENCE_S", "5")),
            environ.get("TRIPTYCH_TAKEOVER", "").lower() in ("1", "true", "yes", "on"),
            LinkSecurity.of(
                environ.get("TRIPTYCH_CURVE_KEY_FILE", ""),
                environ.get("TRIPTYCH_ALLOW_INSECURE_BIND", "").lower() in ("1", "true", "yes", "on"),
            ),
        )


class Owner(Protocol):
    """Who decides: what `SchedulerLinks` calls. A peer is the number of one API's session, never used twice."""

    def on_welcome(self, welcome: Welcome, limits: Limits) -> None:
        """A new epoch: the runner holds nothing of this scheduler's, and its limits may be others."""

    def on_runner(self, message: StepResult | GrammarStatus | KvStatus | Heartbeat) -> None:
        """Whatever else the runner says."""

    def on_request(self, peer: int, message: Submit | Extend | Abort | Control) -> None:
        """What an API asks for. All but a Control comes only once there are limits."""

    def on_gone(self, peer: int) -> None:
        """A session is over, and with it everything that it asked for."""

    def work(self) -> None:
        """The end of a turn: send steps, tell the APIs."""

    def status(self) -> SchedulerStatus:
        """At least twice a second: do what time asks for, and say how things stand."""


class Stopped(Exception):
    """The process has to end: `code` is its exit status, the text says why."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class SchedulerLinks:
    """Serves an `Owner` until it is told to stop, fenced or refused. `limits` is None before the first runner.

    With `takeover` another scheduler may hold the place: then the runner is asked first, which tells that one to
    leave, and APIs are served as soon as it has let go of the address. `on_bound` is called at that moment, with
    whether the address was taken by force from one that hangs. `beat` is called twice a second while the loop turns.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        settings: LinkSettings,
        owner: Owner,
        *,
        on_bound: Callable[[bool], None] = lambda by_force: None,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.instance = new_instance()
        self.epoch = 0
        self.limits: Limits | None = None
        self.backlog: list[tuple[int, Submit | Extend | Abort]] = []
        self.peers: dict[int, bytes] = {}
        self._owner = owner
        self._on_bound = on_bound
        self._beat = beat
        self._clock = clock
        self._numbers: dict[bytes, int] = {}
        self._next_peer = 0
        self._refused_since = 0.0
        self._ours_since = 0.0
        self._runner_hangs = self._had_runner = False
        self._last_status = clock()
        self.apis: ServerChannel[Any] = ServerChannel(
            context, settings.scheduler_address, ApiToScheduler, clock=clock, security=settings.security, bind=False
        )
        try:
            self.apis.bind()
        except AddressTaken as taken:
            if not settings.takeover:
                self.apis.close()
                raise
            log.warning("%s; taking over from it", taken)
        except AddressError:
            self.apis.close()
            raise
        self.runner: ClientChannel[Any] = ClientChannel(
            context,
            settings.runner_address,
            RunnerToScheduler,
            self._hello,
            silence_s=settings.runner_silence_s,
            clock=clock,
            security=settings.security,
        )

    def _hello(self) -> Hello:
        version, digest = wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST
        # Once is enough: one that was replaced while it hung must not take the place back when it wakes up.
        takeover = self.settings.takeover and not self.epoch
        name = f"pid {os.getpid()} on {socket.gethostname()}"
        return Hello("scheduler", version, digest, self.instance, self.epoch, takeover, name)

    def run(self, stop: StopSignal) -> int:
        """Serve until `stop`; returns the exit status."""
        poller = zmq.Poller()
        poller.register(self.apis.socket, zmq.POLLIN)
        for news in self.runner.pollable:
            poller.register(news, zmq.POLLIN)
        poller.register(stop.fileno(), zmq.POLLIN)
        self._tick()
        try:
            while not stop.requested:
                poller.poll(TICK_MS if self.apis.bound else EAGER_TICK_MS)
                self.turn()
            self._leave("shutdown", "the scheduler was asked to stop")
            return EXIT_OK
        except Stopped as end:
            log.error("%s", end)
            self._leave("takeover" if end.code == EXIT_REPLACED else "shutdown", str(end))
            return end.code

    def turn(self) -> None:
        """Take in what has arrived, let the owner work, do what time asks for. Raises Stopped."""
        for message in self.runner.receive():
            self._on_runner(message)
        for identity, message in self.apis.receive():
            self._on_api(identity, message)
        self._owner.work()
        self._tick()

    def _leave(self, code: str, why: str) -> None:
        self.runner.leave(Goodbye(code, why))
        for identity in self.apis.peers:
            self.apis.drop(identity, Goodbye(code, why))

    def give_up_runner(self, why: str) -> None:
        """It hangs: what it still sends counts no more, and it is welcome again when it shakes hands."""
        log.error("the runner counts as stuck: %s", why)
        self._runner_hangs = True
        self.runner.abandon(why)

    @property
    def runner_state(self) -> str:
        """ "ready", "absent", or "stuck": there is a process, and it does nothing."""
        if self.runner.connected:
            return "ready"
        return "stuck" if self._runner_hangs or self.runner.unresponsive else "absent"

    def rejoin_runner(self, why: str) -> None:
        """Leave the runner and shake hands again: a new epoch, in which nothing of this one is in flight."""
        self.runner.leave(Goodbye("restart", why))

    def close(self) -> None:
        """Close both links. Idempotent."""
        self.apis.close()
        self.runner.close()

    def send(self, peer: int, message: msgspec.Struct) -> None:
        """To an API, if its session lasts. One that can't take the message is dropped: it will come back."""
        identity = self.peers.get(peer)
        if identity is None:
            return
        try:
            self.apis.send(identity, message)
        except ChannelError as error:
            self._drop(identity, "unreachable", str(error))

    def status(
        self,
        running: int,
        waiting: int,
        kv_usage: float,
        stalled_ms: int = 0,
        draining: bool = False,
        waiting_timeout_ms: int = 0,
    ) -> SchedulerStatus:
        """How things stand, with what the links know of it."""
        return SchedulerStatus(
            self.epoch,
            self.runner_state,
            running,
            waiting,
            kv_usage,
            stalled_ms,
            draining,
            self.limits,
            waiting_timeout_ms,
        )

    def _tick(self) -> None:
        if self.runner.tick():
            silence_s = self.settings.runner_silence_s
            log.error("the runner has been silent for over %.1f s: it counts as gone", silence_s)
        if not self.apis.bound and self.epoch:
            self._take_place()
        now = self._clock()
        if self._had_runner and not self.runner.connected:
            log.warning("no runner (%s): requests wait for one", self.runner.lost)
            self._last_status = now - STATUS_INTERVAL_S  # the APIs are told at once
        self._had_runner = self.runner.connected
        self._runner_hangs = self._runner_hangs and self.runner.linked
        if now - self._last_status < STATUS_INTERVAL_S:
            return
        self._last_status = now
        self._beat()
        for identity in self.apis.peers:
            if self.apis.silent_for(identity) > self.settings.lease_s:
                self._drop(identity, "lease", f"silent for more than {self.settings.lease_s:g} s")
        self._send_status()

    def _take_place(self) -> None:
        """The runner has told the former scheduler to leave: serve the APIs as soon as it has."""
        by_force = self._clock() - self._ours_since > LET_GO_S
        try:
            self.apis.bind(by_force=by_force)
        except AddressTaken:
            return
        log.info("serving APIs in the place of the former scheduler%s", ", which hangs" if by_force else "")
        self._on_bound(by_force)

    def _send_status(self) -> None:
        status = self._owner.status()
        for peer in list(self.peers):
            self.send(peer, status)

    # --- the runner's side ----------------------------------------------------------------------------------

    def _on_runner(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, Goodbye):
            if message.code in ("fenced", "takeover"):
                self._owner.work()  # what the last steps brought
                raise Stopped(EXIT_REPLACED, f"another scheduler has taken over: {message.message}")
            log.warning("the runner left (%s): requests wait for the next one", message.message or message.code)
            self._send_status()
        else:
            self._owner.on_runner(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        """A runner is ours: whatever it held for others is void."""
        if welcome.limits is None:
            raise Stopped(EXIT_REFUSED, "the runner's welcome has no limits")
        if self.limits is not None and welcome.limits != self.limits:
            log.warning("the runner's limits changed: %s", welcome.limits)
        self.epoch, self.limits, self._refused_since = welcome.epoch, welcome.limits, 0.0
        self._runner_hangs = False
        self._ours_since = self._clock()
        self._owner.on_welcome(welcome, welcome.limits)
        backlog, self.backlog = self.backlog, []
        for peer, message in backlog:
            self._owner.on_request(peer, message)
        self._send_status()

    def _on_refused(self, refused: Refused) -> None:
        """Another scheduler holds the runner: wait for its lease to end, then give up. Anything else is final."""
        if refused.code == wire.BAD_FRAME:
            log.error("the runner could not read a frame: %s", refused.message)
            return
        if refused.code != wire.OCCUPIED:
            raise Stopped(EXIT_REFUSED, f"the runner refuses this scheduler ({refused.code}): {refused.message}")
        now = self._clock()
        if not self._refused_since:
            self._refused_since = now
            log.warning("%s; waiting %.0f s for its lease to end", refused.message, self.settings.lease_s)
        elif now - self._refused_since > self.settings.lease_s + 2:
            if self.epoch:
                raise Stopped(EXIT_REPLACED, f"another scheduler has taken over: {refused.message}")
            raise Stopped(EXIT_REFUSED, f"{refused.message}; start with --takeover to replace it")

    # --- the APIs' side -------------------------------------------------------------------------------------

    def _on_api(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Hello):
            self._on_hello(identity, message)
            return
        peer = self._numbers.get(identity)
        if peer is None or isinstance(message, Heartbeat):
            return
        if isinstance(message, Goodbye):
            self._drop(identity, "goodbye", message.message or message.code)
        elif self.limits is None and isinstance(message, Submit | Extend | Abort):
            self.backlog.append((peer, message))
        else:
            self._owner.on_request(peer, message)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if hello.role not in ("api", "ctl"):
            self.apis.refuse(identity, Refused("wrong_role", f"this is a scheduler: {hello.role!r} is not api or ctl"))
            return
        self._drop(identity, "new session", "the API shook hands again")
        self._next_peer += 1
        self._numbers[identity] = self._next_peer
        self.peers[self._next_peer] = identity
        version, digest = wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST
        lease_ms = int(self.settings.lease_s * 1000)
        welcome = Welcome("scheduler", version, digest, self.instance, self.epoch, self.limits, lease_ms=lease_ms)
        try:
            self.apis.welcome(identity, welcome)
        except ChannelError as error:
            self._drop(identity, "unreachable", str(error))
            return
        if hello.role == "api":
            log.info("API %s connected", hello.instance)

    def _drop(self, identity: bytes, code: str, why: str) -> None:
        """End an API's session and everything it asked for."""
        peer = self._numbers.pop(identity, None)
        if peer is None:
            return
        hello = self.apis.peer(identity)
        self.apis.drop(identity, Goodbye(code, why))
        del self.peers[peer]
        self.backlog = [entry for entry in self.backlog if entry[0] != peer]
        if hello is None or hello.role == "api":
            log.info("API %s left (%s: %s)", hello.instance if hello else "?", code, why)
        self._owner.on_gone(peer)
