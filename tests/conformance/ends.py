"""The two ends that the kit plays: a runner that judges what it is sent, an API that checks what it is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from protocol import wire
from protocol.channels import ChannelError, ClientChannel, ServerChannel, new_instance
from protocol.columns import f32, i32, pack_i32, pack_u64, u64
from protocol.messages import (
    Abort,
    Control,
    ControlReply,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Outputs,
    Refused,
    Rejected,
    RequestStatus,
    SamplingParams,
    SchedulerStatus,
    SchedulerToApi,
    SchedulerToRunner,
    Step,
    StepFailure,
    StepResult,
    Submit,
    TokenLogprobs,
    Welcome,
)
from tests.conformance.judge import Asked, Judge, Violation

HEARTBEAT_S = 0.3
MOST_IN_FLIGHT = 4
EOS = 2


def token_at(request_id: int, position: int) -> int:
    """What a request samples at a position: never an end token, different for neighbours."""
    return 1000 + (request_id * 7919 + position * 104729) % 40000


def limits(usable_blocks: int = 64, **changes: Any) -> Limits:
    """Small limits: pages of 4 tokens, 8 slots, 32 tokens a step, a context of 512."""
    values: dict[str, Any] = {
        "model": "conformance",
        "block_size": 4,
        "num_blocks": usable_blocks + 1,
        "max_model_len": 512,
        "vocab_size": 50_000,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "eos_token_ids": (EOS,),
    }
    return Limits(**(values | changes))


class World:
    """What both ends know: the requests that were made, and the tokens that they sample."""

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        self.scripted: dict[tuple[int, int], int] = {}

    def token(self, request_id: int, position: int) -> int:
        """The token that a request has at a position past its prompt."""
        return self.scripted.get((request_id, position), token_at(request_id, position))

    def stream(self, request_id: int) -> list[int]:
        """Everything that a request emits when nothing stops it early."""
        asked = self.asked[request_id]
        start = len(asked.prompt)
        return [self.token(request_id, start + n) for n in range(asked.params.max_tokens)]


class RunnerEnd:
    """Binds like a runner and executes every step through the Judge at once; what becomes of the result is a test's.

    `holding` keeps results back until `release`; `mute` makes it a runner that hangs; `occupied` and `refusal` turn
    schedulers away; `failures` fail that many of the next steps; `row_errors` fail single rows when they sample.
    """

    def __init__(self, context: zmq.Context[Any], address: str, world: World) -> None:
        self.world = world
        self.limits = limits()
        self.judge = Judge(self.limits, world.asked, world.token)
        self.epoch = 0
        self.holding = False
        self.mute = False
        self.welcoming = True
        self.occupied = 0
        self.refusal: Refused | None = None
        self.failures = 0
        self.row_errors: dict[int, tuple[str, str]] = {}
        self.after_step: Callable[[Step], None] = lambda step: None
        self.held: deque[StepResult] = deque()
        self.sent: list[StepResult] = []
        self.hellos: list[Hello] = []
        self.goodbyes: list[Goodbye] = []
        self.holder: bytes | None = None
        self._context = context
        self._address = address
        self._waiting: tuple[bytes, Hello] | None = None
        self._last_beat = 0.0
        self.channel: ServerChannel[Any] = ServerChannel(context, address, SchedulerToRunner)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self.channel.socket

    def install(self, new_limits: Limits, hash_key: bytes | None = None) -> None:
        """Be another runner: empty pages, a hash key of its own. Say goodbye first."""
        self.limits = new_limits
        self.judge = Judge(new_limits, self.world.asked, self.world.token, hash_key or new_instance().encode())
        self.held.clear()
        self.sent.clear()
        self.failures, self.row_errors, self.holding, self.mute = 0, {}, False, False
        self.occupied, self.refusal, self.welcoming = 0, None, True
        self.after_step = lambda step: None

    def leave(self, code: str = "shutdown", message: str = "") -> None:
        """End the scheduler's session with a goodbye. The next Hello is welcomed under a new epoch."""
        if self.holder is not None:
            self.channel.drop(self.holder, Goodbye(code, message))
        self.holder = None
        self.held.clear()

    def lose(self) -> None:
        """End the scheduler's session without a word, as a runner that was killed and started again."""
        if self.holder is not None:
            self.channel.drop(self.holder)
        self.holder = None
        self.held.clear()

    def rebind(self) -> None:
        """Close the socket and bind it again: connections break."""
        self.channel.close()
        self.holder = None
        self.held.clear()
        self.channel = ServerChannel(self._context, self._address, SchedulerToRunner)

    def pump(self) -> None:
        """Take what has arrived and do what is due."""
        for identity, message in self.channel.receive():
            self._take(identity, message)
        if self._waiting is not None and self.welcoming:
            self._answer(*self._waiting)
            self._waiting = None
        now = time.monotonic()
        if self.holder is not None and not self.mute and now - self._last_beat > HEARTBEAT_S:
            self._last_beat = now
            self.send(Heartbeat(time.time_ns()))

    def _take(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Hello):
            self.hellos.append(message)
            self._waiting = (identity, message)
        elif isinstance(message, Step):
            self._take_step(message)
        elif isinstance(message, Goodbye):
            self.goodbyes.append(message)
            self.channel.drop(identity)
            self.holder = None
        elif not isinstance(message, Heartbeat):
            raise Violation(f"nobody asked for {message}")

    def _answer(self, identity: bytes, hello: Hello) -> None:
        if hello.role != "scheduler":
            raise Violation(f"the hello to a runner has role {hello.role!r}")
        if self.refusal is not None:
            self.channel.refuse(identity, self.refusal)
            return
        if self.occupied and not hello.takeover:
            self.occupied -= 1
            self.channel.refuse(identity, Refused(wire.OCCUPIED, "scheduler 00aa holds this runner"))
            return
        if hello.epoch > self.epoch:
            raise Violation(f"the hello claims epoch {hello.epoch}, {self.epoch} is the last one granted")
        self.epoch = max(self.epoch, hello.epoch) + 1
        self.held.clear()
        blocks, hashes = self.judge.welcome(self.epoch)
        welcome = Welcome(
            "runner", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, "r" * 16, self.epoch, self.limits,
            self.judge.hash_key, blocks, hashes,
        )  # fmt: skip
        try:
            self.channel.welcome(identity, welcome)
        except ChannelError:
            return  # it has left meanwhile and will be back
        self.holder = identity

    def _take_step(self, step: Step) -> None:
        failure = StepFailure("device_error", "made to fail") if self.failures else None
        self.failures -= 1 if self.failures else 0
        self.held.append(self.judge.execute(step, failure, self.row_errors))
        if len(self.held) > MOST_IN_FLIGHT:
            raise Violation(f"{len(self.held)} steps without a result")
        self.after_step(step)
        if not self.holding and not self.mute:
            self.release()

    def release(self, count: int = MOST_IN_FLIGHT) -> None:
        """Send the oldest results that were kept back."""
        for _ in range(min(count, len(self.held))):
            result = self.held.popleft()
            self.sent.append(result)
            self.send(result)

    def send(self, message: msgspec.Struct) -> None:
        """To the scheduler, if it is there."""
        if self.holder is not None:
            try:
                self.channel.send(self.holder, message)
            except ChannelError:
                self.holder = None


