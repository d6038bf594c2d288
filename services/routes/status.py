"""GET /health, /ready, /version, /load and /v1/models: what this server is and how it does."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protocol import wire
from services.bodies import json_response
from services.errors import RETRY_AFTER_S, ApiError
from services.state import ApiState


class StatusRoutes:
    """Handlers that answer from what is known here; only `load` asks other API processes."""

    def __init__(self, state: ApiState) -> None:
        self.state = state

    async def health(self, request: Request) -> Response:
        """200 while the whole chain works, 503 with the reason otherwise. Draining is still healthy."""
        problem = self.state.engine.chain.problem()
        body = {"status": "unhealthy" if problem else "ok", "reason": problem or None}
        return _health(body | self.state.engine.chain.replicas(), problem)

    async def ready(self, request: Request) -> Response:
        """200 while new requests are welcome, 503 with the reason otherwise."""
        chain = self.state.engine.chain
        problem = "shutting down" if self.state.draining else chain.problem()
        if not problem and chain.limits is None:
            problem = "the model's limits are not known yet"
        if not problem and chain.status is not None and chain.status.draining:
            problem = "the scheduler is draining"
        body = {"status": "not ready" if problem else "ready", "reason": problem or None}
        return _health(body | chain.replicas(), problem)

    async def version(self, request: Request) -> Response:
        """The program's version and the protocol it speaks."""
        version = {"version": program_version(), "protocol": wire.PROTOCOL_VERSION, "schema": wire.SCHEMA_DIGEST}
        return json_response(version)

    async def load(self, request: Request) -> Response:
        """How much is going on in all API processes behind this port, in each of them if several, and the scheduler."""
        live = await self.state.neighbours.live(self.state.engine.num_live())
        status = self.state.engine.chain.status
        return json_response(
            {
                "server_load": sum(live.values()),
                "by_process": {str(number): count for number, count in live.items() if number},
                "running": status.running if status else None,
                "waiting": status.waiting if status else None,
                "kv_usage": status.kv_usage if status else None,
            }
        )

    async def models(self, request: Request) -> Response:
        """The served model under each of its names."""
        return json_response({"object": "list", "data": [self._model(name) for name in self._names()]})

    async def model(self, request: Request) -> Response:
        """One name, or 404."""
        name = request.path_params["name"]
        if name not in self._names():
            self.state.check_model(name)
            raise ApiError(404, f"model: {name[:200]!r} does not exist", code="model_not_found", param="model")
        return json_response(self._model(name))

    def _names(self) -> list[str]:
        return [self.state.config.served_model_name, *self.state.config.model_alias]

    def _model(self, name: str) -> dict[str, Any]:
        limits = self.state.engine.chain.limits
        return {
            "id": name,
            "object": "model",
            "created": self.state.started,
            "owned_by": "triptych",
            "root": self.state.model,
            "parent": None,
            "max_model_len": limits.max_model_len if limits else None,
        }


def _health(body: dict[str, Any], problem: str) -> Response:
    answer = json_response(body, 503 if problem else 200)
    if problem:
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer


def program_version() -> str:
    """The installed version; "unknown" from a source tree that was never installed."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "unknown"
