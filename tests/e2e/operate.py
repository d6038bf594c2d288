"""What the tests of operation use beside HTTP: `triptych ctl` in this process, and an API without HTTP."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import zmq
from harness import Server

from ops.ctl import main as ctl_main
from protocol import wire
from protocol.channels import ClientChannel, new_instance
from protocol.columns import i32, u64
from protocol.messages import Finished, Goodbye, Hello, Outputs, Rejected, SchedulerToApi, Submit

DEADLINE_S = 60.0


def runtime_dir_of(server: Server) -> str:
    """Where the server's sockets are."""
    return psutil.Process(server.pid).environ()["TRIPTYCH_RUNTIME_DIR"]


def ctl(server: Server, *words: str) -> Any:
    """The JSON answer of `triptych ctl … --json`, which must be a success."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = ctl_main([*words, "--json"], {"TRIPTYCH_RUNTIME_DIR": runtime_dir_of(server)})
    assert code == 0, printed.getvalue()
    return json.loads(printed.getvalue())


def said(server: Server, *words: str) -> str:
    """What `triptych ctl …` prints for a person."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert ctl_main(list(words), {"TRIPTYCH_RUNTIME_DIR": runtime_dir_of(server)}) == 0
    return printed.getvalue()


class BareApi:
    """An API without HTTP: submits what it is told and keeps what comes back."""

    def __init__(self, server: Server) -> None:
        instance = new_instance()
        self._context: zmq.Context[Any] = zmq.Context()
        self._channel: ClientChannel[Any] = ClientChannel(
            self._context,
            f"ipc://{runtime_dir_of(server)}/scheduler.sock",
            SchedulerToApi,
            lambda: Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, instance),
        )
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.rejected: dict[int, Rejected] = {}
        self.accepted: set[int] = set()
        self._until(lambda: self._channel.connected, "a welcome")

    def send(self, message: Any) -> None:
        """Send one message."""
        self._channel.send(message)

    def submit(self, submit: Submit) -> None:
        """Submit, and wait until it is accepted."""
        self.send(submit)
        self._until(lambda: submit.id in self.accepted, "acceptance")

    def end_of(self, request_id: int) -> Finished:
        """Wait for a request's end."""
        self._until(lambda: request_id in self.finished, f"the end of {request_id}")
        return self.finished[request_id]

    def pump_until(self, condition: Any, what: str) -> None:
        """Take in messages until the condition holds."""
        self._until(condition, what)

    def _until(self, condition: Any, what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}"
            self._channel.tick()
            self._channel.socket.poll(20)
            for message in self._channel.receive():
                if isinstance(message, Outputs):
                    self._take(message)

    def _take(self, outputs: Outputs) -> None:
        self.accepted.update(u64(outputs.accepted).tolist())
        columns = (u64(outputs.ids).tolist(), i32(outputs.positions).tolist(), i32(outputs.tokens).tolist())
        for request_id, position, token in zip(*columns, strict=True):
            mine = self.tokens.setdefault(request_id, [])
            assert position == len(mine), "no token is lost or repeated"
            mine.append(token)
        self.rejected.update({one.id: one for one in outputs.rejected})
        self.finished.update({one.id: one for one in outputs.finished})

    def close(self) -> None:
        """Leave."""
        self._channel.leave(Goodbye("shutdown"))
        self._channel.close()
        self._context.term()


@contextlib.contextmanager
def bare_api(server: Server) -> Iterator[BareApi]:
    """A BareApi that has been welcomed."""
    api = BareApi(server)
    try:
        yield api
    finally:
        api.close()
