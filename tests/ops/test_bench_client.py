"""The load generator over real sockets: framing, keep-alive, every way an exchange can fail, and the whole command."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ops.bench import cli, serve
from ops.bench.datasets import RandomDataset, TraceDataset, Vocabulary
from ops.bench.http_client import BadResponse, ConnectFailed, ConnectionDropped, HttpClient
from ops.bench.load import RequestShape, run_load

Handler = Callable[["Exchange"], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Exchange:
    """One request as the fake server got it, and raw bytes as its answer."""

    def __init__(self, head: str, body: bytes, connection: int, writer: asyncio.StreamWriter) -> None:
        self.head, self.body, self.connection, self._writer = head, body, connection, writer
        self.path = head.split(" ", 2)[1]

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """A keep-alive HTTP server whose answers are the handler's raw bytes. Yields its base URL."""
    connections = 0

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        mine = connections
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                await handler(Exchange(head, body, mine, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve_connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def run(handler: Handler, use: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        async with server(handler) as url, asyncio.timeout(30):
            await use(url)

    asyncio.run(main())


def sse(*events: dict[str, object] | str) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in events)


def usage(body: dict[str, object]) -> dict[str, object]:
    """A usage chunk that agrees with what a request asked for."""
    prompt = body.get("prompt") or body["messages"][0]["content"].split()
    return {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}}


async def openai_like(exchange: Exchange) -> None:
    """A well-behaved server: a model list, and streams of one chunk per token."""
    if exchange.path == "/v1/models":
        body = b'{"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}'
        await exchange.send(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return
    body = json.loads(exchange.body)
    await exchange.send(CHUNKED)
    chat = exchange.path == "/v1/chat/completions"
    if chat:
        await exchange.chunk(sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    for index in range(body["max_tokens"]):
        finish = "length" if index == body["max_tokens"] - 1 else None
        choice = {"delta": {"content": " x"}} if chat else {"text": " x"}
        await exchange.chunk(sse({"choices": [choice | {"finish_reason": finish}]}))
    await exchange.chunk(sse(usage(body), "[DONE]"))
    await exchange.send(b"0\r\n\r\n")


def test_chunked_bodies_reach_the_sink_whole_whatever_the_segments() -> None:
    payload = b"data: one\n\ndata: two\n\n"

    async def bytewise(exchange: Exchange) -> None:
        for byte in CHUNKED + b"%x;ext=1\r\n%s\r\n0\r\nTrailer: t\r\n\r\n" % (len(payload), payload):
            await exchange.send(bytes([byte]))

    async def use(url: str) -> None:
        got: list[bytes] = []
        client = HttpClient(url)
        for _ in range(2):  # the second one proves that the first left the connection clean
            response = await client.request("POST", "/x", b"{}", sink=lambda body, now: got.append(body))
            assert (response.status, response.body) == (200, b"")
        assert b"".join(got) == payload * 2
        client.close()

    run(bytewise, use)


def test_connections_are_reused_one_after_another_and_doubled_for_parallel_requests() -> None:
    both = asyncio.Barrier(2)
    seen: list[int] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange.connection)
        if exchange.path == "/parallel":
            await both.wait()
        await exchange.send(OK + b"Content-Length: 2\r\n\r\nok")

    async def use(url: str) -> None:
        client = HttpClient(url)
        for _ in range(3):
            assert (await client.request("GET", "/one")).body == b"ok"
        assert seen == [1, 1, 1]
        await asyncio.gather(client.request("GET", "/parallel"), client.request("GET", "/parallel"))
        assert sorted(seen[3:]) == [1, 2]
        client.close()

    run(handler, use)


def test_a_connection_closed_while_idle_is_replaced_without_an_error() -> None:
    seen: list[int] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange.connection)
        if exchange.path == "/dies" and exchange.connection == 1:
            exchange.close()  # gone without an answer, as a server's keep-alive timeout does
            return
        await exchange.send(OK + b"Content-Length: 2\r\n\r\nok")

    async def use(url: str) -> None:
        client = HttpClient(url)
        await client.request("GET", "/")
        assert (await client.request("GET", "/dies")).body == b"ok"
        assert seen == [1, 1, 2]
        client.close()

    run(handler, use)


@pytest.mark.parametrize(
    ("answer", "error", "kind"),
    [
        (b"", ConnectionDropped, "dropped"),
        (OK + b"Content-Length: 10\r\n\r\nabc", ConnectionDropped, "dropped"),
        (CHUNKED + b"5\r\nab", ConnectionDropped, "dropped"),
        (OK + b"Content-Le", ConnectionDropped, "dropped"),
        (b"SSH-2.0-OpenSSH\r\n", BadResponse, "protocol"),
        (CHUNKED + b"zz\r\n", BadResponse, "protocol"),
    ],
)
def test_broken_answers_raise_with_the_kind_that_a_report_counts_by(
    answer: bytes, error: type[Exception], kind: str
) -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.send(answer)
        exchange.close()

    async def use(url: str) -> None:
        with pytest.raises(error) as caught:
            await HttpClient(url).request("GET", "/")
        assert caught.value.kind == kind

    run(handler, use)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.send(OK + b"Connection: close\r\n\r\nall of it")
        exchange.close()

    async def use(url: str) -> None:
        assert (await HttpClient(url).request("GET", "/")).body == b"all of it"

    run(handler, use)


def test_a_refused_connection_and_a_wrong_address_say_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connecting is refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1"):
            asyncio.run(HttpClient(url).request("GET", "/"))
    for wrong in ("ftp://x", "127.0.0.1:8000", ""):
        with pytest.raises(ValueError, match="http"):
            HttpClient(wrong)


SHAPE = RequestShape("/v1/completions", "tiny", ignore_eos=True, extra={"top_k": 3})
WORDS = Vocabulary(10, 1000, text=False)


def dataset(count: int, outputs: int = 3) -> RandomDataset:
    return RandomDataset(count, 5, outputs, 0.0, 0, WORDS, seed=1)


def test_every_way_to_fail_is_counted_by_kind_and_disturbs_no_other_request() -> None:
    served = 0

    async def handler(exchange: Exchange) -> None:
        nonlocal served
        served += 1
        which = served
        if which == 1:
            error = b'{"error": {"message": "queue full", "type": "overloaded", "code": null}}'
            await exchange.send(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(error) + error)
        elif which == 2:
            await exchange.send(CHUNKED)
            await exchange.chunk(sse({"choices": [{"text": "a"}]}))
            exchange.close()
        elif which == 3:
            await exchange.send(CHUNKED)
            await exchange.chunk(sse({"error": {"message": "lost", "code": "engine_dead"}}, "[DONE]"))
            await exchange.send(b"0\r\n\r\n")
        else:
            await openai_like(exchange)

    async def use(url: str) -> None:
        client = HttpClient(url)
        result = await run_load(client, SHAPE, dataset(5), [0.0] * 5, max_in_flight=1)
        assert [record.error for record in result.records] == [
            "http_503",
            "dropped",
            "in_band:engine_dead",
            None,
            None,
        ]
        assert result.records[0].error_message == "overloaded: queue full"
        assert [record.output_tokens for record in result.records[3:]] == [3, 3]
        client.close()

    run(handler, use)


def test_a_stream_that_stops_coming_is_a_timeout_and_its_connection_is_not_used_again() -> None:
    never = asyncio.Event()
    seen: list[int] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange.connection)
        await exchange.send(CHUNKED)
        await exchange.chunk(sse({"choices": [{"text": "a"}]}))
        await never.wait()

    async def use(url: str) -> None:
        client = HttpClient(url)
        result = await run_load(client, SHAPE, dataset(2), [0.0] * 2, max_in_flight=1, timeout_s=0.1)
        assert [record.error for record in result.records] == ["timeout", "timeout"]
        assert seen == [1, 2]
        client.close()
        never.set()

    run(handler, use)


