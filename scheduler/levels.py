"""How full a scheduler is, and whether its books agree: for metrics, status lines and self-checks. Changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler


def refresh(core: CoreScheduler) -> None:
    """Bring the levels in `core.stats` up to date."""
    stats = core.stats
    stats.running = len(core.table)
    stats.swapped = len(core.waiting.swapped)
    stats.parked = dict(Counter(request.status.name.lower() for request in core.waiting.parked.values()))
    stats.preempted_waiting = (
        stats.swapped + sum(1 for r in core.waiting.queue if r.num_preemptions) if stats.preemptions else 0
    ) + len(core.waiting.quarantined)
    stats.quarantined = sum(request.quarantined for request in core.requests.values()) if core.suspects.open else 0
    stats.waiting = len(core.waiting)
    stats.free_blocks, stats.usable_blocks = core.pool.num_free, core.pool.num_usable
    stats.draining_blocks = core.draining_pages.count()
    if core.strategies.admission.reserves:
        stats.reserved_blocks = core.strategies.admission.reserved(core.running_columns())
    stats.evictions = core.pool.evictions
    stats.swapped_out_blocks = core.suspension.swapped_out_blocks
    stats.draining = core.draining
    stats.queue_flips = core.queue_flips
    stats.new_token_ratio = core.strategies.admission.ratio
    outlook = core.strategies.admission.outlook
    stats.forecast_peak_blocks = None if outlook is None else outlook.peak


def faults(core: CoreScheduler) -> list[str]:
    """Violated invariants as sentences. Looks at every block."""
    holders = [request.blocks for request in core.requests.values()]
    faults = core.pool.check([*holders, *core.external.holders(), list(core.draining_pages.pages())])
    waiting = [request.id for request in core.waiting]
    running = [request.id for request in core.table.requests()]
    if len(set(waiting + running)) != len(waiting) + len(running) or set(waiting + running) != set(core.requests):
        faults.append(f"{len(waiting)} waiting and {len(running)} running of {len(core.requests)} requests")
    return faults + core.suspension.check()
