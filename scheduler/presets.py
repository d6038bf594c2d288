"""Named combinations of strategies, and the choice that is in force for a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.policies.admission import ADMISSION_POLICIES, AdmissionPolicy
from scheduler.policies.batch import BATCH_POLICIES, BatchPolicy
from scheduler.policies.queue import QUEUE_POLICIES, QueuePolicy
from scheduler.policies.recovery import RECOVERY_POLICIES, RecoveryPolicy
from scheduler.policies.victim import VICTIM_POLICIES, VictimPolicy


@dataclass(frozen=True, slots=True)
class Preset:
    """One choice per decision, and two details in which the originals differ.

    `decodes_first`: a step serves decode rows before prefill chunks, instead of in running order.
    `self_victim_ends_phase`: when the row that needs a block is itself the victim, no row behind it runs in this step.
    """

    queue: str = "fcfs"
    admission: str = "optimistic"
    batch: str = "mixed"
    victim: str = "last-admitted"
    recovery: str = "recompute"
    decodes_first: bool = True
    self_victim_ends_phase: bool = False


PRESETS: dict[str, Preset] = {
    "triptych": Preset(),
    "vllm": Preset(decodes_first=False, self_victim_ends_phase=True),
}


@dataclass(frozen=True, slots=True)
class Strategies:
    """The five strategy objects in force."""

    queue: QueuePolicy
    admission: AdmissionPolicy
    batch: BatchPolicy
    victim: VictimPolicy
    recovery: RecoveryPolicy
    self_victim_ends_phase: bool


def choose(config: SchedulerConfig) -> Strategies:
    """The strategies of a configuration: its preset's, except where it names one.

    A queue by priority evicts by priority too, unless a victim policy is named: otherwise an urgent request could be
    the first to go.
    """
    preset = PRESETS[config.preset]
    queue = config.queue_policy or preset.queue
    victim = config.victim_policy or ("priority" if queue == "priority" else preset.victim)
    return Strategies(
        queue=QUEUE_POLICIES[queue](),
        admission=ADMISSION_POLICIES[config.admission_policy or preset.admission](config.watermark),
        batch=BATCH_POLICIES[config.batch_policy or preset.batch](
            config.long_prefill_token_threshold, preset.decodes_first
        ),
        victim=VICTIM_POLICIES[victim](),
        recovery=RECOVERY_POLICIES[config.recovery_policy or preset.recovery](),
        self_victim_ends_phase=preset.self_victim_ends_phase,
    )
