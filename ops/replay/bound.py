"""How many requests must be late, whoever schedules, if none may take longer than a given time: a linear program.

It knows every arrival and every length beforehand, and may split requests. Work is conserved above the knee of the
cost model, so the backlog at any time is the same for every order, and all of it belongs to requests that are late, but
for what is computed within the objective of the first token. A late one can stand in for it from its arrival until it
must begin to end in time. At least so many are late that their work covers the backlog at all times; which, is the
program's choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ops.traces import TraceError, TraceRow, read_trace
from runner.step_costs import LinearCost
from scheduler.policies.work import BUCKETS, buckets_of

Floats = npt.NDArray[np.float64]

BIN_S = 3.0
"""Times are rounded to bins of this length."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests by arrival: seconds from the first, prompt and output tokens. One entry each."""

    at_s: Floats
    prompt: Floats
    outputs: Floats

    @classmethod
    def of(cls, rows: Sequence[TraceRow]) -> Load:
        """From a trace's rows."""
        at = np.array([row.at_ns for row in rows], np.float64) / 1e9
        lengths = np.array([(row.input_tokens, row.output_tokens) for row in rows], np.float64)
        return cls(at - at.min(), lengths[:, 0], lengths[:, 1])


def least_late(
    load: Load, cost: LinearCost, longest_s: float, tpot_s: float, ttft_s: float = 2.0, *, alike: bool = False
) -> float:
    """The share of requests, 0 to 1, that are late at least if every request ends `longest_s` after its arrival at the
    latest; those on time get their first output within `ttft_s` and the others one every `tpot_s`, those that are late
    one a step once they have begun. `alike`: of those who come together with prompts of about the same length the same
    share is late, as where nobody knows which will have many outputs. ValueError if no schedule can end all by then."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ValueError("this needs scipy: pip install 'triptych[analysis]'") from error
    token, context = cost.token_ns / 1e9, cost.context_ns / 1e9
    each = token + cost.row_ns / 1e9
    steps = np.maximum(load.outputs - 1, 0)
    work = token * load.prompt + steps * (each + context * (load.prompt + load.outputs / 2))
    num_bins = int((load.at_s.max() + longest_s) // BIN_S) + 2
    arrival = (load.at_s // BIN_S).astype(int)
    backlog = _backlog(_demand(load, arrival, num_bins, token, each, context, tpot_s))
    until = arrival + (np.maximum(longest_s - steps * cost.fixed_ns / 1e9, 0.0) // BIN_S).astype(int) + 1
    lengths = np.minimum(until, num_bins) - arrival
    choices = arrival * BUCKETS + buckets_of(load.prompt) if alike else np.arange(len(work))
    _, choice, counts = np.unique(choices, return_inverse=True, return_counts=True)
    columns = np.repeat(choice, lengths)
    rows = np.concatenate([np.arange(first, first + length) for first, length in zip(arrival, lengths, strict=True)])
    covers = csr_array((-np.repeat(work, lengths), (rows, columns)), shape=(num_bins, len(counts)))
    least = -np.maximum(backlog - ttft_s, 0)
    found = linprog(counts, A_ub=covers, b_ub=least, bounds=(0, 1), method="highs")
    if found.status != 0:
        raise ValueError(f"no order ends every request within {longest_s:g} s")
    return float(found.fun) / len(work)


def _demand(
    load: Load, arrival: npt.NDArray[np.int64], num_bins: int, token: float, each: float, context: float, tpot_s: float
) -> Floats:
    """Seconds of work that can first be done in each bin: prompts on arrival, an output when it is due."""
    demand = np.bincount(arrival, weights=token * load.prompt, minlength=num_bins)
    per_bin = BIN_S / tpot_s
    for step in range(int(load.outputs.max() // per_bin) + 1):
        done = step * per_bin
        count = np.clip(load.outputs - 1 - done, 0, per_bin)
        seconds = count * (each + context * (load.prompt + done + count / 2))
        demand += np.bincount(np.minimum(arrival + step, num_bins - 1), weights=seconds, minlength=num_bins)
    return demand


def _backlog(demand: Floats) -> Floats:
    """Seconds of work left at the end of each bin, by a machine that never idles while there is some."""
    left, found = 0.0, []
    for seconds in demand.tolist():
        left = max(0.0, left + seconds - BIN_S)
        found.append(left)
    return np.array(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the bound for a trace; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ops.replay.bound", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--time-scale", type=float, default=1.0, help="as for `triptych replay`")
    parser.add_argument("--longest-e2e", type=float, required=True, help="seconds that a request may take at most")
    parser.add_argument("--alike", action="store_true", help="who has many outputs isn't known beforehand")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="seconds to the first token of those on time")
    parser.add_argument("--slo-tpot", type=float, default=0.05, help="seconds per output token of those on time")
    options = parser.parse_args(arguments)
    try:
        load = Load.of(read_trace(options.trace, time_scale=options.time_scale))
        objectives = options.slo_tpot, options.slo_ttft
        share = least_late(load, LinearCost(), options.longest_e2e, *objectives, alike=options.alike)
    except (OSError, TraceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"at least {share:.1%} of {len(load.at_s):,} requests are late, at most {1 - share:.1%} on time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
