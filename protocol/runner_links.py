"""A scheduler's links to its runners: a session, an epoch and limits of each, and that it holds all of them or none.

It knows no request; what a runner says is its owner's business.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import zmq

from protocol import wire
from protocol.channels import ClientChannel
from protocol.messages import (
    Goodbye,
    GrammarStatus,
    Heartbeat,
    Hello,
    KvStatus,
    Limits,
    Refused,
    RunnerToScheduler,
    StepResult,
    Welcome,
)
from protocol.process import EXIT_REPLACED
from protocol.security import OPEN, LinkSecurity

log = logging.getLogger("triptych.scheduler")

EXIT_REFUSED = 3
ABSENT_S = 0.5
"""At the start, who can't be connected to for this long isn't there: the others are served without it."""
HELD_OFF_S = 1.0
ODD_HELD_OFF_S = 5.0
MODEL_FIELDS = ("model", "vocab_size", "max_model_len", "eos_token_ids", "max_logprobs")
"""Limits in which all runners of one scheduler are equal; the others may differ."""


class Stopped(Exception):
    """The process has to end: `code` is its exit status, the text says why."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class RunnerOwner(Protocol):
    """Who commands one runner."""

    def on_welcome(self, welcome: Welcome, limits: Limits) -> None:
        """A new epoch: the runner holds nothing of this scheduler's, and its limits may be others."""

    def on_runner(self, message: StepResult | GrammarStatus | KvStatus | Heartbeat) -> None:
        """Whatever else the runner says."""


class RunnerLink:
    """One runner: its channel, and what it granted. `limits` are those of its last Welcome, None before the first."""

    def __init__(self, channel: ClientChannel[Any], owner: RunnerOwner, name: str, takes: bool) -> None:
        self.channel = channel
        self.owner = owner
        self.name = name
        self.takes = takes
        """Whether a Hello is to dismiss a scheduler that holds it. Once is enough: one that was replaced while it hung
        must not take the place back when it wakes up."""
        self.epoch = 0
        self.limits: Limits | None = None
        self.offered: Welcome | None = None
        self.occupied: Refused | None = None
        self.hangs = self.was_up = False
        self.told = ""
        """The latest complaint about it, which is not repeated."""

    @property
    def up(self) -> bool:
        """Whether it takes steps."""
        return self.channel.connected and self.offered is None

    @property
    def state(self) -> str:
        """ "ready", "absent", or "stuck": there is a process, and it does nothing."""
        if self.up:
            return "ready"
        return "stuck" if self.hangs or self.channel.unresponsive else "absent"

    def give_up(self, why: str) -> None:
        """It hangs: what it still sends counts no more, and it is welcome again when it shakes hands."""
        log.error("%s counts as stuck: %s", self.name, why)
        self.hangs = True
        self.channel.abandon(why)

    def rejoin(self, why: str) -> None:
        """Leave the runner and shake hands again: a new epoch, in which nothing of this one is in flight."""
        self.channel.leave(Goodbye("restart", why))

    def complain(self, text: str) -> None:
        """Log it, unless that was the last complaint too."""
        if text != self.told:
            self.told = text
            log.error("%s", text)


