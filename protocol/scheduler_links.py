"""Both links of a scheduler: API sessions, leases, its place at its address, and the loop that turns it all.

What the contract asks of any scheduler before it decides anything. It knows no request and no page. The other end is
`protocol.runner_links`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
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
    Heartbeat,
    Hello,
    Limits,
    Refused,
    SchedulerStatus,
    Submit,
    Welcome,
)
from protocol.process import EXIT_REPLACED, StopSignal, ensure_private_dir
from protocol.runner_links import EXIT_REFUSED as EXIT_REFUSED
from protocol.runner_links import RunnerLinks, RunnerOwner
from protocol.runner_links import Stopped as Stopped
from protocol.security import OPEN, LinkSecurity

log = logging.getLogger("triptych.scheduler")

TICK_MS = 200
EAGER_TICK_MS = 5
STATUS_INTERVAL_S = 0.5
EXIT_OK = 0
LET_GO_S = 3.0
"""How long a scheduler that has been replaced may keep its socket file: one that hangs never gives it up."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Where the links are, and how long (s) a silent peer is waited for. `runner_address`: several with commas."""

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


class Owner(RunnerOwner, Protocol):
    """Who decides: what `SchedulerLinks` calls. A peer is the number of one API's session, never used twice."""

    def on_request(self, peer: int, message: Submit | Extend | Abort | Control) -> None:
        """What an API asks for. All but a Control comes only once there are limits."""

    def on_gone(self, peer: int) -> None:
        """A session is over, and with it everything that it asked for."""

    def work(self) -> None:
        """The end of a turn: send steps, tell the APIs."""

    def status(self) -> SchedulerStatus:
        """At least twice a second: do what time asks for, and say how things stand."""


class SchedulerLinks:
    """Serves an `Owner` until it is told to stop, fenced or refused. `limits` is None before the first runner.

    `runner_owners` command one runner each, in the order of the addresses; without them `owner` commands the only one.
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
        runner_owners: Sequence[RunnerOwner] = (),
        on_bound: Callable[[bool], None] = lambda by_force: None,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.instance = new_instance()
        self.backlog: list[tuple[int, Submit | Extend | Abort]] = []
        self.peers: dict[int, bytes] = {}
        self._owner = owner
        self._on_bound = on_bound
        self._beat = beat
        self._clock = clock
        self._numbers: dict[bytes, int] = {}
        self._next_peer = 0
        self._in_the_way: tuple[int, float] | None = None
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
        self.runners = RunnerLinks(
            context,
            settings.runner_address.split(","),
            runner_owners or (owner,),
            self.instance,
            lease_s=settings.lease_s,
            silence_s=settings.runner_silence_s,
            takeover=settings.takeover,
            security=settings.security,
            on_change=self._send_status,
            on_welcome=self._serve_backlog,
            before_fenced=lambda: self._owner.work(),
            clock=clock,
        )

    @property
    def runner(self) -> ClientChannel[Any]:
        """The only runner, or the first."""
        return self.runners.links[0].channel

    @property
    def epoch(self) -> int:
        """The epoch it commands with: with several runners the largest. 0 before the first has come."""
        return self.runners.epoch

    @property
    def limits(self) -> Limits | None:
        """What a request may ask for: with several runners those of the largest."""
        return self.runners.limits

    def run(self, stop: StopSignal) -> int:
        """Serve until `stop`; returns the exit status."""
        poller = zmq.Poller()
        poller.register(self.apis.socket, zmq.POLLIN)
        for link in self.runners.links:
            for news in link.channel.pollable:
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
        self.runners.receive()
        for identity, message in self.apis.receive():
            self._on_api(identity, message)
        self._owner.work()
        self._tick()

    def _leave(self, code: str, why: str) -> None:
        self.runners.leave(Goodbye(code, why))
        for identity in self.apis.peers:
            self.apis.drop(identity, Goodbye(code, why))

    def close(self) -> None:
        """Close both links. Idempotent."""
        self.apis.close()
        self.runners.close()

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
        queue_limit: int = 0,
        queued: int = 0,
        displaces: bool = False,
        least_urgent: int = 0,
    ) -> SchedulerStatus:
        """How things stand, with what the links know of it."""
        return SchedulerStatus(
            self.epoch,
            self.runners.state,
            running,
            waiting,
            kv_usage,
            stalled_ms,
            draining,
            self.limits,
            waiting_timeout_ms,
            queue_limit,
            queued,
            displaces,
            least_urgent,
            len(self.runners.links),
            self.runners.num_up,
        )

    def _tick(self) -> None:
        lost_runner = self.runners.tick()
        if not self.apis.bound and self.epoch:
            self._take_place()
        now = self._clock()
        if now - self._last_status < STATUS_INTERVAL_S and not lost_runner:  # of a loss the APIs are told at once
            return
        self._last_status = now
        self._beat()
        if self.apis.displaced:  # by one that the runner has welcomed; the goodbye that said so may have been lost
            raise Stopped(EXIT_REPLACED, "another scheduler has taken over, and the place by force")
        for identity in self.apis.peers:
            if self.apis.silent_for(identity) > self.settings.lease_s:
                self._drop(identity, "lease", f"silent for more than {self.settings.lease_s:g} s")
        self._send_status()

    def _take_place(self) -> None:
        """The runner has told the former scheduler to leave: serve the APIs as soon as it has."""
        former, since = self._in_the_way or (0, self._clock())
        by_force = self._clock() - since > LET_GO_S
        try:
            self.apis.bind(by_force=by_force)
        except AddressTaken as taken:
            # Who has come in between isn't the one that hangs: it gets the same time.
            self._in_the_way = (taken.pid, since if taken.pid == former else self._clock())
            return
        log.info("serving APIs in the place of the former scheduler%s", ", which hangs" if by_force else "")
        self._on_bound(by_force)

    def _send_status(self) -> None:
        status = self._owner.status()
        for peer in list(self.peers):
            self.send(peer, status)

    def _serve_backlog(self) -> None:
        """A runner is there: what came before goes to the owner."""
        backlog, self.backlog = self.backlog, []
        for peer, message in backlog:
            self._owner.on_request(peer, message)
        self._send_status()

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
