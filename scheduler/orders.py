"""Operators' orders and questions where one process has several replicas: to all of them, or to `replica=N` alone.

What an order means is each scheduler's business. Orders that last reach replicas that come later too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from protocol.messages import Control, ControlReply
from protocol.settings import specs, to_text
from scheduler.config import SchedulerConfig
from scheduler.dispatch import Dispatch
from scheduler.interface import Scheduler
from scheduler.replica import Replica

NOT_READY = b'{"code": "not_ready", "message": "no runner has come yet"}'
SUMS = ("running", "waiting", "swapped", "free_blocks", "usable_blocks", "preemptions", "forgotten")
COUNTS = ("parked", "held_passes")
OF_EACH = (*SUMS[:-1], "paused", "draining")


class Orders:
    """Answers Controls for all replicas, in their order."""

    def __init__(self, replicas: Sequence[Replica], dispatch: Dispatch) -> None:
        self._replicas = replicas
        self._dispatch = dispatch
        self._lasting: dict[str, Control] = {}

    def answer(self, message: Control) -> ControlReply:
        """Carry out an order; what is wrong with it is the answer."""
        arguments = dict(message.arguments)
        chosen = self._chosen(arguments.pop("replica", ""))
        if isinstance(chosen, str):
            return refusal(message.nonce, "invalid_argument", chosen)
        if not chosen:
            return ControlReply(message.nonce, False, NOT_READY)
        order = Control(message.nonce, message.action, arguments)
        if message.action in ("timeline", "explain"):
            return self._find(order, chosen)
        replies = self._give(order, chosen)
        if not replies[-1].ok:
            return replies[-1]
        if message.action in ("pause", "resume", "drain"):
            self._note(order, chosen)
        elif message.action == "reset_prefix_cache":
            for replica in chosen:
                self._dispatch.cache_lost(replica.number)
        bodies = [msgspec.json.decode(reply.body) for reply in replies]
        merged = _merged(chosen, bodies)
        return ControlReply(message.nonce, True, msgspec.json.encode(merged))

    def welcome(self, replica: Replica, new: bool, warm: bool) -> None:
        """A runner has come. Where its scheduler is new, what was ordered of all counts for it too."""
        core = replica.get_core()
        core.refresh_stats()
        if not warm:
            self._dispatch.cache_lost(replica.number)
        if not new:
            return
        settled = next((one.core for one in self._replicas if one is not replica and one.core is not None), None)
        if settled is not None and (changed := _differing(core, settled)):
            core.control(Control(0, "set", changed))
        for order in self._lasting.values():
            core.control(order)

    def _chosen(self, text: str) -> list[Replica] | str:
        if not text:
            return [replica for replica in self._replicas if replica.core is not None]
        if not (text.isascii() and text.isdigit() and int(text) < len(self._replicas)):
            return f"replica {text!r}: there are 0 to {len(self._replicas) - 1}"
        replica = self._replicas[int(text)]
        return [replica] if replica.core is not None else f"replica {text} has had no runner yet"

    def _give(self, order: Control, chosen: Sequence[Replica]) -> list[ControlReply]:
        """The answers up to the first refusal. Settings that some have changed already are changed back then."""
        replies: list[ControlReply] = []
        for replica in chosen:
            former = _texts(replica.get_core(), order.arguments) if order.action == "set" else {}
            replies.append(replica.get_core().control(order))
            if not replies[-1].ok:
                for earlier in chosen[: len(replies) - 1] if former else ():
                    earlier.get_core().control(Control(0, "set", former))
                break
        return replies

    def _note(self, order: Control, chosen: Sequence[Replica]) -> None:
        numbers = {replica.number for replica in chosen}
        shunned = self._dispatch.shunned
        self._dispatch.shunned = shunned - numbers if order.action == "resume" else shunned | numbers
        if len(chosen) < sum(replica.core is not None for replica in self._replicas):
            return
        if order.action == "resume":
            self._lasting.clear()
        else:
            self._lasting[order.action] = order

    def _find(self, order: Control, chosen: Sequence[Replica]) -> ControlReply:
        """A request's record, from who has it or, of those that had it, who had it last."""
        replies = [replica.get_core().control(order) for replica in chosen]
        found = [
            (replica, msgspec.json.decode(reply.body))
            for replica, reply in zip(chosen, replies, strict=True)
            if reply.ok
        ]
        if not found:
            return replies[0]
        if "requests" in found[0][1]:
            records = [one | {"replica": replica.number} for replica, body in found for one in body["requests"]]
            return ControlReply(order.nonce, True, msgspec.json.encode({"requests": records}))
        text = order.arguments.get("id", "")
        holder = self._dispatch.has(int(text)) if text.isdigit() else None
        replica, body = next((one for one in found if one[0].number == holder), found[-1])
        return ControlReply(order.nonce, True, msgspec.json.encode(body | {"replica": replica.number}))


def _texts(core: Scheduler, names: Sequence[str] | dict[str, str]) -> dict[str, str]:
    known = specs(SchedulerConfig)
    return {name: to_text(known[name], getattr(core.config, name)) for name in names if name in known}


def _differing(core: Scheduler, like: Scheduler) -> dict[str, str]:
    names = [name for name in specs(SchedulerConfig) if getattr(core.config, name) != getattr(like.config, name)]
    return _texts(like, names)


def _merged(chosen: Sequence[Replica], bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer of several: sums, what they have in common, and what is each one's own."""
    merged = dict(bodies[0])
    for name in merged:
        if name in SUMS:
            merged[name] = sum(body[name] for body in bodies)
        elif name in COUNTS:
            keys = dict.fromkeys(key for body in bodies for key in body[name])
            merged[name] = {key: sum(body[name].get(key, 0) for body in bodies) for key in keys}
    if "paused" in merged:
        merged["paused"] = next((body["paused"] for body in bodies if body["paused"] != "no"), "no")
        merged["draining"] = all(body["draining"] for body in bodies)
    merged["replicas"] = [
        {"replica": replica.number, "runner": replica.link.state, "epoch": replica.link.epoch}
        | {name: body[name] for name in OF_EACH if name in body}
        for replica, body in zip(chosen, bodies, strict=True)
    ]
    return merged


def refusal(nonce: int, code: str, text: str) -> ControlReply:
    """The answer to an order that can't be carried out."""
    return ControlReply(nonce, False, msgspec.json.encode({"code": code, "message": text}))