class ApiEnd:
    """Connects like an API and checks every event against what it asked for."""

    def __init__(self, context: zmq.Context[Any], address: str, world: World) -> None:
        self.world = world
        self.mine: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.accepted: set[int] = set()
        self.rejected: dict[int, list[Rejected]] = {}
        self.finished: dict[int, Finished] = {}
        self.logprobs: list[TokenLogprobs] = []
        self.told: dict[int, list[float]] = {}
        """Of prompts, from the second token on: what misses no position, and has each once."""
        self.replies: list[ControlReply] = []
        self.statuses: list[SchedulerStatus] = []
        self.welcomes: list[Welcome] = []
        self.goodbyes: list[Goodbye] = []
        hello = Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, new_instance())
        self.channel: ClientChannel[Any] = ClientChannel(context, address, SchedulerToApi, lambda: hello)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self.channel.socket

    @property
    def status(self) -> SchedulerStatus | None:
        """The newest status."""
        return self.statuses[-1] if self.statuses else None

    def submit(
        self,
        request_id: int,
        prompt: int | list[int],
        max_tokens: int = 4,
        *,
        cache_salt: str = "",
        emitted: int = 0,
        resumed: bool = False,
        priority: int = 0,
        timeout_ms: int = 0,
        **params: Any,
    ) -> None:
        """Ask for a completion of `prompt` (ids, or how many). `emitted` outputs are here already."""
        tokens = prompt if isinstance(prompt, list) else [token_at(request_id, j) for j in range(prompt)]
        params.setdefault("ignore_eos", True)
        sampling = SamplingParams(max_tokens, seed=request_id, **params)
        self.world.asked[request_id] = Asked(tokens, sampling, cache_salt, emitted)
        self.mine.add(request_id)
        known = [self.world.token(request_id, len(tokens) + n) for n in range(emitted)]
        self.tokens[request_id] = list(known)
        self.finished.pop(request_id, None)
        self.accepted.discard(request_id)
        self.send(
            Submit(
                request_id, pack_i32(tokens), sampling, pack_i32(known), time.time_ns(), priority,
                cache_salt=cache_salt, resumed=resumed, timeout_ms=timeout_ms,
            )
        )  # fmt: skip

    def send(self, message: msgspec.Struct) -> None:
        """Anything, as it is."""
        self.channel.send(message)

    def abort(self, *ids: int) -> None:
        """Give these up."""
        self.send(Abort(pack_u64(list(ids))))

    def ask(self, nonce: int, action: str, **arguments: str) -> None:
        """Send a Control."""
        self.send(Control(nonce, action, arguments))

    def has(self, *ids: int) -> bool:
        """Whether these have finished."""
        return all(request_id in self.finished for request_id in ids)

    def assert_complete(self, *ids: int) -> None:
        """These got every token they asked for, each the right one (checked on arrival), and ended by length."""
        for request_id in ids:
            assert self.tokens[request_id] == self.world.stream(request_id), f"request {request_id}"
            end = self.finished[request_id]
            assert end.status == RequestStatus.LENGTH, end
            assert end.num_output_tokens == len(self.tokens[request_id]), end

    def pump(self) -> None:
        """Take what has arrived and do what is due."""
        self.channel.tick()
        for message in self.channel.receive():
            if isinstance(message, Outputs):
                self._take(message)
            elif isinstance(message, SchedulerStatus):
                self.statuses.append(message)
            elif isinstance(message, Welcome):
                self.welcomes.append(message)
            elif isinstance(message, Goodbye):
                self.goodbyes.append(message)
            elif isinstance(message, ControlReply):
                self.replies.append(message)

    def _take(self, outputs: Outputs) -> None:
        for request_id in u64(outputs.accepted).tolist():
            self._require(request_id in self.mine, f"accepted {request_id}, which is not ours")
            self._require(request_id not in self.accepted, f"accepted {request_id} twice")
            self.accepted.add(request_id)
        for rejected in outputs.rejected:
            self.rejected.setdefault(rejected.id, []).append(rejected)
        for part in outputs.prompt_logprobs:
            self._require(part.id in self.accepted, f"the prompt of request {part.id}, which was not accepted")
            told = self.told.setdefault(part.id, [])
            self._require(part.position <= len(told) + 1, f"a gap in the prompt of {part.id}: {len(told)}, {part}")
            told += f32(part.logprobs)[len(told) + 1 - part.position :].tolist()
        columns = (u64(outputs.ids), i32(outputs.positions), i32(outputs.tokens))
        for request_id, position, token in zip(*(column.tolist() for column in columns), strict=True):
            self._take_token(request_id, position, token)
        self.logprobs += outputs.logprobs
        for end in outputs.finished:
            self._require(end.id in self.accepted, f"request {end.id} ends and was not accepted")
            self._require(end.id not in self.finished, f"request {end.id} ends twice")
            self._require(end.status.is_finished, f"request {end.id} ends as {end.status.name}")
            self.finished[end.id] = end

    def _take_token(self, request_id: int, position: int, token: int) -> None:
        who = f"request {request_id}"
        self._require(request_id in self.accepted, f"a token for {who}, which was not accepted")
        self._require(request_id not in self.finished, f"a token for {who} after its end")
        asked, told = self.world.asked[request_id], self.told.get(request_id, [])
        complete = asked.params.prompt_logprobs < 0 or len(told) == len(asked.prompt) - 1
        self._require(complete, f"a token of {who}, which has been told {len(told)} of its prompt")
        stream = self.tokens[request_id]
        self._require(position == len(stream), f"{who}: token {position} after {len(stream)} tokens")
        want = self.world.token(request_id, len(self.world.asked[request_id].prompt) + position)
        self._require(token == want, f"{who}: token {position} is {token} instead of {want}")
        stream.append(token)

    @staticmethod
    def _require(holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)


class RawPeer:
    """A socket that sends frames as a test makes them: wrong versions, repeats, garbage."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.received: list[Any] = []
        self._codec: wire.Codec[Any] = wire.Codec(SchedulerToApi)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, message: msgspec.Struct, session: int = 1, sequence: int = 0) -> None:
        """One well-formed frame."""
        self.socket.send(self._codec.encode(message, session, sequence))

    def send_bytes(self, frame: bytes) -> None:
        """One frame of any kind."""
        self.socket.send(frame)

    def pump(self) -> None:
        """Take what has arrived."""
        while True:
            try:
                self.received.append(self._codec.decode(self.socket.recv(zmq.NOBLOCK))[2])
            except zmq.Again:
                return

    def of(self, kind: type[Any]) -> list[Any]:
        """The received messages of a kind."""
        return [message for message in self.received if isinstance(message, kind)]


def socket_path(directory: Path, name: str) -> str:
    """An ipc address in a directory."""
    return f"ipc://{directory}/{name}.sock"
