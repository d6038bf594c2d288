"""From the command line's options to what is run: the workload, and per preset a configuration, a runner and a cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ops.config import suggest
from ops.replay.engine import Setup
from ops.replay.summary import INERT_SETTINGS
from ops.replay.workload import Workload, build
from ops.traces import TraceError, TraceRow, read_trace
from protocol.settings import SettingError, Spec, convert, specs
from runner.config import RunnerConfig
from runner.step_costs import LinearCost, MeasuredCost, RooflineCost, StepCost, TickCost, read_measured
from scheduler.config import PRESET_NAMES, SchedulerConfig
from scheduler.costs import NAMED_SHAPES, NULL_BLOCKS, kv_bytes_per_token
from scheduler.process import load_scheduler_class

COSTS: dict[str, type] = {"tick": TickCost, "linear": LinearCost, "roofline": RooflineCost}
MODEL, TFLOPS, BANDWIDTH_GB_S, WEIGHT_BYTES = "llama-3-8b", 400.0, 3350.0, 2


@dataclass(frozen=True, slots=True)
class Pool:
    """The simulated machine's limits, as served by default in the recorded reference runs: an 8B model on 80 GB."""

    blocks: int = 20_480
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072


def workload_of(options: argparse.Namespace) -> tuple[Workload, dict[str, float | int | str]]:
    """What is to be replayed, and the report's account of it. Raises SettingError for a trace that can't be read."""
    scale = options.time_scale or 1.0
    try:
        rows = read_trace(options.trace, limit=options.limit, time_scale=scale)
    except (OSError, TraceError) as error:
        raise SettingError(str(error)) from error
    if options.rate:
        rows = at_rate(rows, options.rate)
    pool = pool_of(options, cost_of(options))
    workload = build(
        rows,
        max_model_len=pool.max_model_len,
        max_tokens=options.unknown_lengths or 0,
        repeat=options.repeat,
        until_s=options.until or 0.0,
    )
    if not len(workload):
        raise SettingError(f"{options.trace}: none of its {len(rows)} rows can be replayed")
    facts: dict[str, float | int | str] = {
        "file": options.trace.name,
        "requests": len(workload),
        "dropped": workload.dropped,
        "span_s": workload.rows[workload.order[-1]].at_ns / 1e9,
        "time_scale": scale,
        "rate": options.rate or 0.0,
        "limit": options.limit or 0,
        "until_s": options.until or 0.0,
        "repeat": options.repeat,
        "unknown_lengths": options.unknown_lengths or 0,
    }
    return workload, facts


