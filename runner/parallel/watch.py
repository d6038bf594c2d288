"""Notices that a rank is gone or stuck, and ends this one too: a runner with a dead rank is a dead runner.

All ranks' watches meet once a second in a collective of their own, which fails at once where a process has ended, and
after its timeout where one does not answer. A rank that lives but never finishes a step is `runner.watch`'s business.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

log = logging.getLogger("triptych.runner")

EXIT_RANK_LOST = 6
"""Exit status of a rank that ended itself because another one was gone."""
INTERVAL_S = 1.0


def rank_lost(what: str) -> None:
    """End this process now: only new ranks, all of them, can compute again."""
    log.critical("a rank is lost (%s): ending", what)
    os._exit(EXIT_RANK_LOST)


class RankWatch:
    """Meets its peers in `group` (gloo) until stopped or told of a loss. One that lets the others wait for `timeout_s`
    counts as lost."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, lost: Callable[[str], None] = rank_lost) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._lost = lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch, beside the thread that computes."""
        self._thread.start()

    def stop(self) -> None:
        """What happens to the peers from now on is no loss. Waits until the watch has left its last meeting.

        All ranks must stop, or the ones that don't take this one for stuck.
        """
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            leaving = torch.tensor([int(self._stopped.is_set())])
            try:
                dist.all_reduce(leaving, group=self._group, async_op=True).wait(self._timeout)
            except RuntimeError as error:
                if not self._stopped.is_set():
                    self._lost(str(error))
                return
            if leaving.item() == dist.get_world_size():
                return
            self._stopped.wait(INTERVAL_S)
