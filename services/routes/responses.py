"""/v1/responses: OpenAI's Responses API over what serves chat completions, and the answers that it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Message, Receive, Scope, Send

from services import schema
from services.bodies import ClientGone, json_response, send_body
from services.errors import ApiError, internal, invalid
from services.generate import Generator, Job
from services.journal import Call
from services.responses import paging
from services.responses.answer import Response
from services.responses.events import EventLog, News, send_events
from services.responses.formats import ResponsesFormat
from services.responses.items import JsonItem, read_input
from services.responses.schema import ResponsesRequest
from services.responses.shelf import CANCEL, DELETE, GET, LOOK_AGAIN_S, Found
from services.responses.translate import CHAT_NAMES, CHAT_WORDS, check, to_chat
from services.responses.truncate import fitted
from services.routes.chat import Chat
from services.sse import DisconnectWatch
from services.state import ApiState
from services.translate import rename

log = logging.getLogger("triptych.api")


class Responses(Chat):
    """POST: items in, a response out; whole, as events, or in the background."""

    def __init__(self, state: ApiState) -> None:
        super().__init__(state)
        self._background: set[asyncio.Task[None]] = set()

    async def _job(self, body: bytes, call: Call) -> Job:
        request, unknown = schema.decode(body, ResponsesRequest)
        self.state.note_unknown(unknown, call.ignored)
        check(request)
        items = read_input(request.input)
        request.input = msgspec.Raw()  # it would keep the whole body in memory
        if request.previous_response_id is not None:
            items = [*await self._before(request.previous_response_id, call.tenant), *items]
        try:
            job = await self._fitting(request, items, call)
        except ApiError as error:
            rename(error, CHAT_NAMES, CHAT_WORDS)
            raise
        tokenizer, logprobs = self.state.text.tokenizer, job.prompts[0].params.logprobs
        answer = ResponsesFormat(self._response(request, items, call), tokenizer, logprobs)
        return replace(job, format=answer, include_usage=True)

    async def _fitting(self, request: ResponsesRequest, items: list[JsonItem], call: Call) -> Job:
        """The job for the conversation, or for as much of it as fits if the request allows that."""

        async def use(some: list[JsonItem]) -> Job:
            return await self._checked(to_chat(request, some), call)

        return await (fitted(items, use) if request.truncation == "auto" else use(items))

    async def _before(self, id: str, tenant: str) -> list[JsonItem]:
        """The conversation up to a kept response, its output included."""
        try:
            found = await self.state.responses.do(GET, id, tenant or None)
        except ApiError as error:
            error.param = "previous_response_id"
            raise
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
            log=EventLog() if request.background and request.stream else None,
        )

    async def respond(self, job: Job, call: Call, send: Send) -> None:
        """Answer, or start what goes on without the client and say so."""
        assert isinstance(job.format, ResponsesFormat)
        response = job.format.response
        if response.background:
            await self._start(job, response, call)
            if response.log is None:
                await send_body(send, msgspec.json.encode(response.payload()))
            else:
                with _standing_by(call):
                    await _followed_log(response.log, -1, call, send, self.state.config.sse_ping_s)
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
        own = Call(self.state.clock, call.label, call.tenant, call.account)
        response.abort = own.disconnect
        task = loop.create_task(self._run(job, response, own, begun))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await begun

    async def _run(self, job: Job, response: Response, call: Call, begun: asyncio.Future[None]) -> None:
        """One response in the background, from its Submit to its end."""
        assert isinstance(job.format, ResponsesFormat)
        generator = Generator(self.state, call, job)
        if call.account is not None:
            call.account.hold()
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
            if call.account is not None:
                call.account.leave()
            if response.log is not None:
                if response.status == "cancelled":
                    job.format.cancelled()
                response.log.close()

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


@contextlib.contextmanager
def _standing_by(call: Call) -> Iterator[None]:
    """A call that only follows what runs in the background takes none of its key's places: the response has one."""
    if call.account is not None:
        call.account.leave()
    try:
        yield
    finally:
        if call.account is not None:
            call.account.hold()


async def _followed_log(events: EventLog, after: int, call: Call, send: Send, ping_s: float) -> None:
    """Send the events of a response in this process as they come."""

    async def look(number: int) -> News:
        return events.news(number)

    events.follow(call)
    try:
        await send_events(look, after, call, send, wait_s=None, ping_s=ping_s)
    finally:
        events.leave(call)


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
            return json_response({"id": id, "object": "response", "deleted": True})
        after = paging.starting_after(request.query_params)
        if paging.flag(request.query_params, "stream") and request.method == "GET":  # HEAD would wait for its end
            return _Following(self._state, request, -1 if after is None else after)
        if after is not None:
            raise invalid("starting_after: needs stream", "starting_after")
        return json_response((await self._do(GET, request)).payload)

    async def cancel(self, request: Request) -> HttpResponse:
        """End a response that runs in the background. One that is over stays as it is."""
        found = await self._do(CANCEL, request)
        if not found.payload["background"]:
            raise invalid("Only a response that was created with background can be cancelled", "id")
        return json_response(found.payload)

    async def input_items(self, request: Request) -> HttpResponse:
        """What the model was given, earlier responses of the conversation included: the newest first, in pages."""
        paging.check(request.query_params)
        return json_response(paging.page_of((await self._do(GET, request)).items, request.query_params))

    async def _do(self, what: str, request: Request) -> Found:
        return await self._state.responses.do(what, request.path_params["id"], request.scope["state"].get("tenant"))


class _Following(HttpResponse):
    """The events of a response that has been created before, from a number on and as they come."""

    def __init__(self, state: ApiState, request: Request, after: int) -> None:
        super().__init__()
        self._state = state
        self._id = request.path_params["id"]
        self._tenant: str | None = request.scope["state"].get("tenant")
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them. ApiError 404 or 400 if there are none."""
        shelf, ping_s = self._state.responses, self._state.config.sse_ping_s
        call = Call(self._state.clock, scope["state"]["request_id"])
        own = shelf.own(self._id, self._tenant)
        with DisconnectWatch(receive, call):
            if own is not None and own.log is not None:
                await _followed_log(own.log, self._after, call, send, ping_s)
                return

            async def look(number: int) -> News:
                return await shelf.news(self._id, self._tenant, number)

            await send_events(look, self._after, call, send, wait_s=LOOK_AGAIN_S, ping_s=ping_s)
