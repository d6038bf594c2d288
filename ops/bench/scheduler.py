"""`triptych bench scheduler`: what one pass and its update cost, with few and many running, waiting, cached.

No processes, no model: the scheduler class itself, fed with results made between the timed calls. With
`--vllm-python` vLLM's scheduler does the same steps in its own interpreter, in turns with ours.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ops.bench.beside_vllm import add_options, parse, report_of
from ops.bench.scheduler_peer import Peer, PeerFailed
from ops.bench.scheduler_subject import (
    BLOCK_SIZE,
    PassTime,
    Subject,
    decodes,
    prompt_tokens,
)
from ops.bench.scheduler_wire import PARTS, measure_wire
from ops.bench.serve import Formatter, non_negative_int, positive_int, write_report
from scheduler.presets import QUEUE_POLICIES

SCHEMA = "triptych.bench.scheduler/1"
RUNNING = (64, 256, 1024)
ROUNDS = 3
WARM_UP = 2

DEFINITIONS = """definitions:
  pass        schedule(): from the state to a step. update: applying its result and taking what clients are told.
              Medians over all steps, each with all N rows decoding, one in 16 of them crossing a block border.
  waiting     the same with M more requests queued that no slot is free for; the ratio is to none waiting, and the
              two take turns in one run.
  admission   add() of one prompt and the pass that admits it, on an otherwise empty scheduler. A full hit finds all
              blocks but the last in the prefix cache.
  wire        one decode step of N rows over an ipc socket; receive lasts until the frame is there.
  vLLM        schedule() + update_from_output() of its scheduler on the same numbers; ratio: vLLM's time / ours.

Use the ratios: other work on the machine moves both sides.
Exit code: 0 fine, 1 if the peer failed, 2 for wrong options."""


def medians(times: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Medians in µs of (schedule ns, update ns) pairs and of their sums."""
    rows = list(times)
    return {
        "schedule_us": statistics.median(schedule for schedule, _ in rows) / 1e3,
        "update_us": statistics.median(update for _, update in rows) / 1e3,
        "total_us": statistics.median(schedule + update for schedule, update in rows) / 1e3,
    }


def steady(times: Sequence[PassTime], running: int) -> Sequence[PassTime]:
    """`times`, checked: every step computed and sampled every running row. RuntimeError if not."""
    for index, time in enumerate(times):
        if (time.rows, time.sampled) != (running, running):
            raise RuntimeError(f"step {index} had {time.rows} rows and {time.sampled} samples, not {running}")
    return times


def measure_passes(
    running: int, steps: int, prompt_len: int, policy: str, peer: Peer | None, messages: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steady decode of `running` rows, in turns with the peer if there is one; and its last step over the wire."""
    max_steps = ROUNDS * (steps + WARM_UP)
    subject = decodes(running, 0, policy=policy, prompt_len=prompt_len, max_steps=max_steps)
    version = peer.load(running, prompt_len, max_steps) if peer else ""
    ours: list[PassTime] = []
    theirs: list[tuple[int, int, int]] = []
    for _ in range(ROUNDS):
        ours += take(subject, steps)
        if peer:
            theirs += peer.steps(steps + WARM_UP)[WARM_UP:]
    steady(ours, running)
    report: dict[str, Any] = {"running": running, "policy": policy or "default", **summary(ours)}
    if peer:
        if any(rows != running for _, _, rows in theirs):
            raise PeerFailed(f"a step of the peer did not have {running} rows")
        report["vllm"] = {
            "version": version,
            "steps": len(theirs),
            **medians((schedule, update) for schedule, update, _ in theirs),
        }
        report["ratio"] = report["vllm"]["total_us"] / report["total_us"]
    assert subject.last_step is not None
    return report, {"running": running, **measure_wire(subject.last_step, messages)}


def take(subject: Subject, steps: int) -> list[PassTime]:
    """`steps` timed passes after a short warm-up, which makes up for what ran in between."""
    for _ in range(WARM_UP):
        subject.step()
    return [subject.step() for _ in range(steps)]


def summary(times: Sequence[PassTime]) -> dict[str, Any]:
    """Counts and medians of passes."""
    return {
        "steps": len(times),
        "rows": sum(time.rows for time in times),
        "blocks_taken": sum(time.blocks_taken for time in times),
        **medians((time.schedule_ns, time.update_ns) for time in times),
    }


def measure_waiting(running: int, waiting: int, steps: int, prompt_len: int, policy: str) -> dict[str, Any]:
    """Steady decode with `waiting` requests queued, in turns with the same without any."""
    max_steps = ROUNDS * (steps + WARM_UP)
    without, queued = (
        decodes(running, count, policy=policy, prompt_len=prompt_len, max_steps=max_steps) for count in (0, waiting)
    )
    base: list[PassTime] = []
    times: list[PassTime] = []
    for _ in range(ROUNDS):
        base += take(without, steps)
        times += take(queued, steps)
    steady(base, running)
    steady(times, running)
    report = {"running": running, "policy": policy, "waiting": queued.core.refresh_stats().waiting, **summary(times)}
    report["without_us"] = medians((time.schedule_ns, time.update_ns) for time in base)["total_us"]
    report["ratio"] = report["total_us"] / report["without_us"]
    return report


def measure_admission(prompt_len: int, requests: int, policy: str, *, hit: bool) -> dict[str, Any]:
    """Admission of prompts of `prompt_len` tokens that all are in the prefix cache, or none of which is."""
    blocks = -(-(prompt_len + 1) // BLOCK_SIZE)
    subject = Subject(max_num_seqs=1, num_blocks=2 * blocks * (requests + 2), queue_policy=policy)
    add_ns, schedule_ns, cached = [], [], []
    for index in range(requests + 1):  # the first one warms up, or fills the cache
        before = subject.core.refresh_stats().prefix_hit_tokens
        elapsed = subject.submit(prompt_tokens(0 if hit else index, prompt_len), 1)
        first = subject.step()
        if index:
            add_ns.append(elapsed)
            schedule_ns.append(first.schedule_ns)
            cached.append(subject.core.refresh_stats().prefix_hit_tokens - before)
        while subject.core.has_requests:
            subject.step()
    return {
        "hit": hit,
        "requests": len(add_ns),
        "prompt_tokens": prompt_len,
        "cached_tokens": int(statistics.median(cached)),
        "add_us": statistics.median(add_ns) / 1e3,
        "schedule_us": statistics.median(schedule_ns) / 1e3,
        "total_us": statistics.median(a + b for a, b in zip(add_ns, schedule_ns, strict=True)) / 1e3,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements that the options ask for. Raises PeerFailed."""
    running = options.running or list(RUNNING)
    policy = options.policy or ""  # the preset's own
    policies = [options.policy] if options.policy else list(QUEUE_POLICIES)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "config": {
            "running": running,
            "waiting": options.waiting,
            "policies": policies,
            "steps": ROUNDS * options.steps,
            "prompt_len": options.prompt_len,
            "block_size": BLOCK_SIZE,
        },
        "passes": [],
        "wire": [],
        "waiting": [],
    }
    with ExitStack() as stack:
        peer = stack.enter_context(Peer(options.vllm_python, options.model_dir)) if options.vllm_python else None
        for count in running:
            passes, wire = measure_passes(count, options.steps, options.prompt_len, policy, peer, options.messages)
            report["passes"].append(passes)
            report["wire"].append(wire)
    if options.waiting:
        report["waiting"] = [
            measure_waiting(count, options.waiting, options.steps, options.prompt_len, name)
            for name in policies
            for count in running
        ]
    report["admission"] = [
        measure_admission(options.admission_len, options.admissions, policy, hit=hit) for hit in (True, False)
    ]
    return report


