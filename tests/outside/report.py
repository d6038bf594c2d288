"""What pytest reported of the outside clients, as the page docs/conformance.md. Knows nothing but the reports."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HEAD = """\
# What outside clients find

`make conformance` wrote this page from pytest's reports. It starts `triptych serve` with the default model, once more
with a simulated model that runs one request at a time and wants a key, and once with the same weights in float32; then
it drives them with the clients below, each unchanged and apart from our packages (`tests/outside`). Two cores that do
other work too: times and rates are no measurements.

| driven by | date, commit | passed | failed | skipped |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Case:
    """One test: `name` without its parameters, `outcome` passed, failed or skipped, `reason` if not passed."""

    name: str
    outcome: str
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The name as words."""
        return self.name.removeprefix("test_").replace("_", " ")


@dataclass(frozen=True)
class Suite:
    """The tests of one file, the clients with their versions that it drove, and when: the date and the commit."""

    name: str
    when: str
    clients: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def title(self) -> str:
        """The clients, or the file's name where none was there."""
        return ", ".join(self.clients) or self.name.removeprefix("test_")

    def count(self, outcome: str) -> int:
        """How many tests ended so."""
        return sum(case.outcome == outcome for case in self.cases)


def read(report: Path, name: str) -> Suite:
    """A JUnit report of pytest's. Where none was written nothing was driven."""
    if not report.exists():
        return Suite(name, "never", (), (Case("all of it", "skipped", "there is no report"),))
    (suite,) = xml.parse(report).getroot().iter("testsuite")
    properties = suite.find("properties")
    found = [] if properties is None else list(properties.iter("property"))
    clients = dict.fromkeys(each.attrib["value"] for each in found if each.attrib["name"] == "client")
    commits = dict.fromkeys(each.attrib["value"] for each in found if each.attrib["name"] == "commit")
    when = ", ".join([suite.attrib["timestamp"][:10], *commits])
    return Suite(name, when, tuple(clients), tuple(_case(case) for case in suite.iter("testcase")))


def _case(element: xml.Element) -> Case:
    name = element.attrib["name"].partition("[")[0]
    properties = element.iter("property")
    notes = tuple(each.attrib["value"] for each in properties if each.attrib["name"] == "note")
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (end := element.find(tag)) is not None:
            return Case(name, outcome, end.attrib.get("message", "").partition("\n")[0][:300], notes)
    return Case(name, "passed", notes=notes)


def render(suites: Iterable[Suite]) -> str:
    """The page: a table of all, and under each its sentences, with how many variants of each passed."""
    suites = list(suites)
    lines = [HEAD.rstrip()]
    for suite in suites:
        counts = " | ".join(str(suite.count(outcome)) for outcome in ("passed", "failed", "skipped"))
        lines.append(f"| {suite.title} | {suite.when} | {counts} |")
    for suite in suites:
        lines += ["", f"## {suite.name.removeprefix('test_')}", "", f"{suite.title}:", ""]
        for sentence in dict.fromkeys(case.sentence for case in suite.cases):
            lines += _entry(sentence, [case for case in suite.cases if case.sentence == sentence])
    return "\n".join(lines) + "\n"


def _entry(sentence: str, cases: list[Case]) -> list[str]:
    counts = [(outcome, sum(case.outcome == outcome for case in cases)) for outcome in ("passed", "failed", "skipped")]
    shown = [f"{number} {outcome}" for outcome, number in counts if number and (outcome != "passed" or number > 1)]
    lines = [f"- {sentence}" + (f" ({', '.join(shown)})" if shown else "")]
    lines += [f"  - {case.reason}" for case in cases if case.reason]
    return lines + [f"  - {note}" for case in cases for note in case.notes]
