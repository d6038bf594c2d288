"""Numbers out of records: pure functions from what was recorded to a report, and the report as text.

TTFT: sending to the first chunk with output. E2E: sending to the last chunk. TPOT: (E2E - TTFT) / (n - 1) with n from
the server's usage, one value per request of two tokens or more. ITL: gaps between neighbouring chunks with output, one
value per gap and each of weight 1 however many tokens a chunk held; `tokens_per_chunk` says how many that was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ops.bench.load import LoadResult
from ops.bench.openai_stream import RequestRecord

SCHEMA = "triptych.bench.serve/1"
SLO_METRICS = ("ttft", "tpot", "e2el")
_LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E", "send_delay_ms": "Send delay"}


def summarize(seconds: Iterable[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, standard deviation (of the population) and percentiles in milliseconds; None without values."""
    values = np.fromiter(seconds, dtype=np.float64) * 1e3
    if not values.size:
        return None
    summary = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    summary |= {f"p{p:g}": np.percentile(values, p) for p in percentiles}
    return {name: float(value) for name, value in summary.items()} | {"count": int(values.size)}


def meets(record: RequestRecord, slos: Mapping[str, float]) -> bool:
    """True if a complete answer kept all `slos` (milliseconds). An answer of one token keeps any TPOT; one that never
    showed output keeps no TTFT."""
    if record.error is not None:
        return False
    values = {"ttft": record.ttft, "tpot": record.tpot if record.output_tokens > 1 else 0.0, "e2el": record.e2e}
    return all((value := values[name]) is not None and value * 1e3 <= limit for name, limit in slos.items())


def send_delays(records: Sequence[RequestRecord]) -> list[float]:
    """Seconds that requests were sent late; none where all were due at once, since only the bound paced those."""
    if len({record.planned_at for record in records}) < 2:
        return []
    return [record.sent_at - record.planned_at for record in records]


def build_report(
    result: LoadResult, *, percentiles: Sequence[float], slos: Mapping[str, float], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole report as JSON-ready values. Failed requests count in `errors` and the duration only."""
    good = [record for record in result.records if record.error is None]
    failed = [record for record in result.records if record.error is not None]
    duration = result.duration_s
    input_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    chunks = sum(len(record.chunk_times) for record in good)

    def per_second(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    report: dict[str, Any] = {
        "schema": SCHEMA,
        "config": dict(config),
        "duration_s": duration,
        "completed": len(good),
        "failed": len(failed),
        "errors": dict(Counter(record.error for record in failed)),
        "error_samples": {str(record.error): record.error_message for record in reversed(failed)},
        "peak_in_flight": result.peak_in_flight,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "requests_without_output_text": sum(1 for record in good if not record.chunk_times),
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        "request_throughput": per_second(len(good)),
        "output_throughput": per_second(output_tokens),
        "total_throughput": per_second(input_tokens + output_tokens),
        "ttft_ms": summarize((r.ttft for r in good if r.ttft is not None), percentiles),
        "tpot_ms": summarize((r.tpot for r in good if r.tpot is not None), percentiles),
        "itl_ms": summarize((gap for r in good for gap in r.itl), percentiles),
        "e2e_ms": summarize((r.e2e for r in good), percentiles),
        "send_delay_ms": summarize(send_delays(result.records), percentiles),
    }
    if slos:
        kept = sum(meets(record, slos) for record in result.records)
        report["goodput"] = {
            "slos_ms": dict(slos),
            "requests": kept,
            "fraction": kept / len(result.records) if result.records else 0.0,
            "requests_per_s": per_second(kept),
        }
    return report


def details(result: LoadResult) -> list[dict[str, Any]]:
    """One JSON-ready row per request, times in seconds relative to the first planned one."""
    start = min((record.planned_at for record in result.records), default=0.0)
    rows = []
    for record in result.records:
        row = asdict(record)
        for name in ("planned_at", "sent_at", "finished_at"):
            row[name] -= start
        row["chunk_times"] = [at - start for at in record.chunk_times]
        rows.append(row)
    return rows


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for a terminal."""
    rows: list[tuple[str, str]] = [
        ("Requests completed", f"{report['completed']}"),
        ("Requests failed", f"{report['failed']}"),
        ("Duration (s)", f"{report['duration_s']:.2f}"),
        ("Most in flight", f"{report['peak_in_flight']}"),
        ("Input tokens", f"{report['input_tokens']}"),
        ("Input tokens from prefix cache", f"{report['cached_tokens']}"),
        ("Output tokens", f"{report['output_tokens']}"),
        ("Request throughput (req/s)", f"{report['request_throughput']:.2f}"),
        ("Output throughput (tok/s)", f"{report['output_throughput']:.2f}"),
        ("Total throughput (tok/s)", f"{report['total_throughput']:.2f}"),
    ]
    if report["tokens_per_chunk"] is not None:
        rows.append(("Tokens per chunk", f"{report['tokens_per_chunk']:.2f}"))
    if goodput := report.get("goodput"):
        limits = " ".join(f"{name}:{limit:g}" for name, limit in goodput["slos_ms"].items())
        rows.append((f"Goodput (req/s; {limits} ms)", f"{goodput['requests_per_s']:.2f} ({goodput['fraction']:.1%})"))
    lines = [f"{name:<40}{value:>16}" for name, value in rows]

    columns = next((list(report[key]) for key in _LATENCIES if report[key]), [])
    columns = [column for column in columns if column != "count"]
    if columns:
        lines += ["", f"{'milliseconds':<14}" + "".join(f"{column:>11}" for column in columns)]
    for key, name in _LATENCIES.items():
        if summary := report[key]:
            lines.append(f"{name:<14}" + "".join(f"{summary[column]:>11.2f}" for column in columns))
    if report["errors"]:
        lines += ["", "Errors"]
        for kind, count in sorted(report["errors"].items(), key=lambda item: -item[1]):
            lines.append(f"  {count:>6} {kind}: {report['error_samples'][kind]}")
    return "\n".join(lines)
