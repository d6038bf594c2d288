"""Named combinations of strategies, and the choice that is in force for a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from scheduler.config import SchedulerConfig
from scheduler.policies.admission import AdmissionOptions, AdmissionPolicy, Credit, Optimistic, Predictive
from scheduler.policies.arranged import ARRANGED, Arranged
from scheduler.policies.batch import BatchOptions, BatchPolicy, Dynamic, Mixed, PrefillFirst, Serial, Static
from scheduler.policies.fair import Fair
from scheduler.policies.forecast import Forecast
from scheduler.policies.on_time import OnTime
from scheduler.policies.paced import Paced
from scheduler.policies.queue import Deadline, Fcfs, LongestOutputFirst, Priority, QueueOptions, QueuePolicy, Random
from scheduler.policies.recovery import RECOVERY_POLICIES, RecoveryPolicy
from scheduler.policies.victim import VICTIM_POLICIES, VictimOptions, VictimPolicy

QUEUE_POLICIES: dict[str, Callable[[QueueOptions | None], QueuePolicy]] = {
    **{policy.name: policy for policy in (Fcfs, Priority, LongestOutputFirst, Random, Fair, Deadline, OnTime)},
    **{name: partial(Arranged, name) for name in ARRANGED},
}
BATCH_POLICIES: dict[str, Callable[[BatchOptions], BatchPolicy]] = {
    policy.name: policy for policy in (Mixed, Paced, PrefillFirst, Serial, Static, Dynamic)
}
ADMISSION_POLICIES: dict[str, Callable[[AdmissionOptions], AdmissionPolicy]] = {
    policy.name: policy for policy in (Optimistic, Predictive, Forecast, Credit)
}


@dataclass(frozen=True, slots=True)
class Preset:
    """One choice per decision, and the details in which the originals differ.

    `decodes_first`: a step serves decode rows before prefill chunks, instead of in running order.
    `rotating`: who was served first is last the next time, among decodes and among prefill chunks.
    `self_victim_ends_phase`: when the row that needs a block is itself the victim, no row behind it runs in this step.
    `retracts_until_fit`: when decodes lack blocks, victims leave in one go until the rest fit, before anyone is served.
    `victims_rejoin_tail`: a victim goes to the end of the queue instead of keeping its place.
    `guarded`: the guarantees beyond the originals hold: age bound, bounded preemption and bypassing, and no victim that
    frees nothing.
    """

    queue: str = "fcfs"
    admission: str = "optimistic"
    batch: str = "mixed"
    victim: str = "last-admitted"
    recovery: str = "recompute"
    decodes_first: bool = True
    rotating: bool = False
    self_victim_ends_phase: bool = False
    retracts_until_fit: bool = False
    victims_rejoin_tail: bool = False
    guarded: bool = True


_SGLANG = Preset(
    admission="predictive",
    batch="prefill-first",
    victim="least-progress",
    retracts_until_fit=True,
    victims_rejoin_tail=True,
    guarded=False,
)

PRESETS: dict[str, Preset] = {
    "triptych": Preset(queue="on-time", batch="paced"),
    "vllm": Preset(decodes_first=False, self_victim_ends_phase=True, guarded=False),
    "sglang": _SGLANG,
    "sglang-lpm": replace(_SGLANG, queue="lpm"),
    "credit": Preset(admission="credit", batch="mixed", rotating=True, guarded=False),
}


@dataclass(frozen=True, slots=True)
class Strategies:
    """The five strategy objects in force, and the preset they come from."""

    queue: QueuePolicy
    admission: AdmissionPolicy
    batch: BatchPolicy
    victim: VictimPolicy
    recovery: RecoveryPolicy
    preset: Preset


def chosen(config: SchedulerConfig) -> Preset:
    """The names in force: the preset's, except where the configuration names another.

    A queue by priority evicts by priority too, unless a victim policy is named: otherwise an urgent request could be
    the first to go.
    """
    preset = PRESETS[config.preset]
    named = {field.name: getattr(config, f"{field.name}_policy", "") for field in fields(Preset)}
    preset = replace(preset, **{name: value for name, value in named.items() if value})  # type: ignore[arg-type]
    if preset.queue == "priority" and not config.victim_policy:
        preset = replace(preset, victim="priority")
    return preset


def tenant_weights(parts: Sequence[str]) -> dict[str, float]:
    """Shares from `tenant=weight` texts. Raises ValueError for what is no text of this form or no positive number."""
    weights = {}
    for part in parts:
        name, _, text = part.rpartition("=")
        try:
            weights[name] = float(text)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < float("inf"):
            raise ValueError(f"tenant_weights: {part!r} is not tenant=weight with a weight above 0")
    return weights


def keep(previous: Strategies, fresh: Strategies) -> Strategies:
    """`fresh`, but of `previous` those that would be made the same, with all they have learned."""
    fresh.admission.inherit(previous.admission)
    kept = {}
    for field in ("queue", "admission", "batch", "victim", "recovery"):
        old, new = getattr(previous, field), getattr(fresh, field)
        if old.name == new.name and getattr(old, "options", None) == getattr(new, "options", None):
            kept[field] = old
    return replace(fresh, **kept)


def choose(config: SchedulerConfig, block_size: int) -> Strategies:
    """The strategies of a configuration. Raises ValueError for tenant weights that are none."""
    preset = chosen(config)
    weights = tenant_weights(config.tenant_weights)
    return Strategies(
        queue=QUEUE_POLICIES[preset.queue](
            QueueOptions(
                config.queue_seed,
                config.queue_fallback_waiting,
                weights=weights,
                has_cache=config.enable_prefix_caching,
                slo_ttft_s=config.slo_ttft_s,
                grace_s=config.late_grace_s,
                patience=config.late_patience,
                ahead=config.late_ahead,
                most_late=config.late_share,
            )
        ),
        admission=ADMISSION_POLICIES[preset.admission](
            AdmissionOptions(
                block_size,
                config.watermark,
                config.schedule_conservativeness,
                config.clip_max_new_tokens,
                config.forecast_confidence,
                config.forecast_memory,
            )
        ),
        batch=BATCH_POLICIES[preset.batch](
            BatchOptions(
                config.long_prefill_token_threshold,
                config.long_prefill_token_threshold_adaptive,
                preset.decodes_first,
                rotating=preset.rotating,
                slo_ttft_s=config.slo_ttft_s,
                slo_tpot_s=config.slo_tpot_s,
            )
        ),
        victim=VICTIM_POLICIES[preset.victim](VictimOptions(preset.retracts_until_fit)),
        recovery=RECOVERY_POLICIES[preset.recovery](),
        preset=preset,
    )
