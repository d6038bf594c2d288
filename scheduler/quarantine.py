"""Passes while there are suspects: one group of them, and everybody else, take turns. No step has rows of both.

Suspects wait in a place of their own and enter by the same tests as all others. A group's rows compute up to where its
members have failed, then wait for the verdict; it may take several steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scheduler.entering import enter
from scheduler.making_way import reclaim
from scheduler.policies.admission import AdmissionTest
from scheduler.suspects import Suspect

if TYPE_CHECKING:
    from scheduler.passes import Pass


def take_turns(this: Pass) -> None:
    """Serve the suspects whose turn it is, or else the others, or whoever has something to compute."""
    core = this.core
    suspects = core.suspects
    if suspects.lockstep and core.flights:
        return
    if suspects.their_turn and _try_groups(this):
        suspects.their_turn = False
        return
    served_before = not suspects.their_turn
    suspects.their_turn = True
    apart = [one.request.slot for group in suspects.groups for one in group if one.request.slot >= 0]
    this.serve(np.array(apart, np.intp), admits=not suspects.blocked)
    if served_before and not (this.anything or this.preempted) and _try_groups(this):
        suspects.their_turn = False


def _try_groups(this: Pass) -> bool:
    """Serve the first group that has something to compute. False if none has, or none can."""
    this.core.suspects.blocked = False
    cap = this.cap
    for group in this.core.suspects.groups:
        this.cap = min(cap, group[0].most) if len(group) == 1 else cap
        _serve_group(this, group)
        if this.anything or this.preempted:
            this.cap = cap
            return True
    this.cap = cap
    return False


def _serve_group(this: Pass, group: list[Suspect]) -> None:
    table, reserves = this.core.table, this.core.strategies.admission.reserves
    if reserves:
        _admit(this, group)
    behind = [one for one in group if one.request.slot >= 0 and table.computed[one.request.slot] < one.reach]
    if behind:
        this.run_rows(np.array([one.request.slot for one in behind], np.intp))
    if not (reserves or this.preempted):
        _admit(this, group)


def _admit(this: Pass, group: list[Suspect]) -> None:
    """Let those of the group enter who wait, until a test binds."""
    core = this.core
    for suspect in group:
        request = suspect.request
        if request.id not in core.waiting.quarantined:
            continue
        this.begin_admission()
        bound = enter(this, request)
        while bound == AdmissionTest.BLOCKS and reclaim(this, request):
            bound = enter(this, request)
        if bound is not None:
            core.hold(request, bound)
            core.suspects.blocked = bound != AdmissionTest.TOKENS
            return
        if request.slot >= 0 and core.strategies.admission.reserves:
            # What it was to compute may be cached meanwhile: something must be left to try.
            suspect.reach = max(suspect.reach, int(core.table.computed[request.slot]) + 1)
