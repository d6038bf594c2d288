"""A scheduler for measuring the API alone: gives every request tokens whenever it is told to, and keeps no state of KV.

It speaks the real protocol over the real socket, and costs next to nothing per token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import zmq

from protocol import wire
from protocol.channels import ServerChannel, new_instance
from protocol.columns import I32, U64, pack_u64
from protocol.messages import (
    Abort,
    ApiToScheduler,
    Finished,
    Hello,
    Limits,
    Outputs,
    Rejected,
    RequestStatus,
    SchedulerStatus,
    Submit,
    Welcome,
)

STATUS_EVERY_S = 0.3
ROLE = "scheduler"
LONG_PROMPT = 10_000
"""Tokens from which on a prompt is refused: what it costs the API until then is all that is asked."""


class Flood:
    """Binds `address` for one API process. Each `step` gives every request that was submitted its next tokens."""

    def __init__(self, address: str, words: Sequence[int], limits: Limits) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: ServerChannel[Submit | Hello | Abort] = ServerChannel(self._context, address, ApiToScheduler)
        self._limits = limits
        self._words = np.asarray(words, I32)
        self._api: bytes | None = None
        self._step = 0
        self._next_status = 0.0
        self.ids: list[int] = []
        self.sent = 0
        """Tokens that each request has had."""

    @property
    def descriptor(self) -> int:
        """Readable (edge-triggered) when something may have come; `turn` takes it in."""
        return int(self._channel.socket.getsockopt(zmq.FD))

    def turn(self) -> None:
        """Answer what has come, and report in time."""
        accepted: list[int] = []
        refused: list[Rejected] = []
        for identity, message in self._channel.receive():
            if isinstance(message, Hello):
                self._api = identity
                greeting = Welcome(ROLE, wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, new_instance(), 1, self._limits)
                self._channel.welcome(identity, greeting)
                self._next_status = 0.0
            elif isinstance(message, Submit) and len(message.prompt) >= 4 * LONG_PROMPT:
                refused.append(Rejected(message.id, "long_prompt", f"{len(message.prompt) // 4} tokens"))
            elif isinstance(message, Submit):
                self.ids.append(message.id)
                accepted.append(message.id)
        if self._api is None:
            return
        if accepted or refused:
            outputs = Outputs(1, self._step, accepted=pack_u64(accepted), rejected=refused)
            self._channel.send(self._api, outputs)
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            status = SchedulerStatus(1, "ready", len(self.ids), 0, 0.0, limits=self._limits, replicas_up=1)
            self._channel.send(self._api, status)

    def step(self, tokens: int) -> None:
        """Give every request its next `tokens` tokens, in one message, as one step that verified a draft would."""
        assert self._api is not None
        self._step += 1
        count, each = len(self.ids), np.arange(self.sent, self.sent + tokens, dtype=I32)
        picked = (7 * np.arange(count, dtype=np.int64)[:, None] + each) % len(self._words)
        outputs = Outputs(
            1,
            self._step,
            ids=np.repeat(np.asarray(self.ids, U64), tokens).tobytes(),
            positions=np.tile(each, count).tobytes(),
            tokens=self._words[picked].tobytes(),
        )
        self._channel.send(self._api, outputs)
        self.sent += tokens

    def finish(self) -> None:
        """End every request by its length, and forget all of them."""
        assert self._api is not None
        ends = [Finished(one, RequestStatus.LENGTH, num_output_tokens=self.sent) for one in self.ids]
        self._channel.send(self._api, Outputs(1, self._step, finished=ends))
        self.ids, self.sent = [], 0

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()
        self._context.term()
