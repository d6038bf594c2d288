"""The small parts of the runner's end of the scheduler link. What they are for is told in `runner.link`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from protocol.messages import Hello, StepResult
from runner.errands import Errand, ErrandStatus


@dataclass(order=True, frozen=True, slots=True)
class Due:
    """An answer that waits for its time; `number` keeps those of one moment in order."""

    at: float
    number: int
    errand: Errand = field(compare=False)
    status: ErrandStatus = field(compare=False)


@dataclass
class SchedulerStats:
    """Counters of the link beyond the channel's own."""

    grants: int = 0
    fenced: int = 0
    refused: int = 0
    stale_steps: int = 0
    unsent_results: int = 0


@dataclass
class Holder:
    """The scheduler that holds the runner. `epoch` is 0 until it has been welcomed."""

    identity: bytes
    hello: Hello
    epoch: int = 0


@dataclass(slots=True)
class Reply:
    """A step's result on its way to the scheduler that sent the step."""

    generation: int
    result: StepResult


@dataclass(slots=True)
class Kept:
    """The answer that was promised to an errand."""

    generation: int
    status: ErrandStatus


@dataclass(slots=True)
class Welcoming:
    """Nothing older runs any more: (pages, hashes) is what the pages hold."""

    generation: int
    inventory: tuple[bytes, bytes]


@dataclass
class Wake:
    """An eventfd that both threads know: a write makes the poll loop turn."""

    fd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def set(self) -> None:
        """Make the loop turn."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """The loop turns."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # the poll woke up for the socket only


def named(hello: Hello) -> str:
    """A scheduler in words."""
    return f"scheduler {hello.instance}" + (f" ({hello.name})" if hello.name else "")
