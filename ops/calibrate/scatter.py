"""Predicted against measured as dots in an SVG, and a page of a few of them. No scripts, nothing from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

SIZE, MARGIN = 420, 54
MOST_DOTS = 4000
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
pre { background: color-mix(in srgb, currentColor 6%, transparent); padding: 1rem; overflow-x: auto; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
svg { color: inherit; max-width: 100%; height: auto; }
:root { color-scheme: light dark; }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: dots at (measured, predicted), both in `unit`."""

    title: str
    unit: str
    measured: Sequence[float]
    predicted: Sequence[float]


def svg(panel: Panel) -> str:
    """The plot: a dot per pair, the diagonal where they agree, and dashed lines 15 % to both sides. Log axes."""
    pairs = [(m, p) for m, p in zip(panel.measured, panel.predicted, strict=True) if m > 0 and p > 0]
    if not pairs:
        return f"<p>{html.escape(panel.title)}: nothing was measured.</p>"
    pairs = pairs[:: math.ceil(len(pairs) / MOST_DOTS)]
    low, high = min(map(min, pairs)) / 1.1, max(map(max, pairs)) * 1.1
    span = math.log(high / low)

    def at(value: float) -> float:
        return (SIZE - 2 * MARGIN) * math.log(min(max(value, low), high) / low) / span

    def x(value: float) -> str:
        return f"{MARGIN + at(value):.1f}"

    def y(value: float) -> str:
        return f"{SIZE - MARGIN - at(value):.1f}"

    parts = [
        f'<svg viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}" role="img" aria-label="{html.escape(panel.title)}" '
        'font-size="12" fill="currentColor">',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{SIZE - 2 * MARGIN}" height="{SIZE - 2 * MARGIN}" fill="none" '
        'stroke="currentColor" stroke-opacity=".4"/>',
    ]
    for factor, dash in ((1.0, ""), (1.15, "4 4"), (1 / 1.15, "4 4")):
        start, end = max(low, low / factor), min(high, high / factor)
        parts.append(
            f'<line x1="{x(start)}" y1="{y(start * factor)}" x2="{x(end)}" y2="{y(end * factor)}" '
            f'stroke="currentColor" stroke-opacity=".5" stroke-dasharray="{dash}"/>'
        )
    for value in ticks(low, high):
        label = f"{value:g}"
        parts.append(f'<text x="{x(value)}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(value)}" text-anchor="end" dy=".35em">{label}</text>')
    parts += [f'<circle cx="{x(m)}" cy="{y(p)}" r="2.5" fill="#2b7bba" fill-opacity=".55"/>' for m, p in pairs]
    middle = SIZE / 2
    parts += [
        f'<text x="{middle}" y="{SIZE - 12}" text-anchor="middle">measured ({panel.unit})</text>',
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        f"predicted ({panel.unit})</text>",
        f'<text x="{middle}" y="{MARGIN - 18}" text-anchor="middle" font-size="15">{html.escape(panel.title)}</text>',
        "</svg>",
    ]
    return "".join(parts)


def page(title: str, text: str, panels: Sequence[Panel]) -> str:
    """A self-contained HTML page: the plots and the report as text."""
    figures = "".join(f"<figure>{svg(panel)}</figure>" for panel in panels)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>{figures}<pre>{html.escape(text)}</pre></html>\n"
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds, 1-2-5 in each decade, thinned to eight at most."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    found = [value for value in found if low <= value <= high]
    return found[:: math.ceil(len(found) / 8)] if found else []