def test_concurrency_is_a_bound_that_is_reached_and_never_passed() -> None:
    in_flight = peak = 0
    full = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        if in_flight == 4:
            full.set()
        await full.wait()
        in_flight -= 1
        await openai_like(exchange)

    async def use(url: str) -> None:
        client = HttpClient(url)
        result = await run_load(client, SHAPE, dataset(12), [0.0] * 12, max_in_flight=4)
        assert all(record.error is None for record in result.records)
        assert (peak, result.peak_in_flight) == (4, 4)
        client.close()

    run(handler, use)


def test_bodies_ask_for_usage_and_carry_the_shape_of_the_run() -> None:
    body = json.loads(SHAPE.body(dataset(1).request(0)))
    assert len(body.pop("prompt")) == 5
    assert body == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": 3,
    }
    chat = RandomDataset(1, 5, 3, 0.0, 0, Vocabulary(0, 1, text=True), seed=1).request(0)
    messages = json.loads(RequestShape("/v1/chat/completions", "m").body(chat))["messages"]
    assert [message["role"] for message in messages] == ["user"]
    assert len(messages[0]["content"].split()) == 5


def command(handler: Handler, *arguments: str) -> tuple[int, list[Exchange]]:
    """Runs `triptych bench serve` in a thread against the handler; returns its exit code and the requests seen."""
    seen: list[Exchange] = []
    code = -1

    async def recording(exchange: Exchange) -> None:
        seen.append(exchange)
        await handler(exchange)

    async def use(url: str) -> None:
        nonlocal code
        code = await asyncio.to_thread(cli.main, ["serve", "--base-url", url, *arguments])

    run(recording, use)
    return code, seen