def render(report: Mapping[str, Any]) -> str:
    """The report as tables for a terminal; times in µs."""
    lines = [f"{'pass and update (µs)':<26}{'schedule':>10}{'update':>10}{'total':>10}{'vLLM':>10}{'ratio':>8}"]
    for row in report["passes"]:
        line = f"{row['running']:>6} running{'':<12}{row['schedule_us']:>10.0f}{row['update_us']:>10.0f}"
        line += f"{row['total_us']:>10.0f}"
        lines.append(line + (f"{row['vllm']['total_us']:>10.0f}{row['ratio']:>8.1f}" if "vllm" in row else ""))
    if report["waiting"]:
        lines += ["", f"{'with requests waiting (µs)':<40}{'total':>10}{'none':>10}{'ratio':>8}"]
        lines += [
            f"{row['running']:>6} running, {row['waiting']:>6} waiting  {row['policy']:<15}"
            f"{row['total_us']:>8.0f}{row['without_us']:>10.0f}{row['ratio']:>8.2f}"
            for row in report["waiting"]
        ]
    lines += ["", f"{'admission (µs)':<36}{'add':>10}{'schedule':>10}{'total':>10}"]
    lines += [
        f"{row['prompt_tokens']:>6} tokens, {row['cached_tokens']:>6} of them cached  "
        f"{row['add_us']:>8.0f}{row['schedule_us']:>10.0f}{row['total_us']:>10.0f}"
        for row in report["admission"]
    ]
    lines += ["", f"{'one step over ipc (µs)':<26}{'bytes':>8}" + "".join(f"{part:>9}" for part in (*PARTS, "total"))]
    lines += [
        f"{row['running']:>6} rows{'':<15}{row['bytes']:>8}"
        + "".join(f"{row[f'{part}_us']:>9.1f}" for part in (*PARTS, "total"))
        for row in report["wire"]
    ]
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych bench scheduler`."""
    parser = argparse.ArgumentParser(
        prog="triptych bench scheduler",
        description="Times the scheduler alone: passes with their updates, admission, and a step's way over a socket.",
        epilog=DEFINITIONS,
        formatter_class=Formatter,
    )
    counts = " ".join(map(str, RUNNING))
    parser.add_argument("--running", type=positive_int, nargs="+", metavar="N", help=f"running decodes ({counts})")
    parser.add_argument("--waiting", type=non_negative_int, default=10_000, metavar="M", help="queued; 0: skip that")
    parser.add_argument(
        "--policy", choices=tuple(QUEUE_POLICIES), help="queue policy; if unset, the waiting part takes all in turn"
    )
    parser.add_argument("--steps", type=positive_int, default=100, metavar="K", help=f"per round; {ROUNDS} rounds")
    parser.add_argument("--prompt-len", type=positive_int, default=512, metavar="TOKENS", help="of running requests")
    parser.add_argument("--admission-len", type=positive_int, default=8192, metavar="TOKENS", help="prompt to admit")
    parser.add_argument("--admissions", type=positive_int, default=30, metavar="K", help="prompts admitted per case")
    parser.add_argument("--messages", type=positive_int, default=300, metavar="K", help="steps sent over the socket")
    add_options(parser, model_dir="vLLM's config")
    return parser


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, measures, reports; returns the exit code."""
    parser = build_parser()
    options = parse(parser, argv)
    report = report_of(parser, options, run, PeerFailed)
    write_report(report, render(report), options.json)
    return 0
