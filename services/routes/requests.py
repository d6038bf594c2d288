"""GET /v1/requests/{id}/timeline: what happened to a request in the scheduler, while it is live and a while after."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.errors import ApiError, printable, unavailable
from services.state import ApiState

PREFIXES = ("chatcmpl-", "cmpl-", "msg_")
MAX_NAME = 256
OTHERS_FIELDS = frozenset({"by", "by_label"})
"""What an event says about somebody else's request."""


class RequestRoutes:
    """Asks the scheduler. A request is named by its answer's id, its X-Request-Id or its number on the wire.

    With API keys, who asks sees what was asked for with the same key, and of others neither that they exist; the
    bearer of an admin key sees all.
    """

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def timeline(self, request: Request) -> Response:
        """The request's timeline, or a list with one for each choice if it has several."""
        name = request.path_params["id"]
        found = await self._find(name, request.scope["state"].get("tenant"))
        if not found:
            raise ApiError(
                404,
                f"request {printable(name[:MAX_NAME])!r} is neither live nor among the last to end",
                code="request_not_found",
                param="id",
            )
        body: Any = found[0] if len(found) == 1 else found
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _find(self, name: str, tenant: str | None) -> list[Any]:
        """This process knows the requests that it has sent last; the scheduler also those of its neighbours."""
        label = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
        names = dict.fromkeys((name, label))  # a client's own id may begin like ours
        for candidate in names:
            ids = self._state.engine.recent.ids(candidate)
            found = [record for request_id in ids for record in await self._ask({"id": str(request_id)}, tenant)]
            if found:
                return found
        if name.isascii() and name.isdigit() and (found := await self._ask({"id": name}, tenant)):
            return found
        for candidate in names:
            if found := await self._ask({"label": candidate}, tenant):
                return found
        return []

    async def _ask(self, arguments: dict[str, str], tenant: str | None) -> list[Any]:
        reply = await self._state.engine.questions.ask("timeline", arguments)
        body = msgspec.json.decode(reply.body)
        if reply.ok:
            records: list[Any] = body.get("requests", [body])
            return records if tenant is None else visible(records, tenant)
        if body["code"] in ("not_found", "invalid_argument"):
            return []
        if body["code"] == "unsupported":
            raise ApiError(501, "This scheduler keeps no timelines", code="unsupported")
        raise unavailable(f"The scheduler can't answer: {body['message']}", body["code"])


def visible(records: list[Any], tenant: str) -> list[Any]:
    """What one tenant may see of these records: its own, without what they say about others."""
    own = [record for record in records if record.get("tenant") == tenant]
    for record in own:
        record["events"] = [
            {name: value for name, value in event.items() if name not in OTHERS_FIELDS} for event in record["events"]
        ]
    return own
