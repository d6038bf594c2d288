"""The clients of a storm: they keep asking, note when tokens came, and judge each answer by its twin.

A client whose API process was killed, or who left on purpose, keeps the beginning that it got: that is judged too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httptools
import msgspec

from tests.chaos.mix import Ask
from tests.chaos.reading import Answer, compare

ANSWER_DEADLINE_S = 60.0
NOTED_GAP_S = 0.03
RETRY_S = 0.05
MOST_FAULTS = 40


class Dropped(Exception):
    """The connection ended before the answer did, or none was made."""


class Progress:
    """The tokens that all clients together have received: the clock that drives a storm."""

    def __init__(self) -> None:
        self.tokens = 0
        self.gaps: list[tuple[float, float]] = []
        """(when it ended, how long it was), for each silence of a stream that was longer than usual."""
        self._news = asyncio.Event()

    def add(self, tokens: int) -> None:
        """Tokens have come."""
        self.tokens += tokens
        self._news.set()

    async def news(self, timeout_s: float) -> bool:
        """Wait for a token. False when none came in time."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def reach(self, tokens: int, silence_s: float) -> bool:
        """Wait until the count is `tokens`. False when no token at all came for `silence_s`."""
        while self.tokens < tokens:
            if not await self.news(silence_s):
                return False
        return True


@dataclass(slots=True)
class Tally:
    """What the clients saw. `faults` are the first few in words."""

    answers: int = 0
    streams: int = 0
    cut: int = 0
    left: int = 0
    failed: int = 0
    tokens: int = 0
    lost: int = 0
    repeated: int = 0
    differing: int = 0
    malformed: int = 0
    faults: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)

    def fault(self, text: str) -> None:
        """Keep it, unless there are too many already to be read."""
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(text)


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way. `leave` is set when its client has gone on purpose."""

    ask: Ask
    streamed: bool
    answer: Answer = field(default_factory=Answer)
    port: int = 0
    status: int = 0
    last_token: float = 0.0
    excused: bool = False
    leave: asyncio.Event = field(default_factory=asyncio.Event)


class _Body:
    """The callbacks of httptools for one response."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.on_body = take
        self.complete = False

    def on_message_complete(self) -> None:
        self.complete = True


