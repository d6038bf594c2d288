"""The scheduler bench at tiny sizes: what is counted, what is reported, how a peer takes part. Never how long."""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path

import pytest

from ops.bench import cli, scheduler
from ops.bench.scheduler import ROUNDS, measure_admission, measure_passes, measure_waiting, medians, steady
from ops.bench.scheduler_peer import Peer, PeerFailed
from ops.bench.scheduler_subject import BLOCK_SIZE, PassTime, Subject, decodes, prompt_tokens, staggered
from ops.bench.scheduler_wire import measure_wire
from protocol.columns import i32
from protocol.messages import Step
from scheduler.presets import QUEUE_POLICIES

ECHO_PEER = """
import json, sys
running = 0
for line in sys.stdin:
    command = json.loads(line)
    if "load" in command:
        running = command["load"]
        answer = {"version": "fake " + sys.argv[1]}
    else:
        answer = [[10**9, 2 * 10**9, running + (%d)]] * command["steps"]
    print(json.dumps(answer), flush=True)
"""


def peer_script(directory: Path, rows_off_by: int = 0) -> Path:
    script = directory / "peer.py"
    script.write_text(ECHO_PEER % rows_off_by)
    return script


def test_every_timed_pass_decodes_every_row_and_one_in_16_takes_a_block() -> None:
    report, wire = measure_passes(32, 16, 20, "", None, messages=3)
    assert (report["running"], report["steps"], report["rows"]) == (32, ROUNDS * 16, ROUNDS * 16 * 32)
    assert report["blocks_taken"] == ROUNDS * 32
    assert (wire["running"], wire["messages"]) == (32, 3)
    assert "ratio" not in report


def test_those_who_wait_stay_waiting_under_every_policy() -> None:
    for policy in QUEUE_POLICIES:
        report = measure_waiting(3, 20, 2, 20, policy)
        assert (report["policy"], report["running"], report["waiting"]) == (policy, 3, 20)
        assert report["rows"] == ROUNDS * 2 * 3
        assert report["ratio"] == pytest.approx(report["total_us"] / report["without_us"])


@pytest.mark.parametrize(("hit", "cached"), [(True, 80), (False, 0)])
def test_an_admitted_prompt_is_cached_but_for_its_last_block_or_not_at_all(hit: bool, cached: int) -> None:
    report = measure_admission(96, 3, "", hit=hit)
    assert (report["requests"], report["prompt_tokens"], report["cached_tokens"]) == (3, 96, cached)


def test_the_subject_is_steady_for_as_long_as_it_promises_and_its_books_balance() -> None:
    subject = decodes(5, 4, policy="", prompt_len=30, max_steps=40)
    steady([subject.step() for _ in range(40)], 5)
    stats = subject.core.refresh_stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (5, 4, 0)
    assert subject.core.check() == []


def test_a_step_that_is_not_steady_is_no_measurement() -> None:
    fine = PassTime(1, 1, rows=4, sampled=4, blocks_taken=0)
    assert steady([fine], 4) == [fine]
    with pytest.raises(RuntimeError, match="step 1 had 4 rows and 3 samples, not 4"):
        steady([fine, PassTime(1, 1, rows=4, sampled=3, blocks_taken=0)], 4)


def test_a_pass_is_timed_around_the_two_calls_and_nothing_else() -> None:
    ticks = deque(range(0, 10_000_000, 7))
    subject = Subject(max_num_seqs=1, num_blocks=20, clock=ticks.popleft)
    subject.submit(prompt_tokens(0, 20), 4)
    time = subject.step()
    assert (time.schedule_ns, time.update_ns) == (7, 7)
    assert time.total_ns == 14


def test_a_refused_request_is_an_error_and_not_a_quick_admission() -> None:
    subject = Subject(max_num_seqs=1, num_blocks=3)
    with pytest.raises(RuntimeError, match="refused"):
        subject.submit(prompt_tokens(0, 20 * BLOCK_SIZE), 4)


def test_prompts_share_no_leading_block_and_their_lengths_cover_a_block() -> None:
    blocks = {prompt_tokens(seed, BLOCK_SIZE) for seed in range(50_000)}
    assert len(blocks) == 50_000
    assert sorted(staggered(100, index) for index in range(BLOCK_SIZE)) == list(range(100, 100 + BLOCK_SIZE))
    assert len(i32(prompt_tokens(3, 77))) == 77


