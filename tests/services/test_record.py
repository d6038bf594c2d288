"""Recording traffic: what is written, that it is no text, what is left out, and what a full disk does."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ops.traces import read_trace
from protocol.columns import pack_i32
from protocol.messages import Rejected, SamplingParams, Submit
from protocol.settings import SettingError
from services.config import ApiConfig
from services.journal import Call, Generation
from services.metrics import ApiMetrics
from services.record import BLOCK_TOKENS, FLUSH_BYTES, MOST_WAITING, Recording, prefix_hashes, shared_key
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service, connect

KEY = bytes(32)
PROMPT = list(range(100, 150))
NOW_NS = 1_700_000_000_000_000_000


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ended(
    prompt: Sequence[int] = PROMPT, outputs: int = 3, *, left: bool = False, outcome: str = "length", **fields: Any
) -> Call:
    """A call of one generation that is over."""
    call = asyncio.run(_call())
    fields = {"arrival_ns": NOW_NS, **fields}
    submit = Submit(7, pack_i32(prompt), SamplingParams(max_tokens=40), **fields)
    generation = Generation(call, 0, submit, 0.0)
    generation.tokens = list(range(outputs))
    generation.outcome = "" if left else outcome
    call.disconnected = left
    call.generations.append(generation)
    return call


async def _call() -> Call:
    return Call(lambda: 0.0)


def metrics() -> ApiMetrics:
    return ApiMetrics(CollectorRegistry(), "m")


def record(path: Path, calls: Sequence[Call], **settings: Any) -> ApiMetrics:
    counted = metrics()
    recording = Recording(str(path), KEY, counted, wall_ns=lambda: NOW_NS + 2_500_000_000, **settings)
    for call in calls:
        recording.over(call)
    recording.close()
    return counted


# --- what a line says -----------------------------------------------------------------------------------------


def test_a_finished_request_is_a_line_that_the_trace_reader_understands(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    counted = record(path, [ended(priority=-2, tenant="ada", deadline_ms=900)])
    (row,) = read_trace(path)
    assert (row.input_tokens, row.output_tokens, row.block_tokens) == (50, 3, BLOCK_TOKENS)
    assert (row.priority, row.tenant, row.deadline_ms, row.cancel_ns) == (-2, "ada", 900, 0)
    assert row.hash_ids == prefix_hashes(KEY, pack_i32(PROMPT), "")
    assert len(row.hash_ids) == 3
    assert recorded(path)[0]["at_s"] == NOW_NS / 1e9
    assert (counted.value("recorded_requests_total"), counted.value("record_lost_requests_total")) == (1, 0)


def test_a_client_that_left_is_recorded_with_the_time_and_the_limit_it_would_have_gone_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, [ended(left=True)])
    (row,) = read_trace(path)
    assert (row.cancel_ns, row.output_tokens) == (2_500_000_000, 40)


def test_lines_may_come_in_any_order_and_are_read_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    late, early = ended(outputs=9), ended(outputs=4, arrival_ns=NOW_NS - 1_000_000_000)
    record(path, [late, early])
    assert [(row.at_ns, row.output_tokens) for row in read_trace(path)] == [(0, 4), (1_000_000_000, 9)]


def test_equal_hashes_mean_equal_prefixes_up_to_there_and_no_further(tmp_path: Path) -> None:
    same = [5] * 16
    one = prefix_hashes(KEY, pack_i32([*same, *same, *range(16)]), "")
    two = prefix_hashes(KEY, pack_i32([*same, *same, *range(1, 17)]), "")
    shifted = prefix_hashes(KEY, pack_i32([9, *same, *same]), "")
    assert one[:2] == two[:2] and one[2] != two[2]
    assert one[0] != one[1], "the same tokens at another place are another prefix"
    assert not set(one) & set(shifted)
    assert len(prefix_hashes(KEY, pack_i32([5] * 47), "")) == 2, "a block that isn't full is nobody else's"
    assert all(0 <= number < 2**63 for number in one)


def test_hashes_can_not_be_told_without_the_key_and_salts_keep_prompts_apart() -> None:
    prompt = pack_i32(PROMPT)
    assert not set(prefix_hashes(KEY, prompt, "")) & set(prefix_hashes(b"\1" * 32, prompt, ""))
    assert not set(prefix_hashes(KEY, prompt, "")) & set(prefix_hashes(KEY, prompt, "salt"))


def test_token_ids_are_written_only_when_asked_for(tmp_path: Path) -> None:
    record(tmp_path / "hashes", [ended()])
    record(tmp_path / "tokens", [ended()], with_tokens=True)
    assert "token_ids" not in recorded(tmp_path / "hashes")[0]
    (row,) = read_trace(tmp_path / "tokens")
    assert row.token_ids == tuple(PROMPT)
    assert row.input_tokens == 50
    with pytest.raises(SettingError, match="record_tokens: needs record"):
        ApiConfig(record_tokens=True)


# --- the file -------------------------------------------------------------------------------------------------


def test_the_file_is_private_even_if_it_was_not_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch(0o644)
    record(path, [ended()])
    record(path, [ended()])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(recorded(path)) == 2


def test_a_line_is_written_without_waiting_for_the_end(tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    path = tmp_path / "trace.jsonl"
    recording = Recording(str(path), KEY, metrics())
    recording.over(ended())
    wait_until(lambda: path.read_text(), 60, "the line")
    recording.close()
    recording.close()
    assert len(recorded(path)) == 1


def test_processes_share_a_file_line_by_line_and_a_key(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    counted = [metrics(), metrics()]
    both = [Recording(str(path), KEY, each) for each in counted]
    many = [ended(prompt=list(range(n, n + 400))) for n in range(200)]
    assert FLUSH_BYTES < 200 * 25 * 15
    for call in many:
        for recording in both:
            recording.over(call)
    for recording in both:
        recording.close()
    assert len(read_trace(path)) == 400
    assert [each.value("recorded_requests_total") for each in counted] == [200, 200]
    keys = {shared_key(str(tmp_path)) for _ in range(3)}
    assert [len(key) for key in keys] == [32]
    assert stat.S_IMODE((tmp_path / "record.key").stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["record.key", "trace.jsonl"]


def test_a_full_disk_is_said_once_and_counted(caplog: pytest.LogCaptureFixture, wait_until: Callable[..., Any]) -> None:
    counted = metrics()
    recording = Recording("/dev/full", KEY, counted)
    for lost in (1, 2):
        recording.over(ended())
        wait_until(lambda lost=lost: counted.value("record_lost_requests_total") == lost, 60, "the loss")
    recording.close()
    assert counted.value("recorded_requests_total") == 0
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "the recording /dev/full has gaps: No space left on device; serving goes on, further losses are only counted"
    ]


FILLS_UP = """
import resource, sys
from pathlib import Path
from tests.services.test_record import ended, record
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
counted = record(path, [ended() for _ in range(100)])
print(int(counted.value("recorded_requests_total")), int(counted.value("record_lost_requests_total")))
"""


def test_a_write_that_the_disk_cuts_short_leaves_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FILLS_UP, str(path)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    written, lost = map(int, done.stdout.split())
    assert len(read_trace(path)) == written > 0
    assert written + lost == 100


def test_a_disk_that_does_not_keep_up_costs_lines_and_never_blocks(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    counted = metrics()
    recording = Recording(str(fifo), KEY, counted)
    call = ended()
    while not counted.value("record_lost_requests_total"):
        for _ in range(1000):
            recording.over(call)
    os.close(reader)  # the pipe breaks: what still waits is lost as well, and the thread ends
    recording.close()
    assert counted.value("record_lost_requests_total") >= MOST_WAITING


# --- in a running service -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording_service(make_service: MakeService, tmp_path_factory: pytest.TempPathFactory) -> tuple[Service, Path]:
    path = tmp_path_factory.mktemp("record") / "trace.jsonl"
    return make_service(record=str(path)), path


def test_each_choice_is_a_line_and_text_is_nowhere(
    recording_service: tuple[Service, Path], wait_until: Callable[..., Any]
) -> None:
    service, path = recording_service
    secret = "Zanzibar is the password of the day. " * 10
    body = {"model": MODEL, "prompt": secret, "n": 2, "user": "ada", "priority": 3, "deadline": 2.5, "max_tokens": 30}
    answer = service.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == ANSWER
    lines = wait_until(lambda: len(found := recorded(path)) == 2 and found, 60, "two lines")
    assert lines[0] == {**lines[1], "at_s": lines[0]["at_s"]}
    usage = answer["usage"]
    assert lines[0]["prompt_tokens"] == usage["prompt_tokens"]
    assert lines[0]["output_tokens"] * 2 == usage["completion_tokens"]
    assert len(lines[0]["hash_ids"]) == usage["prompt_tokens"] // 16 > 3
    assert (lines[0]["tenant"], lines[0]["priority"], lines[0]["deadline_ms"]) == ("ada", 3, 2500)
    assert "Zanzibar" not in path.read_text()
    assert set(lines[0]) == {
        *("at_s", "output_tokens", "prompt_tokens", "hash_ids", "priority", "tenant", "deadline_ms")
    }


def test_a_disconnect_is_recorded_and_a_refusal_is_not(
    recording_service: tuple[Service, Path], wait_until: Callable[..., Any]
) -> None:
    service, path = recording_service
    scheduler = service.scheduler
    assert scheduler is not None
    before = len(path.read_text().splitlines()) if path.exists() else 0
    scheduler.refuse = lambda submit: Rejected(submit.id, "queue_full", "full", 503)
    assert service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 503
    service.reset()
    scheduler.tokens_allowed = 3
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 500, "ignore_eos": True}).encode()
    client = connect(service)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    scheduler.wait_for(lambda: [live.count for live in scheduler.live.values()] == [3], "three tokens")
    client.close()
    lines = wait_until(lambda: len(found := recorded(path)) > before and found, 60, "a line")
    assert len(lines) == before + 1
    assert lines[-1]["output_tokens"] == 500
    assert lines[-1]["cancel_at_s"] >= lines[-1]["at_s"]
    service.reset()


def test_a_recording_that_can_not_be_opened_is_an_error_at_the_start(make_service: MakeService) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        make_service(record="/nowhere/trace.jsonl", scheduler=False)
