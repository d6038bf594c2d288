"""GET /openapi.json: what this server understands and answers, as OpenAPI 3.1."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from protocol.messages import Limits
from services.openapi.document import About, document
from services.routes.status import program_version
from services.state import ApiState


class Description:
    """Made when it is first asked for, and again when the model's limits have become known or have changed."""

    def __init__(self, state: ApiState, *, needs_key: bool, open_paths: Iterable[str]) -> None:
        self._state = state
        self._needs_key = needs_key
        self._open_paths = open_paths
        self._made: tuple[Limits | None, bytes] | None = None

    async def openapi(self, request: Request) -> Response:
        """The document."""
        limits = self._state.engine.chain.limits
        if self._made is None or self._made[0] != limits:
            self._made = (limits, msgspec.json.encode(document(self._about(limits))))
        return Response(self._made[1], media_type="application/json")

    def _about(self, limits: Limits | None) -> About:
        config = self._state.config
        served = None if config.accept_any_model else (config.served_model_name, *config.model_alias)
        return About(program_version(), limits, served, self._needs_key, self._open_paths)
