"""The replay's report for a terminal: presets side by side, the differences in words. Plain text, 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from ops.replay.compare import figure, share
from ops.replay.result import Percentiles, Report, RunResult

WIDTH = 100
LABEL = 27
COLUMN = 18

Cell = Callable[[RunResult], str]


def _tail(which: Callable[[RunResult], Percentiles]) -> Cell:
    def cell(run: RunResult) -> str:
        one = which(run)
        return f"{figure(one.p50)} / {figure(one.p99)}" if one.count else "-"

    return cell


ROWS: tuple[tuple[str, Cell] | None, ...] = (
    ("within objectives", lambda run: share(run.goodput.share)),
    ("  first token in time", lambda run: share(run.goodput.ttft_share)),
    ("  time per token kept", lambda run: share(run.goodput.tpot_share)),
    ("completed", lambda run: f"{run.completed:,} of {run.num_requests:,}"),
    None,
    ("TTFT p50 / p99, s", _tail(lambda run: run.latency.ttft_s)),
    ("queue p50 / p99, s", _tail(lambda run: run.latency.queue_s)),
    ("TPOT p50 / p99, ms", _tail(lambda run: run.latency.tpot_ms)),
    ("ITL p50 / p99, ms", _tail(lambda run: run.latency.itl_ms)),
    ("longest ITL p50 / p99, ms", _tail(lambda run: run.latency.max_itl_ms)),
    ("E2E p50 / p99, s", _tail(lambda run: run.latency.e2e_s)),
    ("longest E2E, s", lambda run: figure(run.latency.e2e_s.max)),
    None,
    ("requests/s", lambda run: figure(run.requests_per_s)),
    ("output tokens/s", lambda run: figure(run.output_tokens_per_s)),
    ("prompt tokens/s", lambda run: figure(run.prompt_tokens_per_s)),
    ("makespan / busy, s", lambda run: f"{figure(run.makespan_s)} / {figure(run.busy_s)}"),
    None,
    ("preemptions", lambda run: f"{run.preemptions:,}"),
    ("  of requests / most", lambda run: f"{run.preempted_requests:,} / {run.max_preemptions}"),
    ("tokens computed", lambda run: f"{run.tokens.scheduled:,}"),
    ("  useful", lambda run: _part(run, run.tokens.prefill + run.tokens.decode)),
    ("  replayed / wasted", lambda run: f"{_part(run, run.tokens.replayed)} / {_part(run, run.tokens.wasted)}"),
    ("prompt from the cache", lambda run: share(run.tokens.cached / run.tokens.prompt if run.tokens.prompt else 0.0)),
    None,
    ("pool mean / peak", lambda run: f"{run.mean_used:.0%} / {run.peak_used:.0%}"),
    ("waiting mean / peak", lambda run: f"{figure(run.mean_waiting)} / {run.peak_waiting:,}"),
    ("rows a step mean / peak", lambda run: f"{figure(run.mean_rows)} / {run.peak_rows}"),
    ("steps", lambda run: f"{run.steps:,}"),
    ("mean step, ms", lambda run: figure(run.mean_step_ms)),
)


def render(report: Report) -> str:
    """The whole report, without a final newline."""
    lines = [*wrapped(headline(report))]
    per_table = max(1, (WIDTH - LABEL) // COLUMN)
    for start in range(0, len(report.runs), per_table):
        lines += ["", *_table(report.runs[start : start + per_table])]
    for words in report.words:
        lines += ["", *wrapped(words)]
    digests = [f"{run.name}: {digest_text(run)}" for run in report.runs if run.decisions]
    return "\n".join([*lines, *(["", "decisions (CRC-32 after so many steps)", *digests] if digests else [])])


def headline(report: Report) -> str:
    """Which trace, how it was changed, on what, within which objectives."""
    trace, run = report.trace, report.runs[0]
    parts = [f"{trace['file']}: {trace['requests']:,} requests in {figure(float(trace['span_s']))} s"]
    parts[0] += f" ({figure(run.offered_per_s)} a second)"
    if trace["time_scale"] != 1.0:
        parts.append(f"times x {trace['time_scale']:g}")
    if trace["repeat"] != 1:
        parts.append(f"{trace['repeat']} times over")
    if trace["dropped"]:
        parts.append(f"{trace['dropped']:,} rows dropped that no context holds or that have no output")
    if trace["unknown_lengths"]:
        parts.append(f"the scheduler is told {trace['unknown_lengths']:,} outputs for each")
    limits = run.limits
    parts.append(f"{limits['blocks']:,} blocks of {limits['block_size']}, cost {run.cost['model']}")
    goodput = run.goodput
    parts.append(f"objectives: TTFT {goodput.slo_ttft_s:g} s, TPOT {goodput.slo_tpot_s * 1e3:g} ms")
    return "; ".join(parts) + "."


def rows(runs: Sequence[RunResult]) -> list[tuple[str, list[str]] | None]:
    """The table's lines: a label and a cell per run; None where a group ends."""
    found: list[tuple[str, list[str]] | None] = []
    for row in ROWS:
        found.append(None if row is None else (row[0], [row[1](run) for run in runs]))
    ends = sorted({end for run in runs for end in run.ends} - {"length", "stopped"})
    for end in ends:
        place = next(index for index, row in enumerate(found) if row is None)
        found.insert(place, (f"  {end or 'no end'}", [f"{run.ends.get(end, 0):,}" for run in runs]))
    return found


def digest_text(run: RunResult) -> str:
    """The digests of a run's decisions on one line."""
    return ", ".join(f"{steps} {value}" for steps, value in run.decisions.items())


def wrapped(text: str) -> list[str]:
    """A paragraph within the width."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _table(runs: Sequence[RunResult]) -> list[str]:
    lines = [_line("", [run.name for run in runs])]
    for row in rows(runs):
        lines.append("" if row is None else _line(*row))
    return lines


def _line(label: str, cells: Sequence[str]) -> str:
    return (label.ljust(LABEL) + "".join(_cut(cell).rjust(COLUMN) for cell in cells)).rstrip()


def _cut(cell: str) -> str:
    return cell if len(cell) < COLUMN else cell[: COLUMN - 2] + "…"


def _part(run: RunResult, tokens: int) -> str:
    total = run.tokens.scheduled
    return f"{tokens / total:.1%}" if total else "-"
