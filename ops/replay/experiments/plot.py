"""Small SVG charts that stand alone as files: lines against a number, bars beside each other. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 680, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 56, 46
COLOURS = ("#2b7bba", "#d9622b", "#3a9a55", "#8a5bb5", "#b8860b", "#c23b6b", "#5a6672", "#1aa6a6")
MOST_TICKS = 7

Points = Sequence[tuple[float, float]]


def lines(title: str, x: str, y: str, of: Mapping[str, Points], *, dots: bool = True) -> str:
    """A chart with one line per name. Axes are linear, y from 0; `dots` marks the points."""
    points = [point for line in of.values() for point in line]
    low, high = min((px for px, _ in points), default=0.0), max((px for px, _ in points), default=1.0)
    axes = _Axes(low, high if high > low else low + 1, max((py for _, py in points), default=0.0))
    parts = [*_frame(title, x, y, list(of)), *axes.y_ticks(), *axes.x_ticks()]
    for index, line in enumerate(of.values()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{axes.x(px)},{axes.y(py)}" for px, py in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if dots:
            parts += [f'<circle cx="{axes.x(px)}" cy="{axes.y(py)}" r="3" fill="{colour}"/>' for px, py in line]
    return "".join([*parts, "</svg>\n"])


def bars(title: str, y: str, groups: Sequence[str], of: Mapping[str, Sequence[float]]) -> str:
    """A chart with a group of bars per label, one bar [groups] per name."""
    axes = _Axes(0.0, 1.0, max((value for values in of.values() for value in values), default=0.0))
    parts = [*_frame(title, "", y, list(of) if len(of) > 1 else []), *axes.y_ticks()]
    room = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    each = room * 0.76 / max(len(of), 1)
    for place, group in enumerate(groups):
        start = LEFT + room * (place + 0.12)
        for index, values in enumerate(of.values()):
            top = float(axes.y(values[place]))
            parts.append(
                f'<rect x="{start + index * each:.1f}" y="{top:.1f}" width="{each * 0.94:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}" fill="{COLOURS[index % len(COLOURS)]}"/>'
            )
        middle = LEFT + room * (place + 0.5)
        for row, text in enumerate(textwrap.wrap(group, max(int(room / 6.2), 8))[:3]):
            parts.append(
                f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 15 + 12 * row}" text-anchor="middle" font-size="11">'
                f"{escape(text)}</text>"
            )
    return "".join([*parts, "</svg>\n"])


def ticks(high: float) -> list[float]:
    """Round numbers from 0 up to `high`, in steps of 1, 2 or 5 times a power of ten; at most eight."""
    return rounds(0.0, high)


def rounds(low: float, high: float) -> list[float]:
    """Round numbers between two bounds."""
    if high <= low:
        return [low]
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def ceiling(high: float) -> float:
    """The first of the round numbers that isn't below `high`: where an axis ends, so that its last label is above all
    that is drawn. 0 for 0."""
    if high <= 0:
        return 0.0
    first, second = ticks(high)[:2]
    step = second - first
    return math.ceil(high / step - 1e-9) * step


class _Axes:
    """From values to places in the picture."""

    def __init__(self, low: float, high: float, top: float) -> None:
        self._low, self._high = low, high
        self._top = ceiling(top) or 1.0

    def x(self, value: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * (value - self._low) / (self._high - self._low):.1f}"

    def y(self, value: float) -> str:
        return f"{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self._top:.1f}"

    def y_ticks(self) -> list[str]:
        parts = []
        for value in ticks(self._top):
            at = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{at}" dy=".35em" text-anchor="end">{_label(value)}</text>')
        return parts

    def x_ticks(self) -> list[str]:
        return [
            f'<text x="{self.x(value)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_label(value)}</text>'
            for value in rounds(self._low, self._high)
        ]


def _frame(title: str, x: str, y: str, names: Sequence[str]) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>',
        f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{escape(y)}</text>',
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}" stroke="#888"/>',
    ]
    at, row = float(LEFT), 0
    for index, name in enumerate(names):
        wide = 30 + 6.6 * len(name)
        if at + wide > WIDTH and at > LEFT:
            at, row = float(LEFT), row + 14
        parts.append(
            f'<rect x="{at:.0f}" y="{26 + row}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{at + 14:.0f}" y="{35 + row}">{escape(name)}</text>')
        at += wide
    return parts


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
