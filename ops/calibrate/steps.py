"""Reads the steps that a runner has run, over its private socket, and what follows from their times alone."""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec
import numpy as np
import numpy.typing as npt

from ops.calibrate.fit import Samples
from ops.runtime_dir import live
from ops.unix_http import UnixConnection
from protocol.messages import Limits
from protocol.settings import ENV_PREFIX
from runner.step_log import StepPage

TIMEOUT_S = 10.0
Ints = npt.NDArray[np.int64]


class StepsError(OSError):
    """The runner's steps can't be read; says where they were looked for."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps of one runner, parallel columns [n]; times in ns of the monotonic clock."""

    limits: Limits
    first: int
    tokens: Ints
    context: Ints
    rows: Ints
    received: Ints
    started: Ints
    ended: Ints
    copy: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def next(self) -> int:
        """The number of the step after these."""
        return self.first + len(self)

    def samples(self, group: int) -> Samples:
        """Their sizes and times; what copies took isn't counted. Steps without tokens are left out."""
        chosen = self.tokens > 0
        ns = (self.ended - self.started - self.copy)[chosen]
        return Samples(
            self.tokens[chosen].astype(np.float64),
            self.context[chosen].astype(np.float64),
            self.rows[chosen].astype(np.float64),
            np.maximum(ns, 1).astype(np.float64),
            np.full(len(ns), group, np.int64),
        )

    def pauses(self) -> Ints:
        """ns between the end of a step and the start of the next, where that had been received before."""
        waited = self.received[1:] <= self.ended[:-1]
        return (self.started[1:] - self.ended[:-1])[waited]


class StepReader:
    """Reads from the runner in `runtime_dir` what it has run since the last look."""

    def __init__(self, runtime_dir: str) -> None:
        self._path = os.path.join(runtime_dir, "runner.metrics.sock")
        self._since = 0

    def skip(self) -> Limits:
        """Forget what has run so far; the runner's limits. StepsError if there is no runner."""
        seen = self.read()
        return seen.limits

    def read(self) -> Steps:
        """The steps since the last call that the runner still knows. StepsError."""
        connection = UnixConnection(self._path, TIMEOUT_S)
        try:
            connection.request("GET", "/steps?" + urlencode({"since": self._since}))
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise StepsError(f"no steps from {self._path}: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise StepsError(f"no steps from {self._path}: {answer.status} {body[:200]!r}")
        page = msgspec.json.decode(body, type=StepPage)
        columns = (page.tokens, page.context, page.rows, page.received_ns, page.started_ns, page.ended_ns, page.copy_ns)
        steps = Steps(page.limits, page.first, *(np.array(column, np.int64) for column in columns))
        self._since = steps.next
        return steps


def find_runtime_dir(given: str | None, environ: Mapping[str, str]) -> str:
    """The private directory of the server that is meant: the one named, else the newest `triptych serve`'s.

    StepsError if there is none.
    """
    named = given or environ.get(ENV_PREFIX + "RUNTIME_DIR", "")
    if named:
        return named
    found = live(environ)
    if not found:
        raise StepsError("no running `triptych serve` of this user; name its --runtime-dir")
    return found[0]
