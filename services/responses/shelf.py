"""Finds a kept response in whichever API process keeps it: its id says which. Asks over the processes' private sockets.

Each process answers for its own `ResponseStore`. One that has been started again has lost what it kept.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from services.errors import ApiError, invalid, printable, unavailable
from services.neighbours import Neighbours
from services.responses.answer import Response
from services.responses.events import News
from services.responses.items import ID_BYTES, JsonItem
from services.responses.store import ResponseStore

PAGE = "/response"
GET, CANCEL, DELETE, EVENTS = "get", "cancel", "delete", "events"
NO_EVENTS = "stream: only a response that was created with background and stream can be followed"
MAX_ID = 128
_ID = re.compile(r"resp_([0-9a-f]{2})[0-9a-f]+")
LOOK_AGAIN_S = 0.1
"""How often a neighbour is asked for news of a response."""
ANSWER_S = 0.8
"""How long this process's loop may take to answer a neighbour; the neighbour waits a little longer."""


class Found(msgspec.Struct):
    """A response as another process tells of it."""

    payload: dict[str, Any]
    items: list[JsonItem]
    events: list[str] | None = None
    over: bool = False
    gone: str = ""
    """Why there are no events; "" if there are."""


class Shelf:
    """Looks up, cancels and deletes. ApiError 404 for what is nowhere, or somebody else's."""

    def __init__(self, store: ResponseStore, neighbours: Neighbours) -> None:
        self.store = store
        self._neighbours = neighbours
        self._loop: asyncio.AbstractEventLoop | None = None

    def new_id(self) -> str:
        """An id that leads to this process."""
        return f"resp_{self._neighbours.number:02x}{secrets.token_hex(ID_BYTES)}"

    def keep(self, response: Response) -> None:
        """Put a response on the shelf, if it is to be kept, or note how it has grown."""
        self._loop = asyncio.get_running_loop()
        if response.kept:
            self.store.put(response)

    def own(self, id: str, tenant: str | None) -> Response | None:
        """A response that this process keeps."""
        return self.store.get(id, tenant) if _process(id) == self._neighbours.number else None

    async def news(self, id: str, tenant: str | None, after: int) -> News:
        """The events of a response after the one of this number. ApiError 400 for one that has none to follow."""
        found = await self.do(EVENTS, id, tenant, after)
        if found.gone:
            raise invalid(found.gone, "starting_after" if found.events is None else "stream")
        return News([event.encode() for event in found.events or ()], found.over)

    async def do(self, what: str, id: str, tenant: str | None, after: int = -1) -> Found:
        """`get`, `cancel` or `delete` a response; what it is like afterwards.

        Only what runs in the background is cancelled. ApiError 404 for what nobody keeps, or keeps for others; 503 if
        the process that would know doesn't answer.
        """
        number = _process(id)
        found: Found | None = None
        if number == self._neighbours.number:
            found = self._do(what, id, tenant, after)
        elif number is not None and self._neighbours.has(number):
            query = {"do": what, "id": id, "after": str(after), **({} if tenant is None else {"tenant": tenant})}
            body = await self._neighbours.ask(number, f"{PAGE}?{urlencode(query)}")
            if not body:
                raise unavailable(f"API process {number}, which keeps this response, doesn't answer", "process_silent")
            found = msgspec.json.decode(body, type=Found | None)
        if found is None:
            raise ApiError(
                404,
                f"response {printable(id[:MAX_ID])!r} is not kept here (any more): {self.store.rules}",
                code="response_not_found",
                param="id",
            )
        return found

    def page(self, query: Mapping[str, str]) -> bytes:
        """What a neighbour is answered. Called in another thread than the loop's."""
        loop = self._loop
        if loop is None:
            return b"null"  # nothing has been kept yet

        async def work() -> Found | None:
            after = int(query.get("after", "-1"))
            return self._do(query.get("do", ""), query.get("id", ""), query.get("tenant"), after)

        found = asyncio.run_coroutine_threadsafe(work(), loop).result(ANSWER_S)
        return msgspec.json.encode(found)

    def _do(self, what: str, id: str, tenant: str | None, after: int) -> Found | None:
        response = self.store.get(id, tenant)
        if response is None:
            return None
        if what == CANCEL and response.background:
            response.cancel()
        elif what == DELETE:
            self.store.delete(id, tenant)
        elif what == EVENTS:
            return _events(response, after)
        return Found(response.payload(), response.items)


def _events(response: Response, after: int) -> Found:
    if response.log is None:
        return Found({}, [], [], gone=NO_EVENTS)
    try:
        news = response.log.news(after)
    except ApiError as error:
        return Found({}, [], gone=error.message)
    return Found({}, [], [event.decode() for event in news.events], news.over)


def _process(id: str) -> int | None:
    """The number of the process that made an id; None for one that none has made."""
    match = _ID.fullmatch(id)
    return int(match[1], 16) if match is not None else None
