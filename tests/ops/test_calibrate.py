"""`triptych calibrate`: which runs it makes, what it reads from times, and a short sweep of a real server."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from harness import ROOT, running_server

from ops.bench.openai_stream import RequestRecord
from ops.calibrate.cli import main
from ops.calibrate.scatter import MOST_DOTS, Panel, page, svg, ticks
from ops.calibrate.steps import Steps
from ops.calibrate.sweep import BATCHES, MOST_PROMPT_TOKENS, OUTPUTS, PROMPTS, Measured, deliveries, plan
from protocol.messages import Limits
from runner.config import RunnerConfig
from runner.sim import sim_limits
from runner.step_costs import MeasuredCost, read_measured

LIMITS = sim_limits(RunnerConfig(backend="sim"))


def steps(*rows: tuple[int, int, int, int]) -> Steps:
    """Steps of one row as (tokens, received, started, ended)."""
    tokens, received, started, ended = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Steps(LIMITS, 0, tokens, tokens, np.ones_like(tokens), received, started, ended, np.zeros_like(tokens))


# --- the runs -------------------------------------------------------------------------------------------------


def limits(**changes: int) -> Limits:
    fields = {name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__}
    return Limits(**{**fields, **changes})


def test_the_runs_cover_all_sizes_that_are_not_too_long() -> None:
    runs = plan(LIMITS)
    assert {run.batch for run in runs} == set(BATCHES)
    assert {run.prompt for run in runs} == set(PROMPTS)
    assert max(run.batch * run.prompt for run in runs) <= MOST_PROMPT_TOKENS


@pytest.mark.parametrize(
    ("changes", "batches", "prompts"),
    [
        ({"max_num_seqs": 4}, {1, 2, 4}, set(PROMPTS)),
        ({"max_model_len": 128 + OUTPUTS}, set(BATCHES), {16, 128}),
        ({"num_blocks": 1 + 50}, {1, 2, 4, 8}, {16, 128, 512}),
        ({"num_blocks": 3}, set(), set()),
    ],
)
def test_a_run_that_the_server_could_not_hold_at_once_is_left_out(
    changes: dict[str, int], batches: set[int], prompts: set[int]
) -> None:
    runs = plan(limits(**changes))
    assert {run.batch for run in runs} == batches
    assert {run.prompt for run in runs} == prompts


# --- what times tell ------------------------------------------------------------------------------------------


def test_delivery_is_what_is_left_of_a_first_token_without_its_steps() -> None:
    record = RequestRecord(0, sent_at=1e-6, chunk_times=[100e-6, 150e-6], prompt_tokens=20)
    seen = steps(
        (1, 100, 200, 300),  # somebody else's, before it was sent
        (16, 4_000, 5_000, 40_000),
        (4, 30_000, 41_000, 80_000),
        (1, 81_000, 81_000, 99_000),  # the second token's
    )
    assert deliveries([record], seen) == [(4_000 - 1_000) + (100_000 - 80_000)]


def test_a_request_whose_steps_are_not_known_has_no_delivery() -> None:
    record = RequestRecord(0, sent_at=1e-6, chunk_times=[100e-6], prompt_tokens=20)
    assert deliveries([record], steps((16, 4_000, 5_000, 40_000))) == []
    assert deliveries([RequestRecord(0)], steps((16, 4_000, 5_000, 40_000))) == []


def test_what_was_never_seen_is_nothing() -> None:
    empty = Measured()
    assert (empty.pause_ns(), empty.delivery_ns()) == (0.0, 0.0)
    assert Measured(delivery=[5, 7, 900], pauses=[1, 2, 3, 100]).delivery_ns() == 7
    assert Measured(pauses=[1, 2, 3, 100]).pause_ns() == 2.5


# --- the plot -------------------------------------------------------------------------------------------------


def test_a_plot_has_a_dot_per_pair_and_no_dot_outside() -> None:
    drawn = ElementTree.fromstring(svg(Panel("A & B <c>", "ms", [1.0, 10.0, 0.0], [1.1, 8.0, 3.0])))
    dots = [item for item in drawn if item.tag == "circle"]
    assert len(dots) == 2, "what has no logarithm can't be drawn"
    assert all(54 <= float(dot.attrib[axis]) <= 366 for dot in dots for axis in ("cx", "cy"))
    assert float(dots[0].attrib["cx"]) < float(dots[1].attrib["cx"])
    assert float(dots[0].attrib["cy"]) > float(dots[1].attrib["cy"]), "up is more"
    times = [1.0 + i for i in range(9 * MOST_DOTS)]
    many = ElementTree.fromstring(svg(Panel("many", "ms", times, times)))
    assert len([item for item in many if item.tag == "circle"]) <= MOST_DOTS
    assert "nothing was measured" in svg(Panel("none", "ms", [], []))


def test_ticks_are_round_numbers_and_few() -> None:
    assert ticks(0.9, 11) == [1, 2, 5, 10]
    assert 2 <= len(ticks(1e-4, 1e6)) <= 8


def test_a_page_loads_nothing_and_escapes_what_it_shows() -> None:
    found: list[tuple[str, str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend((tag, name) for name, _ in attrs)

    text = page("<title>", "a < b", [Panel("p", "s", [1.0], [1.0])])
    Reader().feed(text)
    assert "a &lt; b" in text and "<h1>&lt;title&gt;</h1>" in text
    assert not {"src", "href"} & {name for _, name in found}
    assert "script" not in {tag for tag, _ in found}


# --- a real server --------------------------------------------------------------------------------------------


def test_a_sweep_of_a_running_server_gives_a_file_that_a_replay_reads(tmp_path: Path) -> None:
    flags = ("--backend", "sim", "--sim-step-ms", "4", "--sim-token-us", "20", "--sim-first-token-id", "1000")
    out, plot = tmp_path / "cost.json", tmp_path / "page.html"
    with running_server(*flags, "--num-blocks-override", "900", "--max-num-seqs", "8") as server:
        runtime = next(process.environ()["TRIPTYCH_RUNTIME_DIR"] for process in server.children().values())
        command = [sys.executable, "-m", "ops.cli", "calibrate", "--url", server.url, "--runtime-dir", runtime]
        command += ["--seconds", "1", "--max-prompt", "128", "--out", str(out), "--page", str(plot)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "error on runs that the fit hasn't seen" in done.stdout
    cost = read_measured(out)
    assert cost.fixed_ns + cost.token_ns + cost.context_ns + cost.row_ns > 0
    assert cost.steps > 8 * OUTPUTS
    assert (cost.block_size, cost.num_blocks, cost.max_num_seqs, cost.max_num_batched_tokens, cost.max_model_len) == (
        *(16, 900, 8, 2048, 8192),
    )
    assert cost.dtype == "simulated"
    assert cost.delivery_ns > 0 and cost.error > 0
    assert "<circle" in plot.read_text()


def test_a_server_that_is_not_there_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.calibrate.cli.READY_TIMEOUT_S", 0.1)
    assert main(["--url", "http://127.0.0.1:1", "--runtime-dir", str(tmp_path), "--out", str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err.startswith("triptych calibrate: the server is not ready")
    assert not (tmp_path / "x").exists()


def test_pause_is_part_of_each_step_and_delivery_of_none() -> None:
    numbers = {"fixed_ns": 1000, "token_ns": 10, "context_ns": 1, "row_ns": 5, "pause_ns": 300, "delivery_ns": 9e6}
    cost = MeasuredCost(**numbers, overlap=False, steps=1, error=0)
    assert cost.step_ns(2, 7, 1) == 1000 + 20 + 7 + 5 + 300
