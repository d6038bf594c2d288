"""`triptych bench serve` as a whole, against a fake server: reports, traces, keys, exit codes."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from ops.bench import cli, serve
from ops.bench.datasets import TraceDataset
from tests.ops.http_kit import Exchange, Handler, openai_like, run


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
