"""What people read of a replay: the table, the differences in words, the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from ops.replay import report_html, report_text
from ops.replay.compare import bound, compare, difference, figure
from ops.replay.result import Report
from tests.ops.replay_kit import CONVERSATION, replayed, write_lines

VOID = {"meta", "input", "br", "hr", "img", "link"}


@pytest.fixture(scope="module")
def report() -> Report:
    return replayed(
        *(CONVERSATION, "--limit", 120, "--time-scale", 0.2, "--blocks", 600, "--digest"),
        *("--preset", "vllm", "--set", "vllm:watermark=0", "--preset", "sglang", "--preset", "triptych"),
    )


def test_the_table_puts_presets_side_by_side(report: Report) -> None:
    text = report_text.render(report)
    lines = text.split("\n")
    assert max(map(len, lines)) <= 100
    assert next(line for line in lines if line.strip().startswith("vllm ")).split() == ["vllm", "sglang", "triptych"]
    preemptions = next(line for line in lines if line.startswith("preemptions")).split()
    assert preemptions[1:] == [str(run.preemptions) for run in report.runs]
    assert all(run.name in text and str(run.decisions["all"]) in text for run in report.runs)


def test_many_presets_take_several_tables(report: Report) -> None:
    run = report.runs[0]
    many = msgspec.structs.replace(report, runs=[msgspec.structs.replace(run, name=f"number-{i}") for i in range(9)])
    lines = report_text.render(many).split("\n")
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("within objectives") for line in lines) == 3
    assert all(any(f"number-{i}" in line for line in lines) for i in range(9))


def test_ends_other_than_complete_have_lines_of_their_own(tmp_path: Path) -> None:
    row = {"at_s": 0, "prompt_tokens": 10, "output_tokens": 50}
    trace = write_lines(tmp_path / "t.jsonl", row, {**row, "cancel_at_s": 3})
    text = report_text.render(replayed(trace, "--cost", "tick"))
    assert next(line for line in text.split("\n") if "aborted" in line).split() == ["aborted", "1"]


def test_each_preset_is_told_apart_from_the_first_in_words(report: Report) -> None:
    base, other = report.runs[0], report.runs[1]
    assert [words.split(":")[0] for words in report.words] == [
        *("sglang against vllm", "triptych against vllm", "vllm", "sglang", "triptych")
    ]
    better = msgspec.structs.replace(
        other,
        goodput=msgspec.structs.replace(other.goodput, share=0.7),
        preemptions=0,
        requests_per_s=base.requests_per_s * 1.005,
    )
    worse = msgspec.structs.replace(base, goodput=msgspec.structs.replace(base.goodput, share=0.17), preemptions=180)
    said = difference(better, worse)
    assert "4.1 times as many requests within the objectives (70.0% against 17.0%)" in said
    assert "0 preemptions instead of 180" in said
    assert "throughput the same within 1%" in said
    back = difference(worse, better)
    assert "only 0.24 times as many requests within the objectives (17.0% against 70.0%)" in back
    assert "180 preemptions instead of 0" in back


def test_nothing_is_multiplied_with_nothing(report: Report) -> None:
    run = report.runs[0]
    none = msgspec.structs.replace(run, goodput=msgspec.structs.replace(run.goodput, share=0.0))
    some = msgspec.structs.replace(run, goodput=msgspec.structs.replace(run.goodput, share=0.5))
    assert "50.0% of requests within the objectives instead of none" in difference(some, none)
    assert "no request within the objectives instead of 50.0%" in difference(none, some)
    assert "as many requests within the objectives (0.0%)" in difference(none, none)


def test_what_bound_admission_is_said_with_its_share(report: Report) -> None:
    run = msgspec.structs.replace(report.runs[0], held_passes={"slots": 25, "blocks": 75}, steps=200)
    assert bound(run) == (
        "vllm: the head of the queue was held 100 times in 200 steps (50%): 75% because its KV blocks were not free, "
        "25% because all running slots were taken."
    )
    assert "nothing ever kept" in bound(msgspec.structs.replace(run, held_passes={}))


def test_a_run_alone_is_compared_with_nobody(report: Report) -> None:
    assert len(compare(report.runs[:1])) == 1


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.00"), (0.01234, "0.0123"), (1.5, "1.50"), (44.04, "44.0"), (1234.5, "1,234")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


class Page(HTMLParser):
    """Checks nesting, collects what a browser would load and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)


def parsed(page: str) -> Page:
    found = Page()
    found.feed(page)
    found.close()
    return found


def test_the_page_is_whole_and_loads_nothing(report: Report) -> None:
    text = report_html.render(report)
    page = parsed(text)
    assert page.open == []
    assert page.loads == []
    assert "{{" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    data = json.loads(page.scripts[0])
    assert [run["name"] for run in data["runs"]] == ["vllm", "sglang", "triptych"]
    assert len(data["runs"][0]["lanes"]) == 120
    seen = " ".join(page.text)
    assert all(words in seen for words in report.words)


def test_what_comes_from_outside_is_escaped(report: Report) -> None:
    evil = "</script><script>alert('{{data}}')</script>&\u2028"
    run = report.runs[0]
    lane = msgspec.structs.replace(run.lanes[0], why=[evil], end=evil)
    bad = msgspec.structs.replace(run, name=evil, scheduler=evil, settings={evil: evil}, ends={evil: 1}, lanes=[lane])
    text = report_html.render(Report(trace={**report.trace, "file": evil}, runs=[bad], words=[evil], version=evil))
    page = parsed(text)
    assert page.open == []
    assert len(page.scripts) == 2
    data = json.loads(page.scripts[0])
    assert (data["runs"][0]["name"], data["runs"][0]["lanes"][0]["why"]) == (evil, [evil])
    assert "<script>alert" not in text
    assert "\u2028" not in page.scripts[0]
