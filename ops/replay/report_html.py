"""The replay's report as one page: nothing is fetched, everything that came from outside is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

import msgspec

from ops.replay.report_text import digest_text, headline, rows
from ops.replay.result import Report, RunResult
from ops.replay.summary import DEFINITIONS


def render(report: Report) -> str:
    """The page, complete."""
    folder = files("ops.replay")
    values = {
        "title": escape(f"Replay of {report.trace['file']}"),
        "headline": escape(headline(report)),
        "words": "".join(f"<li>{escape(words)}</li>" for words in report.words),
        "table": _table(report.runs),
        "setups": _setups(report),
        "definitions": _definitions(),
        "data": _embedded(report),
        "script": (folder / "page.js").read_text(encoding="utf-8"),
    }
    parts = (folder / "page.html").read_text(encoding="utf-8").split("{{")
    page = [parts[0]]
    for part in parts[1:]:  # in one pass: a value that looks like a place isn't one
        name, _, rest = part.partition("}}")
        page += [values[name], rest]
    return "".join(page)


def _embedded(report: Report) -> str:
    """What the charts need, as JSON that can't end the element it stands in."""
    runs = [
        {name: getattr(run, name) for name in ("name", "goodput", "series", "curves", "lanes")} for run in report.runs
    ]
    text = msgspec.json.encode({"runs": runs}).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _table(runs: Sequence[RunResult]) -> str:
    body = ["<tbody>"]
    for row in rows(runs):
        if row is None:
            body.append("</tbody><tbody>")
            continue
        label, cells = row
        part = ' class="part"' if label.startswith(" ") else ""
        body.append(f"<tr><td{part}>{escape(label.strip())}</td>{_cells(cells)}</tr>")
    return f"<table>{_head(runs)}{''.join(body)}</tbody></table>"


def _setups(report: Report) -> str:
    runs = report.runs
    lines: list[tuple[str, list[str]]] = [
        ("scheduler", [run.scheduler for run in runs]),
        ("strategies", [_pairs(run.strategies) for run in runs]),
        ("settings", [_pairs(run.settings) for run in runs]),
        ("limits", [_pairs(run.limits) for run in runs]),
        ("cost", [_pairs(run.cost) for run in runs]),
    ]
    if any(run.decisions for run in runs):
        lines.append(("decisions (CRC-32)", [digest_text(run) for run in runs]))
    body = "".join(f"<tr><td>{escape(label)}</td>{_cells(cells)}</tr>" for label, cells in lines)
    version = f"<p class='soft'>Triptych {escape(report.version)}; trace: {escape(_pairs(report.trace))}</p>"
    return f"{version}<table>{_head(runs)}<tbody>{body}</tbody></table>"


def _head(runs: Iterable[RunResult]) -> str:
    return f"<thead><tr><th></th>{''.join(f'<th>{escape(run.name)}</th>' for run in runs)}</tr></thead>"


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _definitions() -> str:
    """The definitions as terms and what they mean; a line that is indented further goes on with the one before."""
    found: list[tuple[str, list[str]]] = []
    for line in DEFINITIONS.splitlines()[1:]:
        if line.startswith("   "):
            found[-1][1].append(line.strip())
        else:
            term, _, words = line.strip().partition(" ")
            found.append((term, [words.strip()]))
    return "".join(f"<dt>{escape(term)}</dt><dd>{escape(' '.join(words))}</dd>" for term, words in found)


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )
