"""Small plots as SVG: text stays text, and both a white and a dark background will do, as each brings its own.

bars("Start", [Bar("distboot", 0.05, "+50 ms", ours=True), …])
lines("Roll call", "ranks", "seconds", {"distboot": [(64, 0.1), (1024, 0.2)]})
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 800
# The first is ours. Of one brightness, so that they show on white and on black.
_COLOURS = (
    "#2f81f7",
    "#d9822b",
    "#2da44e",
    "#a371f7",
    "#e5534b",
    "#c2679a",
    "#8c959f",
    "#b08800",
    "#39a0a0",
)
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 } .small { font-size: 12px; fill: #57606a } .ours { font-weight: 600 }
.paper { fill: #ffffff; stroke: #d0d7de } .grid { stroke: #d8dee4 } .silent { fill-opacity: .25 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9da7b3 }
.paper { fill: #0d1117; stroke: #30363d } .grid { stroke: #262c36 }
}
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A row of a bar plot.

    Attributes:
        label: at its left.
        value: its length.
        said: at its end.
        ours: whether it is distboot's.
        silent: whether nothing was measured up to `value`, which is then only a bound.
    """

    label: str
    value: float
    said: str
    ours: bool = False
    silent: bool = False


def bars(title: str, rows: Sequence[Bar], note: str = "") -> str:
    """Horizontal bars, in the order given."""
    left, row, top = 250, 26, 52 if not note else 70
    most = max((bar.value for bar in rows), default=0) or 1
    scale = (_WIDTH - left - 190) / most
    marks = [_text(24, 32, title, "title"), *([_text(24, 52, note, "small")] if note else [])]
    for number, bar in enumerate(rows):
        y, width = top + number * row, max(bar.value * scale, 1.5)
        weight = "ours" if bar.ours else ""
        marks.append(_text(left - 10, y + 15, bar.label, weight, anchor="end"))
        silent = ' class="silent"' if bar.silent else ""
        colour = _COLOURS[0] if bar.ours else _COLOURS[6]
        marks.append(
            f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="18" rx="2" fill="{colour}"{silent}/>'
        )
        marks.append(_text(left + width + 8, y + 15, bar.said, weight))
    return _svg(title, top + len(rows) * row + 18, marks)


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[Point]],
    *,
    log_y: bool = True,
) -> str:
    """Lines over a logarithmic x axis, each with its name at its end; the first is ours."""
    series = {name: points for name, points in series.items() if points}
    left, right, top, bottom, height = 76, 230, 62, 52, 430
    xs = [x for points in series.values() for x, _ in points] or [1.0]
    ys = [y for points in series.values() for _, y in points] or [1.0]
    low, high = (
        (_decade(min(ys), math.floor), _decade(max(ys), math.ceil))
        if log_y
        else (0.0, max(ys) * 1.05)
    )

    def at(x: float, y: float) -> Point:
        across = _part(x, min(xs), max(xs), log=True)
        return left + across * (_WIDTH - left - right), height - bottom - _part(
            y, low, high, log=log_y
        ) * (height - bottom - top)

    marks = [_text(24, 32, title, "title"), _text(left, 52, y_label, "small")]
    for y in _ticks(low, high, log=log_y):
        _, down = at(xs[0], y)
        marks.append(
            f'<line class="grid" x1="{left}" x2="{_WIDTH - right}" y1="{down:.1f}" y2="{down:.1f}"/>'
        )
        marks.append(_text(left - 8, down + 4, _short(y), "small", anchor="end"))
    marks += [
        _text(at(x, low)[0], height - bottom + 20, f"{x:,.0f}", "small", anchor="middle")
        for x in sorted(set(xs))
    ]
    marks.append(_text((left + _WIDTH - right) / 2, height - 12, x_label, "small", anchor="middle"))
    ends = _apart({name: at(*points[-1])[1] for name, points in series.items()})
    for number, (name, points) in enumerate(series.items()):
        colour, ours = _COLOURS[number % len(_COLOURS)], number == 0
        placed = [at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        thick = 3 if ours else 1.8
        marks.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
        )
        marks += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{thick + 0.8}" fill="{colour}"/>'
            for x, y in placed
        ]
        end = _WIDTH - right + 26
        marks.append(
            f'<line x1="{placed[-1][0] + 6:.1f}" y1="{placed[-1][1]:.1f}" x2="{end - 5}" y2="{ends[name]:.1f}" '
            f'stroke="{colour}" stroke-opacity=".5"/>'
        )
        marks.append(_text(end, ends[name] + 4, name, "ours" if ours else ""))
    return _svg(title, height, marks)


def _svg(title: str, height: float, marks: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" role="img">'
    paper = (
        f'<rect class="paper" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1:.0f}" rx="6"/>'
    )
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            paper,
            *marks,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _part(value: float, low: float, high: float, *, log: bool) -> float:
    """Where a value is between two others, from 0 to 1."""
    if low == high:
        return 0.5
    if log:
        value, low, high = (math.log10(each) for each in (value, low, high))
    return (value - low) / (high - low)


def _decade(value: float, rounded: object) -> float:
    """The power of ten at or below a value (`math.floor`), or at or above it (`math.ceil`)."""
    assert callable(rounded)
    return float(10 ** rounded(math.log10(value)))


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    if log:
        return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    step = 10 ** math.floor(math.log10(high))
    step = next(step * part for part in (0.2, 0.5, 1, 2) if high / (step * part) <= 6)
    return [step * number for number in range(int(high / step) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _apart(places: Mapping[str, float], least: float = 17) -> dict[str, float]:
    """Labels moved down, and then all up by half of the most, so that none covers another."""
    moved: dict[str, float] = {}
    for name in sorted(places, key=lambda name: places[name]):
        moved[name] = max(places[name], max(moved.values(), default=-math.inf) + least)
    shift = max((moved[name] - places[name] for name in places), default=0.0) / 2
    return {name: place - shift for name, place in moved.items()}