def at_rate(rows: list[TraceRow], rate: float) -> list[TraceRow]:
    """The same rows, their times stretched so that `rate` come per second on average."""
    span_ns, wanted_ns = rows[-1].at_ns - rows[0].at_ns, round((len(rows) - 1) / rate * 1e9)
    if not span_ns:
        raise SettingError("--rate: all rows of this trace come at once, there is no rate to change")
    return [
        replace(row, at_ns=row.at_ns * wanted_ns // span_ns, cancel_ns=row.cancel_ns * wanted_ns // span_ns)
        for row in rows
    ]


def setups_of(options: argparse.Namespace, vocab_size: int) -> list[Setup]:
    """One setup per preset that was asked for, with `vocab_size` token ids, the last of which ends a text.

    Raises SettingError that names the option that is wrong.
    """
    cost = cost_of(options)
    pool = pool_of(options, cost)
    names = preset_names(options.preset or ["triptych"])
    changes = settings_of(options.set, names)
    try:
        scheduler_cls = load_scheduler_class(options.scheduler_cls)
    except ValueError as error:
        raise SettingError(f"--scheduler-cls: {error}") from error
    runner = RunnerConfig(
        backend="sim",
        num_blocks_override=pool.blocks + NULL_BLOCKS,
        block_size=pool.block_size,
        max_model_len=pool.max_model_len,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        sim_vocab_size=vocab_size,
        sim_eos_token_id=vocab_size - 1,
        sim_seed=options.seed,
        sim_strict=False,
        sim_host_blocks=options.host_blocks,
        sim_copy_gb_s=options.copy_gb_s or 0.0,
        sim_kv_bytes_per_block=options.kv_block_bytes,
    )
    usual: dict[str, Any] = {
        "max_num_seqs": pool.max_num_seqs,
        "pipeline_depth": options.depth,
        "queue_seed": options.seed,
        "max_num_queued_reqs": 0,
        "slo_ttft_s": options.slo_ttft or 0.0,
        "slo_tpot_s": options.slo_tpot or 0.0,
        "batch_policy": options.batch or "",
    }
    setups = []
    for name, preset in names.items():
        config = SchedulerConfig(**{**usual, **changes[name], "preset": preset})
        # The machine takes what a preset's own limits allow.
        tokens = config.max_num_batched_tokens or pool.max_num_batched_tokens
        machine = replace(runner, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=tokens)
        setups.append(Setup(name, config, machine, cost, scheduler_cls))
    return setups


def preset_names(given: Iterable[str]) -> dict[str, str]:
    """Run name → preset, from `PRESET` or `NAME=PRESET`. Raises SettingError for an unknown preset or a name twice."""
    names: dict[str, str] = {}
    for text in given:
        name, equals, preset = text.partition("=")
        preset = preset if equals else name
        if preset not in PRESET_NAMES:
            hint = suggest(preset, PRESET_NAMES)
            raise SettingError(f"--preset: {preset!r} is not one of {', '.join(PRESET_NAMES)}.{hint}")
        if not name or ":" in name or name in names:
            raise SettingError(f"--preset: the name {name!r} is empty, has a colon or is there twice")
        names[name] = preset
    return names


def settings_of(given: Iterable[str], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The scheduler's settings per run, from `key=value` for all and `NAME:key=value` for one; the later wins.

    Raises SettingError that names the key.
    """
    known = {name: spec for name, spec in specs(SchedulerConfig).items() if name not in INERT_SETTINGS}
    changes: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in given:
        left, equals, value = text.partition("=")
        target, colon, key = left.rpartition(":")
        if not equals:
            raise SettingError(f"--set: {text!r} is not key=value or NAME:key=value")
        if colon and target not in changes:
            raise SettingError(f"--set {text}: there is no preset {target!r} here.{suggest(target, changes)}")
        key = key.replace("-", "_")
        if key == "preset":
            raise SettingError("--set: a preset is chosen with --preset")
        if key not in known:
            raise SettingError(f"--set: the scheduler has no setting {key!r}.{suggest(key, known)}")
        for name in [target] if colon else changes:
            changes[name][key] = convert(known[key], value, f"--set {left}")
    return changes


def pool_of(options: argparse.Namespace, cost: StepCost) -> Pool:
    """The options' limits; where one isn't given, those of the server that a cost model was measured on, if any."""
    values = asdict(Pool())
    if isinstance(cost, MeasuredCost):
        measured = {name: getattr(cost, name) for name in values if name != "blocks"}
        measured["blocks"] = max(cost.num_blocks - NULL_BLOCKS, 0)
        values |= {name: value for name, value in measured.items() if value}
    values |= {name: value for name in values if (value := getattr(options, name))}
    return Pool(**values)


def cost_of(options: argparse.Namespace) -> StepCost:
    """The cost model. Raises SettingError for an unknown one, a file that is none, or a number that it doesn't have."""
    kind = COSTS.get(options.cost)
    given = {name for name in ("model", "tflops", "bandwidth") if getattr(options, name) is not None}
    if given and options.cost != "roofline":
        raise SettingError(f"--{sorted(given)[0]} needs --cost roofline")
    cost: StepCost
    if kind is RooflineCost:
        cost = _roofline(options)
    elif kind is not None:
        cost = kind()
    else:
        path = Path(options.cost)
        if not path.exists():
            hint = suggest(options.cost, COSTS)
            raise SettingError(f"--cost: {options.cost!r} is none of {', '.join(COSTS)} and no such file exists.{hint}")
        try:
            cost = read_measured(path)
        except (OSError, ValueError) as error:
            raise SettingError(f"--cost: {error}") from error
    return _with_numbers(cost, options.cost_set)


def _roofline(options: argparse.Namespace) -> RooflineCost:
    name = (options.model or MODEL).lower()
    shape = NAMED_SHAPES.get(name)
    if shape is None:
        raise SettingError(f"--model: {name!r} is not one of {', '.join(NAMED_SHAPES)}.{suggest(name, NAMED_SHAPES)}")
    return RooflineCost(
        weight_bytes=shape.parameters * WEIGHT_BYTES,
        kv_bytes_per_token=kv_bytes_per_token(shape),
        flops_per_token=2 * shape.parameters,
        bytes_per_s=(options.bandwidth or BANDWIDTH_GB_S) * 1e9,
        flops_per_s=(options.tflops or TFLOPS) * 1e12,
    )


def _with_numbers(cost: StepCost, given: Iterable[str]) -> StepCost:
    """The model with some numbers replaced, from `key=value`."""
    current = {name: getattr(cost, name) for name in type(cost).__annotations__}
    changes: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        key = key.replace("-", "_")
        if not equals:
            raise SettingError(f"--cost-set: {text!r} is not key=value")
        if key not in current or isinstance(current[key], str):
            numbers = [name for name, value in current.items() if not isinstance(value, str)]
            raise SettingError(f"--cost-set: this model has no number {key!r}, it has {', '.join(numbers)}")
        changes[key] = convert(_number(key, type(current[key])), value, f"--cost-set {key}")
    return type(cost)(**{**current, **changes})


def _number(name: str, kind: type) -> Spec:
    """What a number of a cost model may be: not negative."""
    return Spec(
        name=name, kind=kind, optional=False, default=None, help="", unit="", choices=None, minimum=0, maximum=None,
        secret=False,
    )  # fmt: skip