def test_the_command_measures_chat_streams_and_writes_its_report_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    arguments = (
        "--endpoint /v1/chat/completions --num-requests 5 --input-len 7 --output-len 4 --warmup 2 --concurrency 2"
    )
    code, seen = command(
        openai_like, *arguments.split(), "--goodput", "ttft:60000", "tpot:60000", "--json", str(out), "--details"
    )
    assert code == 0
    report = json.loads(out.read_text())
    assert (report["completed"], report["input_tokens"], report["output_tokens"]) == (5, 35, 20)
    assert report["config"]["model"] == "tiny"
    assert report["goodput"]["requests"] == 5
    assert [len(row["chunk_times"]) for row in report["requests"]] == [4] * 5
    posts = [json.loads(exchange.body) for exchange in seen if exchange.path == "/v1/chat/completions"]
    prompts = [body["messages"][0]["content"] for body in posts]
    assert len(prompts) == len(set(prompts)) == 7  # two to warm up, none of them measured again
    assert "TTFT" in capsys.readouterr().out


def test_a_trace_is_replayed_with_its_lengths_at_a_given_rate(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parent.parent / "data" / "traces" / "azure_2023_conv_300.csv.gz"
    code, seen = command(
        openai_like,
        *f"--dataset trace --trace {trace} --num-requests 6 --max-output-len 5 --request-rate inf --json".split(),
    )
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["request_rate"] == "inf"
    assert report["output_tokens"] == 30
    lengths = [len(json.loads(e.body)["prompt"]) for e in seen if e.path == "/v1/completions"]
    assert lengths[:2] == [374, 396]


def test_a_trace_keeps_its_own_arrivals_unless_a_rate_is_given() -> None:
    trace = Path(__file__).parent.parent / "data" / "traces" / "azure_2023_conv_300.csv.gz"
    arguments = ["--dataset", "trace", "--trace", str(trace), "--time-scale", "0.1", "--num-requests", "3"]
    options = serve.build_parser().parse_args(arguments)
    rows = serve.build_dataset(options)
    assert isinstance(rows, TraceDataset)
    assert serve.plan_arrivals(options, rows) == [row.at_s for row in rows.rows]
    options.request_rate = math.inf
    assert serve.plan_arrivals(options, rows) == [0.0, 0.0, 0.0]


def test_the_key_comes_from_the_environment_and_appears_in_no_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCH_KEY", "sk-secret")
    code, seen = command(
        openai_like, "--api-key-env", "BENCH_KEY", "--num-requests", "1", "--output-len", "2", "--json"
    )
    assert code == 0
    assert all("Authorization: Bearer sk-secret" in exchange.head for exchange in seen)
    captured = capsys.readouterr()
    assert "sk-secret" not in captured.out + captured.err


def test_a_wrong_key_ends_the_command_at_once_with_the_servers_words(capsys: pytest.CaptureFixture[str]) -> None:
    async def locked(exchange: Exchange) -> None:
        body = b'{"error": {"message": "bad key", "code": "invalid_api_key"}}'
        await exchange.send(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    code, seen = command(locked, "--num-requests", "1")
    assert code == 1
    assert len(seen) == 1
    assert "invalid_api_key: bad key" in capsys.readouterr().err


def test_a_run_without_a_single_answer_exits_with_1_and_still_reports(capsys: pytest.CaptureFixture[str]) -> None:
    async def only_models(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await openai_like(exchange)
        else:
            await exchange.send(b"HTTP/1.1 429 Slow\r\nContent-Length: 0\r\n\r\n")

    code, _ = command(only_models, "--num-requests", "3", "--json")
    assert code == 1
    assert json.loads(capsys.readouterr().out)["errors"] == {"http_429": 3}
    code, _ = command(only_models, "--num-requests", "3", "--warmup", "2")
    assert code == 1
    assert "all 2 warm-up requests failed: http_429" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--goodput", "speed:3"], "ttft, tpot, e2el"),
        (["serve", "--range-ratio", "1"], "[0, 1)"),
        (["serve", "--request-rate", "0"], "above 0"),
        (["serve", "--percentiles", "101"], "outside [0, 100]"),
        (["serve", "--dataset", "trace"], "--trace FILE"),
        (["serve", "--dataset", "trace", "--trace", "/nonexistent"], "/nonexistent"),
        (["serve", "--endpoint", "/v1/chat/completions", "--prompt-kind", "ids"], "chat"),
        (["serve", "--token-low", "50", "--token-high", "50"], "--token-low 50"),
        (["sevre"], "sevre"),
        ([], "needed"),
    ],
)
def test_wrong_options_exit_with_2_and_name_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert message in capsys.readouterr().err
