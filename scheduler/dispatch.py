"""Several replicas under one scheduler process: which of them has which request, how much each has to do, and what
moves when a runner stays away. Where a request goes is `scheduler.placement`'s rule.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.columns import u64
from protocol.messages import Extend, Outputs, Submit
from scheduler.config import SchedulerConfig
from scheduler.hashing import cache_keys
from scheduler.interface import HandedOver
from scheduler.placement import Placement, Rules, Standing
from scheduler.replica import Replica
from scheduler.results import OUTPUT_COST

log = logging.getLogger("triptych.scheduler")

FIRST_GUESS = 128
"""Outputs that a request is taken to have before any has ended."""
MEMORY = 256
"""Ended requests by whose outputs the next ones are guessed."""


@dataclass(slots=True)
class _Entry:
    """A live request: who has it, and what it counts for in that replica's load until its first token, and after."""

    replica: int
    peer: int
    prefill: float
    decode: float


class Dispatch:
    """Hands requests to replicas. It learns of their ends from what the APIs are told (`told`)."""

    def __init__(self, replicas: Sequence[Replica], config: SchedulerConfig) -> None:
        self.replicas = replicas
        self.shunned: set[int] = set()
        """Replicas that take no new requests while others do."""
        cached = config.enable_prefix_caching or config.placement_policy != "prefix"
        self.placement = Placement(
            Rules(
                config.placement_policy if cached else "least-loaded",
                config.placement_min_match,
                config.placement_balance_tokens,
                config.placement_balance_ratio,
            )
        )
        self._patience_s = config.replica_patience_s
        self._entries: dict[int, _Entry] = {}
        self._fresh: set[int] = set()
        self._loads = [0.0] * len(replicas)
        self._outputs, self._ended = float(FIRST_GUESS), 0

    def __len__(self) -> int:
        """Live requests."""
        return len(self._entries)

    def load(self, number: int) -> float:
        """Work, in tokens, that a replica has been given: prompts up to their first token, and expected outputs."""
        return self._loads[number]

    def has(self, request_id: int) -> int | None:
        """The replica that has a request."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.replica

    # --- requests come --------------------------------------------------------------------------------------

    def submit(self, peer: int, submit: Submit, handed_over: HandedOver | None = None) -> None:
        """Choose a replica and give it the request, which another one had before if it was `handed_over`."""
        known = self._entries.get(submit.id)
        if known is not None:  # it is refused there, for there is one with this id
            self.replicas[known.replica].get_core().add(peer, submit)
            return
        replica, cached = self._place(submit)
        tokens = (len(submit.prompt) + len(submit.emitted)) >> 2
        outputs = min(max(submit.params.max_tokens - (len(submit.emitted) >> 2), 1), self._outputs)
        entry = _Entry(replica.number, peer, float(max(tokens - cached, 1)), OUTPUT_COST * outputs)
        self._entries[submit.id] = entry
        self._fresh.add(submit.id)
        self._loads[replica.number] += entry.prefill + entry.decode
        core = replica.get_core()
        replica.begin_work()
        try:
            if handed_over is None:
                core.add(peer, submit)
            else:
                core.take_in(handed_over)
        except Exception:
            self._forget(submit.id)
            raise

    def _place(self, submit: Submit) -> tuple[Replica, int]:
        fitting = self._fitting(submit)
        standings = [self._standing(replica) for replica in fitting]
        keys = cache_keys(submit.cache_salt, submit.adapter, submit.adapter_generation)
        prompt = submit.prompt + submit.emitted
        chosen = self.placement.choose(
            prompt[: len(prompt) // 4 * 4],
            keys,
            standings,
            choice=submit.params.choice,
            ask=lambda number: self.replicas[number].get_core().cached_tokens(submit),
            ask_always=submit.resumed,
        )
        log.debug(
            "request %d: replica %d (%s, %d tokens known)", submit.id, chosen.number, chosen.why, chosen.known_tokens
        )
        return self.replicas[chosen.number], chosen.known_tokens

    def _standing(self, replica: Replica) -> Standing:
        limits = replica.link.limits
        assert limits is not None
        free = replica.get_core().stats.free_blocks * limits.block_size
        load, capacity = self._loads[replica.number], (limits.num_blocks - 1) * limits.block_size
        return Standing(replica.number, load, free, capacity, limits.max_num_batched_tokens)

    def _fitting(self, submit: Submit) -> list[Replica]:
        """The replicas to choose from: those with a runner, if any; of these those that the whole request fits, else
        the largest. What fits none of them, but one whose runner is gone, waits there."""
        known = [replica for replica in self.replicas if replica.core is not None]
        up = [replica for replica in known if replica.up]
        pool = [replica for replica in up if replica.number not in self.shunned] or up or known
        tokens = (len(submit.prompt) + len(submit.emitted)) >> 2
        if not any(_capacity(replica) >= tokens for replica in pool):
            pool = [replica for replica in known if _capacity(replica) >= tokens] or pool
        limits = pool[0].link.limits
        assert limits is not None
        most = min((len(submit.prompt) >> 2) + submit.params.max_tokens, limits.max_model_len)
        largest = max(map(_capacity, pool))
        return [replica for replica in pool if _capacity(replica) >= min(most - 1, largest)]

    # --- requests go on -------------------------------------------------------------------------------------

    def extend(self, peer: int, message: Extend) -> None:
        """More of an open request's prompt."""
        entry = self._entries.get(message.id)
        if entry is not None:
            self.replicas[entry.replica].get_core().extend(peer, message)

    def abort(self, peer: int, ids: Iterable[int]) -> None:
        """Each where it is."""
        by_replica: dict[int, list[int]] = {}
        for request_id in ids:
            entry = self._entries.get(request_id)
            if entry is not None:
                by_replica.setdefault(entry.replica, []).append(request_id)
        for number, mine in by_replica.items():
            self.replicas[number].get_core().abort(peer, mine)

    def told(self, number: int, outputs: Outputs) -> None:
        """What a replica says to an API: who has its first token, and who has ended."""
        if self._fresh and outputs.ids:
            for request_id in self._fresh.intersection(u64(outputs.ids).tolist()):
                entry = self._entries[request_id]
                self._loads[entry.replica] -= entry.prefill
                entry.prefill = 0.0
                self._fresh.discard(request_id)
        for end in outputs.finished:
            if self.has(end.id) == number:
                self._forget(end.id)
                self._ended += end.num_output_tokens > 0
                share = 1 / min(max(self._ended, 1), MEMORY)
                self._outputs += share * (end.num_output_tokens - self._outputs) if end.num_output_tokens else 0.0
        for rejection in outputs.rejected:
            if rejection.code != "duplicate_id" and self.has(rejection.id) == number:
                self._forget(rejection.id)

    def gone(self, peer: int) -> int:
        """An API has left. Returns how many requests ended with it."""
        for request_id in [one for one, entry in self._entries.items() if entry.peer == peer]:
            self._forget(request_id)
        return sum(replica.core.drop_peer(peer) for replica in self.replicas if replica.core is not None)

    def _forget(self, request_id: int) -> None:
        entry = self._entries.pop(request_id)
        self._fresh.discard(request_id)
        self._loads[entry.replica] -= entry.prefill + entry.decode

    # --- replicas come and go -------------------------------------------------------------------------------

    def cache_lost(self, number: int) -> None:
        """What a replica's cache held is gone."""
        self.placement.affinity.forget(number)

    def leaving(self, now: float) -> list[HandedOver]:
        """Requests whose runner has been away for too long while others are there: they are to be submitted again."""
        found: list[HandedOver] = []
        up = [replica for replica in self.replicas if replica.up]
        for replica in self.replicas:
            core, since = replica.core, replica.down_since
            away = since is not None and now - since >= self._patience_s
            if not (up and away) or core is None or not core.has_requests:
                continue
            left = core.hand_over(max(map(_capacity, up)))
            for one in left:
                self._forget(one.submit.id)
            if left:
                log.warning("replica %d has no runner: %d of its requests go on elsewhere", replica.number, len(left))
            found += left
        return found


def _capacity(replica: Replica) -> int:
    """Tokens that its pool holds."""
    limits = replica.link.limits
    return 0 if limits is None else (limits.num_blocks - 1) * limits.block_size