class RunnerLinks:
    """The links of one scheduler, in the order of the addresses.

    Several runners are first asked without a takeover. Only when all that are there have answered are they held: if
    one is another scheduler's, none is kept, unless `takeover` is set; then it is taken.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        addresses: Sequence[str],
        owners: Sequence[RunnerOwner],
        instance: str,
        *,
        lease_s: float,
        silence_s: float,
        takeover: bool = False,
        security: LinkSecurity = OPEN,
        on_change: Callable[[], None],
        on_welcome: Callable[[], None],
        before_fenced: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_welcome` is called when owners have been welcomed, `on_change` when a runner has said goodbye."""
        if len(addresses) != len(owners):
            raise ValueError(f"{len(addresses)} runner addresses for {len(owners)} runners")
        self._instance = instance
        self._lease_s = lease_s
        self._silence_s = silence_s
        self._takeover = takeover
        self._on_change = on_change
        self._on_welcome = on_welcome
        self._before_fenced = before_fenced
        self._clock = clock
        self._refused_since = 0.0
        self._last_turn = clock()
        self._overslept = False
        """Whether this process stood still for so long that the runner may have gone to another one."""
        self._asking = len(addresses) > 1
        self._asked_since = clock()
        self.links: list[RunnerLink] = []
        for number, (address, owner) in enumerate(zip(addresses, owners, strict=True)):
            channel: ClientChannel[Any] = ClientChannel(
                context,
                address,
                RunnerToScheduler,
                lambda number=number: self._hello(number),  # type: ignore[misc]
                silence_s=silence_s,
                clock=clock,
                security=security,
            )
            name = f"the runner of replica {number}" if self._asking else "the runner"
            self.links.append(RunnerLink(channel, owner, name, takeover and not self._asking))

    def _hello(self, number: int) -> Hello:
        link, version, digest = self.links[number], wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST
        name = f"pid {os.getpid()} on {socket.gethostname()}"
        return Hello("scheduler", version, digest, self._instance, link.epoch, link.takes and not link.epoch, name)

    @property
    def epoch(self) -> int:
        """The largest that was granted; 0 before any."""
        return max(link.epoch for link in self.links)

    @property
    def limits(self) -> Limits | None:
        """Those of the runner with the largest pool; None before the first has come."""
        known = [link.limits for link in self.links if link.limits is not None]
        return max(known, key=lambda one: one.num_blocks * one.block_size, default=None)

    @property
    def state(self) -> str:
        """ "ready" if any is; else "stuck" if any is; else "absent"."""
        states = {link.state for link in self.links}
        return next((state for state in ("ready", "stuck") if state in states), "absent")

    @property
    def num_up(self) -> int:
        """Runners that take steps."""
        return sum(link.up for link in self.links)

    def receive(self) -> None:
        """Take in what has arrived. Raises Stopped."""
        now = self._clock()
        self._overslept |= now - self._last_turn > self._silence_s
        self._last_turn = now
        for link in self.links:
            for message in link.channel.receive():
                self._on_message(link, message)

    def tick(self) -> bool:
        """Do what time asks for. Returns whether a runner has been lost. Raises Stopped."""
        lost = False
        for link in self.links:
            if link.channel.tick():
                log.error("%s has been silent for over %.1f s: it counts as gone", link.name, self._silence_s)
            if link.was_up and not link.up:
                gone = "no runner" if len(self.links) == 1 else f"{link.name} is gone"
                log.warning("%s (%s): requests wait for one", gone, link.channel.lost)
                lost = True
            link.was_up = link.up
            link.hangs = link.hangs and link.channel.linked
        if self._asking:
            self._hold_all()
        return lost

    def leave(self, goodbye: Goodbye) -> None:
        """Say goodbye to all that are there."""
        for link in self.links:
            link.channel.leave(goodbye)

    def close(self) -> None:
        """Idempotent."""
        for link in self.links:
            link.channel.close()

    # --- what they say --------------------------------------------------------------------------------------

    def _on_message(self, link: RunnerLink, message: Any) -> None:
        if isinstance(message, Welcome):
            if self._asking:
                link.offered, link.occupied = message, None
            else:
                self._take([(link, message)])
        elif isinstance(message, Refused):
            self._on_refused(link, message)
        elif isinstance(message, Goodbye):
            if message.code in ("fenced", "takeover"):
                self._before_fenced()  # what the last steps brought
                raise Stopped(EXIT_REPLACED, f"another scheduler has taken over: {message.message}")
            log.warning("%s left (%s): requests wait for the next one", link.name, message.message or message.code)
            self._on_change()
        elif link.offered is None:
            link.owner.on_runner(message)

    def _take(self, welcomes: Iterable[tuple[RunnerLink, Welcome]]) -> None:
        """These runners are ours: whatever they held for others is void."""
        for link, welcome in welcomes:
            limits = welcome.limits
            if limits is None:
                raise Stopped(EXIT_REFUSED, f"the welcome of {link.name} has no limits")
            if odd := self._differs(link, limits):
                link.complain(f"{link.name} is not used: {odd}")
                link.channel.leave(Goodbye("shutdown", odd))
                link.channel.hold_off(ODD_HELD_OFF_S)
                continue
            if link.limits is not None and limits != link.limits:
                log.warning("the limits of %s changed: %s", link.name, limits)
            link.epoch, link.limits, link.told, self._refused_since = welcome.epoch, limits, "", 0.0
            link.hangs = self._overslept = False
            link.owner.on_welcome(welcome, limits)
        if self.epoch:
            self._on_welcome()

    def _differs(self, link: RunnerLink, limits: Limits) -> str:
        """Why a runner can't serve beside those that are up; empty if it can."""
        for other in self.links:
            if other is link or not (other.up and other.epoch) or other.limits is None:
                continue
            for name in MODEL_FIELDS:
                mine, theirs = getattr(limits, name), getattr(other.limits, name)
                if mine != theirs:
                    return f"its {name} is {mine!r}, that of {other.name} is {theirs!r}"
        return ""

    def _on_refused(self, link: RunnerLink, refused: Refused) -> None:
        """Another scheduler holds the runner, or it can't be used at all, which is final."""
        if refused.code == wire.BAD_FRAME:
            log.error("%s could not read a frame: %s", link.name, refused.message)
        elif refused.code != wire.OCCUPIED:
            raise Stopped(EXIT_REFUSED, f"{link.name} refuses this scheduler ({refused.code}): {refused.message}")
        elif self._asking:
            link.occupied, link.offered = refused, None
        elif len(self.links) > 1:
            self._on_occupied(link, refused)
        elif link.epoch and self._overslept:
            raise Stopped(EXIT_REPLACED, f"another scheduler has taken over: {refused.message}")
        else:
            self._wait_for_lease(refused)

    def _on_occupied(self, link: RunnerLink, refused: Refused) -> None:
        """Who had the runner has been replaced while it hung, and makes way at once for the APIs to find the other.

        As long as it holds others, a rival has got hold of one that was just starting: it lets go when those refuse it.
        """
        if link.takes or not any(other.up for other in self.links):
            raise Stopped(EXIT_REPLACED, f"another scheduler has taken over: {refused.message}")
        link.complain(f"{link.name} is another scheduler's ({refused.message}): the others serve without it")
        link.channel.hold_off(HELD_OFF_S)

    def _wait_for_lease(self, refused: Refused) -> None:
        """Its holder may be gone, and its lease ends soon. Raises Stopped when it should have."""
        now = self._clock()
        if not self._refused_since:
            self._refused_since = now
            log.warning("%s; waiting %.0f s for its lease to end", refused.message, self._lease_s)
        elif now - self._refused_since > self._lease_s + 2:
            if self.epoch:
                raise Stopped(EXIT_REPLACED, f"another scheduler has taken over: {refused.message}")
            raise Stopped(EXIT_REFUSED, f"{refused.message}; start with --takeover to replace it")

    # --- all or none ----------------------------------------------------------------------------------------

    def _hold_all(self) -> None:
        """Hold the runners, once all that are there have answered; or let go of them."""
        for link in self.links:
            if not link.channel.connected:
                link.offered = None
        offered = [link for link in self.links if link.offered is not None]
        held = [(link, link.occupied) for link in self.links if link.occupied is not None]
        if len(offered) + len(held) + sum(map(self._is_absent, self.links)) < len(self.links):
            return
        if not (offered or held):
            return
        if held and not self._takeover:
            for link in offered:
                link.channel.leave(Goodbye("shutdown", f"{held[0][0].name} is another scheduler's"))
                link.channel.hold_off(HELD_OFF_S)
                link.offered = None
            for link, _ in held:
                link.occupied = None
            self._wait_for_lease(held[0][1])
            return
        self._asking = False
        for link, _ in held:
            link.occupied, link.takes = None, True
        welcomes = [(link, link.offered) for link in offered if link.offered is not None]
        for link in offered:
            link.offered = None
        self._take(welcomes)

    def _is_absent(self, link: RunnerLink) -> bool:
        """Whether nobody answers there for now."""
        if link.offered is not None or link.occupied is not None:
            return False
        gone = not link.channel.linked and self._clock() - self._asked_since > ABSENT_S
        return gone or link.channel.unresponsive
