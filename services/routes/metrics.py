"""GET /metrics: one text for all processes on this machine, the API processes behind one port included."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from services.state import ApiState


class MetricsRoute:
    """Serves what this process counts and what the others say."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, version 0.0.4."""
        return Response(await self._state.neighbours.metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