class Clients:
    """`count` clients at one port. `twins` maps an ask's name to its answer in calm weather."""

    def __init__(self, port: int, asks: Sequence[Ask], progress: Progress, seed: int) -> None:
        self.live: set[Call] = set()
        self.tally = Tally()
        self.twins: Mapping[str, Answer] = {}
        self._port = port
        self._asks = asks
        self._progress = progress
        self._seed = seed
        self._over = False

    async def learn_twins(self, at_once: int) -> None:
        """Ask everything undisturbed, both ways, which must agree; the whole answers are the twins."""
        gate = asyncio.Semaphore(at_once)

        async def one(ask: Ask, streamed: bool) -> Answer:
            async with gate:
                call = Call(ask, streamed)
                await self._exchange(call)
                call.answer.check_form(streamed=streamed)
                assert not call.answer.error and not call.answer.faults, f"{ask.name}: {call.answer}"
                return call.answer

        answers = await asyncio.gather(*(one(ask, streamed) for streamed in (False, True) for ask in self._asks))
        half = len(self._asks)
        for ask, whole, stream in zip(self._asks, answers[:half], answers[half:], strict=True):
            difference = compare(whole, stream, whole=True)
            assert not difference, f"{ask.name}: undisturbed, the stream differs from the whole answer: {difference}"
        self.twins = {ask.name: answer for ask, answer in zip(self._asks, answers[:half], strict=True)}

    async def run(self, count: int) -> None:
        """Ask and ask again until `stop`; what is under way then is read to its end."""
        await asyncio.gather(*(self._client(random.Random(f"client {self._seed} {n}")) for n in range(count)))

    def stop(self) -> None:
        """Begin nothing new."""
        self._over = True

    def leave(self) -> None:
        """Give up all that is under way."""
        self.stop()
        for call in self.live:
            call.leave.set()

    def excuse(self, ports: set[int]) -> None:
        """The API process behind these local ports is about to die: those calls may break, and unanswered ones."""
        for call in self.live:
            if call.port in ports or not call.status:
                call.excused = True

    async def _client(self, rng: random.Random) -> None:
        while not self._over:
            call = Call(rng.choice(self._asks), streamed=rng.random() < 0.75)
            await self._ask(call)

    async def _ask(self, call: Call) -> None:
        tally, name = self.tally, f"{call.ask.name}{' (stream)' if call.streamed else ''}"
        self.live.add(call)
        tally.asked[call.ask.name.partition(" ")[2]] += 1
        whole = False
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                whole = await self._exchange(call)
        except (Dropped, OSError) as error:
            tally.cut += 1
            if not call.excused:
                tally.failed += 1
                tally.fault(f"{name}: the connection broke: {error!r}")
            await self._progress.news(RETRY_S)  # not at once again: whoever is to accept may be starting
        except TimeoutError:
            tally.failed += 1
            tally.fault(f"{name}: no end after {ANSWER_DEADLINE_S:g} s, {call.answer.chunks} chunks, {call.status}")
        except (msgspec.MsgspecError, httptools.HttpParserError, KeyError, TypeError) as error:
            tally.malformed += 1
            tally.fault(f"{name}: unreadable: {error!r}")
        finally:
            self.live.discard(call)
        self._judge(name, call, whole)

    def _judge(self, name: str, call: Call, whole: bool) -> None:
        tally, answer = self.tally, call.answer
        tally.tokens += sum(len(choice.token_ids) for choice in answer.choices.values())
        if whole:
            tally.answers += 1
            tally.streams += call.streamed
            answer.check_form(streamed=call.streamed)
        elif call.leave.is_set():
            tally.left += 1
        if answer.error:
            tally.failed += 1
            tally.fault(f"{name}: {answer.error}")
            return
        if answer.faults:
            tally.malformed += 1
            tally.fault(f"{name}: {'; '.join(answer.faults)}")
        difference = compare(self.twins[call.ask.name], answer, whole=whole)
        tally.lost += difference.lost
        tally.repeated += difference.repeated
        tally.differing += bool(difference.others)
        if difference:
            tally.fault(f"{name}: {difference}")

    async def _exchange(self, call: Call) -> bool:
        """One request, read to its end: True; False when its client left. Dropped when the server did."""
        options = {"stream": True, "stream_options": {"include_usage": True}} if call.streamed else {}
        body = msgspec.json.encode({**call.ask.body, **options})
        head = f"POST {call.ask.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            call.port = writer.get_extra_info("sockname")[1]
            writer.write(head.encode() + body)
            reading = asyncio.ensure_future(self._read(call, reader))
            leaving = asyncio.ensure_future(call.leave.wait())
            try:
                await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    return False
                await reading
                return True
            finally:
                reading.cancel()
                leaving.cancel()
        finally:
            writer.transport.abort()

    async def _read(self, call: Call, reader: asyncio.StreamReader) -> None:
        buffer = bytearray()
        response = _Body(buffer.extend)
        parser = httptools.HttpResponseParser(response)
        while not response.complete:
            data = await reader.read(65536)
            if not data:
                raise Dropped(f"after {call.answer.chunks} chunks")
            parser.feed_data(data)
            call.status = parser.get_status_code()
            if call.streamed and call.status == 200:
                self._take_events(call, buffer)
        if await reader.read(1):
            raise Dropped("bytes after the end of the answer")
        if not call.streamed or call.status != 200:
            call.answer.read_whole(call.status, bytes(buffer))
            self._progress.add(sum(len(choice.token_ids) for choice in call.answer.choices.values()))

    def _take_events(self, call: Call, buffer: bytearray) -> None:
        *events, rest = bytes(buffer).split(b"\n\n")
        buffer[:] = rest
        fresh = sum(call.answer.read_event(event) for event in events)
        if not fresh:
            return
        now = time.monotonic()
        if call.last_token and now - call.last_token > NOTED_GAP_S:
            self._progress.gaps.append((now, now - call.last_token))
        call.last_token = now
        self._progress.add(fresh)
