"""Questions to the scheduler over the API's link, each with its answer or the error that there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.channels import ChannelError, ClientChannel
from protocol.messages import Control, ControlReply
from services.errors import unavailable

CONTROL_WAIT_S = 5.0


class Questions:
    """Those that wait for an answer. Use from one event loop only."""

    def __init__(self, channel: ClientChannel[Any], random_bits: Callable[[int], int]) -> None:
        self._channel = channel
        self._random_bits = random_bits
        self._open: dict[int, asyncio.Future[ControlReply]] = {}

    async def ask(self, action: str, arguments: dict[str, str]) -> ControlReply:
        """Put a question to the scheduler. ApiError 503 if there is none, or none that answers in time."""
        nonce = self._random_bits(63)
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._open[nonce] = answer
        try:
            self._channel.send(Control(nonce, action, arguments))
            async with asyncio.timeout(CONTROL_WAIT_S):
                return await answer
        except (ChannelError, TimeoutError) as error:
            raise unavailable("The scheduler does not answer", "engine_unavailable") from error
        finally:
            del self._open[nonce]

    def answered(self, reply: ControlReply) -> None:
        """An answer has come, perhaps too late."""
        question = self._open.get(reply.nonce)
        if question is not None and not question.done():
            question.set_result(reply)
