"""How a streamed answer becomes times, counts and a report: every definition on hand-made chunks at given times."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.load import LoadResult
from ops.bench.openai_stream import RequestRecord, StreamReader
from ops.bench.report import build_report, details, meets, render, summarize
from ops.bench.sse import SseParser


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": content, "finish_reason": finish}])


def delta(finish: str | None = None, **fields: object) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    return event(
        choices=[],
        usage={"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details},
    )


DONE = b"data: [DONE]\n\n"


def read(*arrivals: tuple[float, bytes], sent_at: float = 0.0) -> RequestRecord:
    record = RequestRecord(0, planned_at=sent_at, sent_at=sent_at, finished_at=sent_at)
    reader = StreamReader(record)
    for at, body in arrivals:
        reader(body, at)
    reader.close()
    return record


def test_events_come_out_whole_whatever_the_line_ends_comments_and_cuts() -> None:
    parser = SseParser()
    assert parser.feed(b": ping\r\n\r\ndata: a\r\n\r\nda") == [b"a"]
    assert parser.feed(b"ta:b\ndata: c\n") == []
    assert parser.feed(b"id: 4\n\n\n") == [b"b\nc"]


@given(st.lists(st.integers(0, 60), max_size=8))
def test_any_cutting_of_the_bytes_gives_the_same_events(cuts: list[int]) -> None:
    stream = b'data: {"x": 1}\r\n\r\n:c\n\ndata: second\n\nevent: e\ndata: third\n\n'
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    parser = SseParser()
    got = [e for low, high in pairwise(edges) for e in parser.feed(stream[low:high])]
    assert got == [b'{"x": 1}', b"second", b"third"]


def test_a_role_only_chunk_and_an_empty_chunk_are_not_the_first_token() -> None:
    record = read(
        (1.0, delta(role="assistant", content="")),
        (1.5, delta(content=None)),
        (2.0, delta(content="Pa")),
        (2.5, delta(content="ris")),
        (3.0, delta(finish="stop")),
        (3.1, usage(5, 3) + DONE),
    )
    assert record.error is None
    assert (record.ttft, record.e2e) == (2.0, 3.0)
    assert record.chunk_times == [2.0, 2.5]


def test_reasoning_and_tool_calls_are_output() -> None:
    for fields in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}):
        record = read((4.0, delta(**fields)), (5.0, delta(finish="stop") + usage(1, 1) + DONE))
        assert record.ttft == 4.0


def test_tokens_are_counted_by_usage_when_a_chunk_holds_several() -> None:
    record = read((1.0, text("a b c")), (2.0, text(" d e f g", "length") + usage(8, 7, cached=4) + DONE))
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (8, 7, 4)
    assert record.tpot == pytest.approx((2.0 - 1.0) / 6)
    assert record.itl == [1.0]


def test_a_running_usage_in_every_chunk_counts_once_by_its_last_value() -> None:
    chunks = [
        event(
            choices=[{"text": "x"}], usage={"prompt_tokens": 3, "completion_tokens": n, "prompt_tokens_details": None}
        )
        for n in (1, 2, 3)
    ]
    record = read((1.0, chunks[0]), (2.0, chunks[1]), (3.0, chunks[2] + DONE))
    assert (record.prompt_tokens, record.output_tokens) == (3, 3)
    assert record.chunk_tokens == [1, 2, 3]


def test_times_are_relative_to_the_sending_and_one_token_has_no_tpot() -> None:
    record = read((10.5, text("x", "length") + usage(1, 1) + DONE), sent_at=10.0)
    assert (record.ttft, record.e2e, record.tpot, record.itl) == (0.5, 0.5, None, [])


def test_an_answer_that_never_shows_text_has_an_end_but_no_first_token() -> None:
    record = read((2.0, text("", "length") + usage(1, 4) + DONE))
    assert record.error is None
    assert (record.ttft, record.tpot, record.e2e) == (None, None, 2.0)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (text("a"), "truncated"),
        (text("a", "stop") + DONE, "no_usage"),
        (
            text("a") + event(error={"message": "boom", "type": "server_error", "code": None}) + DONE,
            "in_band:server_error",
        ),
        (event(error={"message": "boom", "code": "engine_dead"}) + DONE, "in_band:engine_dead"),
        (event(error="boom") + DONE, "in_band:error"),
        (b"data: {oops\n\n" + DONE, "invalid_chunk"),
        (b'data: {"choices": 5}\n\n' + DONE, "invalid_chunk"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n' + DONE, "invalid_chunk"),
        (b"", "truncated"),
    ],
)
def test_an_incomplete_answer_is_an_error_of_its_own_kind(body: bytes, kind: str) -> None:
    record = read((1.0, body))
    assert record.error == kind
    assert record.error_message


def finished(ttft: float, e2e: float, tokens: int, *, planned: float = 0.0) -> RequestRecord:
    return RequestRecord(
        0, planned, planned, planned + e2e, [planned + ttft, planned + e2e], prompt_tokens=10, output_tokens=tokens
    )


def failed(kind: str) -> RequestRecord:
    record = RequestRecord(0)
    record.fail(kind, f"message of {kind}")
    return record


def test_the_summary_is_in_milliseconds_with_the_asked_percentiles() -> None:
    summary = summarize([0.001, 0.002, 0.003, 0.004], [25, 99.9])
    assert summary is not None
    assert list(summary) == ["mean", "median", "std", "p25", "p99.9", "count"]
    assert summary["mean"] == pytest.approx(2.5)
    assert summary["median"] == pytest.approx(2.5)
    assert summary["std"] == pytest.approx(1.118034)
    assert summary["p25"] == pytest.approx(1.75)
    assert summarize([], [99]) is None


def test_throughput_counts_complete_answers_only_over_the_whole_duration() -> None:
    records = [
        finished(0.5, 1.0, 11),
        finished(0.5, 2.0, 21),
        failed("http_503"),
        failed("http_503"),
        failed("connect"),
    ]
    report = build_report(LoadResult(records, 4.0, 5), percentiles=[50], slos={}, config={"seed": 0})
    assert (report["completed"], report["failed"]) == (2, 3)
    assert report["errors"] == {"http_503": 2, "connect": 1}
    assert report["error_samples"]["connect"] == "message of connect"
    assert report["request_throughput"] == 0.5
    assert report["output_throughput"] == 8.0
    assert report["total_throughput"] == 13.0
    assert report["tpot_ms"]["count"] == 2
    assert report["tpot_ms"]["mean"] == pytest.approx((50 + 75) / 2)
    assert report["tokens_per_chunk"] == 8.0
    assert "goodput" not in report
    json.dumps(report, allow_nan=False)


def test_goodput_counts_the_answers_that_keep_every_limit() -> None:
    records = [finished(0.1, 1.1, 11), finished(0.3, 1.3, 11), finished(0.1, 5.1, 11), failed("timeout")]
    report = build_report(LoadResult(records, 2.0, 4), percentiles=[99], slos={"ttft": 200.0, "tpot": 150.0}, config={})
    assert report["goodput"]["requests"] == 1
    assert report["goodput"]["fraction"] == 0.25
    assert report["goodput"]["requests_per_s"] == 0.5
    assert "25.0%" in render(report)


def test_one_token_keeps_any_tpot_limit_and_a_textless_answer_keeps_no_ttft_limit() -> None:
    assert meets(finished(0.1, 0.1, 1), {"tpot": 0.001})
    textless = RequestRecord(0, finished_at=0.1, output_tokens=3)
    assert not meets(textless, {"ttft": 1e9})
    assert meets(textless, {"e2el": 200.0})


def test_lateness_is_reported_for_paced_runs_only() -> None:
    at_once = [finished(0.1, 0.2, 2), finished(0.1, 0.2, 2)]
    paced = [finished(0.1, 0.2, 2, planned=1.0), finished(0.1, 0.2, 2, planned=2.0)]
    paced[1].sent_at += 0.5
    reports = [
        build_report(LoadResult(r, 1.0, 2), percentiles=[], slos={}, config={})["send_delay_ms"]
        for r in (at_once, paced)
    ]
    assert reports[0] is None
    assert reports[1]["mean"] == pytest.approx(250.0)


def test_a_report_without_a_single_answer_is_still_valid_and_readable() -> None:
    result = LoadResult([failed("connect")], 0.0, 1)
    report = build_report(result, percentiles=[99], slos={"e2el": 5.0}, config={})
    json.dumps([report, details(result)], allow_nan=False)
    assert "message of connect" in render(report)
    assert report["ttft_ms"] is None
