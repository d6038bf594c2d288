"""/v1/responses: OpenAI's Responses API over what serves chat completions, and the answers that it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Message, Send

from services import schema
from services.bodies import ClientGone, send_body
from services.errors import ApiError, internal, invalid, unsupported
from services.generate import Generator, Job
from services.journal import Call
from services.responses.answer import Response
from services.responses.formats import ResponsesFormat
from services.responses.items import JsonItem, read_input
from services.responses.schema import ResponsesRequest
from services.responses.shelf import CANCEL, DELETE, GET, Found
from services.responses.translate import CHAT_NAMES, check, to_chat
from services.routes.chat import Chat
from services.state import ApiState
from services.translate import rename

log = logging.getLogger("triptych.api")

DEFAULT_PAGE, MAX_PAGE = 20, 100


class Responses(Chat):
    """POST: items in, a response out; whole, as events, or in the background."""

    def __init__(self, state: ApiState) -> None:
        super().__init__(state)
        self._background: set[asyncio.Task[None]] = set()

    async def _job(self, body: bytes, call: Call) -> Job:
        request, unknown = schema.decode(body, ResponsesRequest)
        self.state.note_unknown(unknown)
        check(request)
        items = read_input(request.input)
        request.input = msgspec.Raw()  # it would keep the whole body in memory
        if request.previous_response_id is not None:
            items = [*await self._before(request.previous_response_id, call.tenant), *items]
        try:
            job = await self._checked(to_chat(request, items), call)
        except ApiError as error:
            rename(error, CHAT_NAMES)
            raise
        return replace(job, format=ResponsesFormat(self._response(request, items, call)), include_usage=True)

    async def _before(self, id: str, tenant: str) -> list[JsonItem]:
        """The conversation up to a kept response, its output included."""
        found = await self.state.responses.do(GET, id, tenant or None)
        status = found.payload["status"]
        if status not in ("completed", "incomplete"):
            raise invalid(
                f"previous_response_id: that response is {status}; only a complete one can be continued",
                "previous_response_id",
            )
        return [*found.items, *found.payload["output"]]

    def _response(self, request: ResponsesRequest, items: list[JsonItem], call: Call) -> Response:
        kept = self.state.responses.store.enabled and request.store is not False
        if request.background and not kept:
            raise invalid("background: this server keeps no responses", "background")
        defaults = self.state.defaults
        return Response(
            id=self.state.responses.new_id(),
            tenant=call.tenant,
            created=int(self.state.wall()),
            model=self.state.model,
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            request=request,
            items=items,
            kept=kept,
        )

    async def respond(self, job: Job, call: Call, send: Send) -> None:
        """Answer, or start what goes on without the client and say so."""
        assert isinstance(job.format, ResponsesFormat)
        response = job.format.response
        if response.background:
            await self._start(job, response, call)
            await send_body(send, msgspec.json.encode(response.payload()))
            return
        generator = Generator(self.state, call, job)
        await generator.begin()
        with self._followed(response):
            await generator.answer(send)

    async def _start(self, job: Job, response: Response, call: Call) -> None:
        """Begin the job as a task. Raises ApiError if it isn't taken."""
        most = self.state.config.responses_background_max
        if len(self._background) >= most:
            raise ApiError(
                429,
                f"background: {len(self._background)} responses are under way without a client, at most {most} may be",
                code="background_full",
                param="background",
                retry_after_s=1,
            )
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = loop.create_future()
        own = Call(self.state.clock, call.label, call.tenant)
        response.abort = own.disconnect
        task = loop.create_task(self._run(job, response, own, begun))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await begun

    async def _run(self, job: Job, response: Response, call: Call, begun: asyncio.Future[None]) -> None:
        """One response in the background, from its Submit to its end."""
        generator = Generator(self.state, call, job)
        try:
            try:
                await generator.begin()
            except Exception as error:
                begun.set_exception(error)
                return
            with contextlib.suppress(ApiError, ClientGone), self._followed(response):
                begun.set_result(None)
                await generator.answer(_to_nobody)
        except Exception:
            log.exception("response %s failed", response.id)
        finally:
            self.over(call)

    @contextlib.contextmanager
    def _followed(self, response: Response) -> Iterator[None]:
        """Keep a response from now on, and note how it ends."""
        self.state.responses.keep(response)
        try:
            yield
        except ApiError as error:
            response.fail(error)
            raise
        except (ClientGone, asyncio.CancelledError):
            response.cancel()
            raise
        except Exception:
            response.fail(internal())
            raise
        finally:
            response.abort = lambda: None
            self.state.responses.keep(response)


async def _to_nobody(message: Message) -> None:
    """Where the bytes of an answer go that is kept and not sent."""


class KeptResponses:
    """GET and DELETE of a response, its cancellation and its input items. With API keys each sees its own."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def one(self, request: Request) -> HttpResponse:
        """The response as it is now; or forget it, and cancel it if it still runs."""
        if request.method == "DELETE":
            id = (await self._do(DELETE, request)).payload["id"]
            return _json({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false").lower() in ("true", "1"):
            raise unsupported("stream", "streaming a response that has been created before")
        return _json((await self._do(GET, request)).payload)

    async def cancel(self, request: Request) -> HttpResponse:
        """End a response that runs in the background. One that is over stays as it is."""
        found = await self._do(CANCEL, request)
        if not found.payload["background"]:
            raise invalid("Only a response that was created with background can be cancelled", "id")
        return _json(found.payload)

    async def input_items(self, request: Request) -> HttpResponse:
        """What the model was given, earlier responses of the conversation included: the newest first, in pages."""
        limit = _whole_number(request.query_params.get("limit", str(DEFAULT_PAGE)))
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid(f"order: {order[:40]!r}, allowed are 'asc' and 'desc'", "order")
        items = list((await self._do(GET, request)).items)
        if order == "desc":
            items.reverse()
        after = request.query_params.get("after")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise invalid(f"after: there is no item {after[:100]!r}", "after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return _json({"object": "list", "data": page, **ends, "has_more": len(items) > limit})

    async def _do(self, what: str, request: Request) -> Found:
        return await self._state.responses.do(what, request.path_params["id"], request.scope["state"].get("tenant"))


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_PAGE):
        raise invalid(f"limit: {text[:40]!r} is not a whole number from 1 to {MAX_PAGE}", "limit", "out_of_range")
    return int(text)


def _json(body: dict[str, Any]) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(body), media_type="application/json")
