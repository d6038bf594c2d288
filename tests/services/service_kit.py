"""A running API service against a scripted scheduler, over real HTTP and the real link."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import uvloop

from protocol.messages import Limits, Submit
from protocol.process import StopSignal
from services.config import ApiConfig
from services.keys import Keyring
from services.listen import listen
from services.main import load_template
from services.server import ApiServer
from services.text.tokenizer import Tokenizer
from tests.harness import NO_AUTHORITIES
from tests.services.fake_scheduler import FakeScheduler

MODEL = "smollm2-135m-instruct"
ANSWER = "The capital of France is Paris."


class Service:
    """One API server in a thread, on an ephemeral loopback port, and the scheduler that it talks to."""

    def __init__(self, config: ApiConfig, tokenizer: Tokenizer, keys: list[str], *, scheduler: bool = True) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.keys = keys
        self.limits = Limits(
            model=MODEL,
            block_size=16,
            num_blocks=65,
            max_model_len=2048,
            vocab_size=tokenizer.vocab_size,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        self.answer: list[int] = tokenizer.encode(ANSWER, add_special_tokens=False)
        self.scheduler = self.new_scheduler() if scheduler else None
        self.exit_code: int | None = None
        self._stop = StopSignal()
        self._listening = threading.Event()
        listener = listen(config)
        scheme = "https" if config.ssl_certfile else "http"
        self.address = f"{scheme}://uds" if config.uds else f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        template = load_template(config, tokenizer)
        self.server = ApiServer(config, tokenizer, template, Keyring(keys, config.admin_key, config.api_key_file))
        self.state = self.server.state

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.exit_code = runner.run(self.server.run(listener, self._stop, on_listening=self._listening.set))

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert self._listening.wait(60)
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        verify = ssl.create_default_context(cafile=config.ssl_certfile) if config.ssl_certfile else NO_AUTHORITIES
        transport = httpx.HTTPTransport(uds=config.uds or None, verify=verify)
        self.http = httpx.Client(base_url=self.address, timeout=60, headers=headers, transport=transport)
        if self.scheduler is not None:
            self.scheduler.wait_for(lambda: bool(self.scheduler.channel.peers), "the API's hello")

    def new_scheduler(self, epoch: int = 1) -> FakeScheduler:
        """A scheduler at the API's address that answers `self.answer`."""
        return FakeScheduler(self.config.scheduler_link, self.limits, self.script, epoch)

    def script(self, submit: Submit) -> list[int]:
        """The tokens for a request."""
        return self.answer

    def say(self, text: str) -> None:
        """Let the model answer this."""
        self.answer = self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def client(self) -> openai.OpenAI:
        """The official client, without retries."""
        key = self.keys[0] if self.keys else "none"
        http_client = openai.DefaultHttpxClient(verify=NO_AUTHORITIES)
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=60, http_client=http_client
        )

    def request_stop(self) -> None:
        """What SIGTERM does."""
        self._stop.request()

    def join(self) -> int | None:
        """Wait for the end; the exit code."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.exit_code

    def reset(self) -> None:
        """The scheduler forgets what a test told it."""
        assert self.scheduler is not None
        self.scheduler.forget()
        self.say(ANSWER)

    def close(self) -> None:
        """End everything. Idempotent."""
        self.http.close()
        self.request_stop()
        self.join()
        if self.scheduler is not None:
            self.scheduler.stop()


MakeService = Callable[..., Service]


def stream_lines(service: Service, path: str, body: dict[str, Any]) -> list[str]:
    """The `data:` payloads of a streamed answer, in order, `[DONE]` included."""
    with service.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        text = "".join(response.iter_text())
    return payloads(text)


def payloads(text: str) -> list[str]:
    """The `data:` payloads in a body of server-sent events. Fails for a line that is neither data nor a comment."""
    found = []
    for event in text.split("\n\n"):
        if event.startswith("data: "):
            found.append(event.removeprefix("data: "))
        else:
            assert event == "" or event.startswith(":"), event
    return found


def strict(text: str | bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def raw_request(
    service: Service, method: str, path: str, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """One request over a plain socket, with headers that HTTP libraries refuse to send: status, headers, body."""
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", b"Connection: close"]
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)] if body else []
    lines += [name + b": " + value for name, value in headers]
    with connect(service) as client:
        client.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        answer = b""
        while more := client.recv(65536):
            answer += more
    head, _, rest = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, v in (f.split(": ", 1) for f in fields)}, rest


def connect(service: Service) -> socket.socket:
    """A plain connection to the server."""
    if service.config.uds:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(60)
        client.connect(service.config.uds)
        return client
    host, port = service.address.partition("://")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=60)
