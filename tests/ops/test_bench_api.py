"""`triptych bench api`: counting streams without parsing them, and a small run against a real API process."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path

import pytest

from ops.bench import api
from ops.bench.api_streams import Stream, StreamFailed, space_words

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-words: one two [three\r\n\r\n"


def event(text: str) -> bytes:
    body = json.dumps({"choices": [{"delta": {"content": text}}]}, separators=(",", ":")).encode()
    return b"%x\r\ndata: %b\n\n\r\n" % (len(body) + 8, body)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_and_events_are_counted_however_the_bytes_are_split(seed: int) -> None:
    rng = random.Random(seed)
    whole = HEAD + event("") + event(" one") + event(" two three") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    stream = Stream(socket.socket())
    at = 0
    while at < len(whole):
        assert not stream.ended
        size = rng.randint(1, 9)
        stream.take(whole[at : at + size])
        at += size
    assert (stream.tokens, stream.events, stream.ended) == (3, 4, True)
    stream.socket.close()


def test_an_answer_that_is_no_stream_is_an_error_with_what_it_says() -> None:
    stream = Stream(socket.socket())
    with pytest.raises(StreamFailed, match="queue is full"):
        stream.take(b'HTTP/1.1 503 Service Unavailable\r\ncontent-length: 20\r\n\r\n{"error":"queue is full"}')
    stream.socket.close()


def test_words_are_a_space_and_letters() -> None:
    pieces = [b" the", b"the", b" ", b" a b", b" x1", b" \xc3\xa9", b" End"]
    assert space_words(pieces.__getitem__, len(pieces)) == [0, 6]


def test_a_run_reports_one_write_for_each_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "api.json"
    options = ["--streams", "4", "--rounds", "1", "--seconds", "0.05", "--latency-seconds", "0.2"]
    assert api.main([*options, "--latency-streams", "2", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    cases = {row["case"]: row for row in report["cases"]}
    assert cases["one by one"]["tokens_per_event"] == 1
    assert cases["4 at once"]["tokens_per_event"] == 4
    assert cases["flood"]["tokens_per_event"] >= 1
    assert all(0.9 < row["writes_per_event"] < 2 for row in cases.values())
    assert all(row["tokens_per_cpu_s"] > 0 for row in cases.values())
    assert [row["beside"] for row in report["latencies"]] == ["", "text", "token ids", "chat"]
    assert all(row["prompts"] > 0 for row in report["latencies"][1:])
    assert "tokens/CPU-s" in capsys.readouterr().out


def test_the_comparison_needs_a_model_for_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        api.main(["--vllm-python", "python"])
    assert stopped.value.code == 2
    assert "--model-dir" in capsys.readouterr().err