def test_medians_are_of_each_part_and_of_the_sums() -> None:
    assert medians([(1000, 9000), (2000, 2000), (9000, 1000)]) == {
        "schedule_us": 2.0, "update_us": 2.0, "total_us": 10.0
    }  # fmt: skip


def test_a_step_goes_over_a_real_socket_and_its_parts_are_clocked() -> None:
    ticks = deque(range(0, 10_000_000, 1000))
    report = measure_wire(Step(1, 2, ids=bytes(16), num_tokens=bytes(8)), 5, clock=ticks.popleft)
    assert [report[f"{part}_us"] for part in ("encode", "send", "receive", "decode", "total")] == [1, 1, 1, 1, 4]
    assert report["bytes"] > 24


def test_a_peer_takes_turns_and_is_compared(tmp_path: Path) -> None:
    with Peer(Path(sys.executable), tmp_path, script=peer_script(tmp_path)) as peer:
        report, _ = measure_passes(4, 2, 20, "", peer, messages=1)
    assert report["vllm"] == {
        "version": f"fake {tmp_path}", "steps": ROUNDS * 2,
        "schedule_us": 1e6, "update_us": 2e6, "total_us": 3e6,
    }  # fmt: skip
    assert report["ratio"] == pytest.approx(3e6 / report["total_us"])


def test_a_peer_that_runs_other_steps_is_no_comparison(tmp_path: Path) -> None:
    script = peer_script(tmp_path, rows_off_by=-1)
    with (
        Peer(Path(sys.executable), tmp_path, script=script) as peer,
        pytest.raises(PeerFailed, match="did not have 4 rows"),
    ):
        measure_passes(4, 1, 20, "", peer, messages=1)


def test_a_peer_that_ends_or_can_not_start_is_reported_with_what_it_said(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys; sys.exit('no such scheduler')")
    with Peer(Path(sys.executable), tmp_path, script=script) as peer, pytest.raises(PeerFailed, match="no such sched"):
        peer.load(1, 1, 1)
    with pytest.raises(PeerFailed, match="can't be run"):
        Peer(tmp_path / "python", tmp_path)


def test_a_silent_peer_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text("import signal; signal.pause()")
    with (
        Peer(Path(sys.executable), tmp_path, script=script, timeout_s=0.3) as peer,
        pytest.raises(PeerFailed, match="exit code -9"),
    ):
        peer.load(1, 1, 1)


def test_the_command_writes_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    arguments = ["--running", "2", "3", "--waiting", "4", "--policy", "priority", "--steps", "2", "--prompt-len", "20"]
    arguments += ["--admission-len", "40", "--admissions", "2", "--messages", "2", "--json", str(out)]
    assert cli.main(["scheduler", *arguments]) == 0
    report = json.loads(out.read_text())
    assert report["schema"] == "triptych.bench.scheduler/1"
    assert report["config"]["policies"] == ["priority"]
    assert [(row["running"], row["policy"]) for row in report["passes"]] == [(2, "priority"), (3, "priority")]
    assert [(row["running"], row["waiting"]) for row in report["waiting"]] == [(2, 4), (3, 4)]
    assert [(row["hit"], row["cached_tokens"]) for row in report["admission"]] == [(True, 32), (False, 0)]
    assert [row["running"] for row in report["wire"]] == [2, 3]
    table = capsys.readouterr().out
    for heading in ("pass and update", "with requests waiting", "admission", "one step over ipc"):
        assert heading in table


def test_nothing_waiting_leaves_that_table_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--running", "2", "--waiting", "0", "--steps", "1", "--prompt-len", "20", "--admission-len", "20"]
    assert scheduler.main([*arguments, "--admissions", "1", "--messages", "1"]) == 0
    assert "waiting" not in capsys.readouterr().out


def test_a_peer_needs_a_model_directory() -> None:
    with pytest.raises(SystemExit) as caught:
        scheduler.main(["--vllm-python", sys.executable])
    assert caught.value.code == 2
