"""A rank that is not the first, as a process: `python -m runner.parallel.worker`, told by its parent which one it is.

It has no socket of its own for anybody but its peers, and ends with them, with its parent, or after a SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from protocol.process import die_with_parent, setup_logging
from runner.config import RunnerConfig
from runner.errors import StartError
from runner.parallel.assignment import decode
from runner.parallel.place import Place

log = logging.getLogger("triptych.runner")

TERM_GRACE_S = 5.0
"""A SIGTERM often goes to all ranks at once: so long the first one has to end them in order."""


def leave_ending_to_the_first_rank() -> None:
    """Ctrl-C goes to all ranks, and a rank that waits for the first one hears no signal anyway: a thread takes SIGTERM
    and ends the process if the first rank has not. Call it before anything starts threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        threading.Event().wait(TERM_GRACE_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def run_started_together(config: RunnerConfig, place: Place) -> int:
    """Be the rank that `torchrun` made of this process. The exit code."""
    setup_logging(f"rank {place.rank}", config.log_level)
    leave_ending_to_the_first_rank()
    from runner.parallel.start import StartedTogether, run_rank  # imports torch

    try:
        return run_rank(config, place, StartedTogether(place).store)
    except StartError as error:
        log.error("can't start: %s", error)
        return 1


def main() -> int:
    """Be the rank that the parent assigns. The exit code."""
    assignment = decode(sys.stdin.buffer.read())
    die_with_parent(assignment.parent)
    config, place = assignment.config, assignment.place
    setup_logging(f"rank {place.rank}", config.log_level)
    leave_ending_to_the_first_rank()
    from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]  # C++ without stubs

    from runner.parallel.start import RENDEZVOUS_TIMEOUT, run_rank

    store: Store
    if assignment.store_fd >= 0:
        store = FileStore(f"/proc/self/fd/{assignment.store_fd}", place.size)
    else:
        store = TCPStore(assignment.store_host, assignment.store_port, timeout=RENDEZVOUS_TIMEOUT)
    try:
        return run_rank(config, place, store)
    except StartError as error:
        log.error("can't start: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
