"""The timeline of the start: what each rank did until it trained, on one clock. What is not known is not drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .content import utc
from .markup import clock, duration, seconds, text
from .steps import PHASES, spans

_MOST_ROWS = 512  # in larger jobs the ranks of a node share a row, or of several
_LABELLED = 64  # rows that are high enough for a label each
_LEAST_LABEL = 13  # pixels
_LONGEST_BEFORE = 60.0  # seconds that are drawn before the first rank knows that it is one
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400)

_SAID = {
    "start": "process started, knows its rank",
    "join": "reaches rank 0",
    "wait": "waits for all to join",
    "command": "starts the command",
    "script": "the command until it calls init()",
    "meet": "waits for all to call it",
    "import": "imports the framework",
    "ready": "waits for all to be ready",
    "group": "starts the group",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a rank, or several of them, for which the latest time of each step counts."""

    label: str
    steps: Mapping[str, float]


def timeline(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The timeline with its legend, and how exact it is; empty if nothing is known."""
    rows = _rows(ranks)
    drawn = [spans(row.steps) for row in rows]
    times = [time for found in drawn for span in found.values() for time in span]
    if not times:
        return ""
    axis = _axis(times, [row.steps["detected"] for row in rows if "detected" in row.steps])
    height = 22 if len(rows) <= 32 else 15 if len(rows) <= _LABELLED else 6
    texts, every = len(rows) <= _LABELLED, -(-_LEAST_LABEL // height)
    body = [
        _row(row, found, axis, label=texts or number % every == 0, texts=texts)
        for number, (row, found) in enumerate(zip(rows, drawn, strict=True))
    ]
    note = f"From {clock(utc(axis.zero))} on. {_uncertainty(ranks)}{_unknown(ranks)}"
    return (
        f"{_legend({name for found in drawn for name in found})}"
        f'<div class="timeline" style="--row:{height}px"><div class="axis">{_ticks(axis.length)}</div>'
        f'<div class="rows">{"".join(body)}</div></div><p class="quiet">{text(note, 1000)}</p>'
    )


@dataclass(frozen=True, slots=True)
class Axis:
    """From when on how many seconds are drawn."""

    zero: float
    length: float

    def percent(self, when: float) -> float:
        """Where a time is."""
        return 100 * max(when - self.zero, 0.0) / self.length


def _axis(times: Sequence[float], detected: Sequence[float]) -> Axis:
    """A process that had other things to do before is drawn from the edge: a notebook, say."""
    begin, end = min(detected, default=min(times)), max(times)
    zero = max(min(times), begin - _LONGEST_BEFORE - 2 * (end - begin))
    return Axis(zero, max(end - zero, 0.001))


def _uncertainty(ranks: Sequence[Mapping[str, Any]]) -> str:
    """How well the clocks were compared."""
    worst = max(ranks, key=lambda rank: rank["clock"]["within"])
    within, ahead = worst["clock"]["within"], max(ranks, key=lambda rank: abs(rank["clock"]["ahead"]))
    if not within:
        return "All times are by rank 0's clock, which all ranks that joined share."
    said = f"All times are by rank 0's clock. Those of other hosts were compared with it when their ranks joined, to \
within {_short(within)} (rank {worst['rank']})"
    most = ahead["clock"]["ahead"]
    if abs(most) > ahead["clock"]["within"]:
        how = "ahead" if most > 0 else "behind"
        said += f"; rank {ahead['rank']}'s was {_short(abs(most))} {how}, for which its times are corrected"
    return f"{said}."


def _unknown(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Why the bars end where a command starts, if they all do."""
    steps = {name for rank in ranks for name in rank["steps"]}
    if "command_started" not in steps or "init_called" in steps:
        return ""
    return " What the command does once it has started is not known here, as it does not call distboot.init()."


def _rows(ranks: Sequence[Mapping[str, Any]]) -> list[Row]:
    order = sorted(ranks, key=lambda one: (one["node_rank"] is None, one["node_rank"] or 0, one["local_rank"] or 0))
    if len(order) <= _MOST_ROWS:
        return [_together([rank], f"{rank['rank']} {rank['host'] or ''}".strip()) for rank in order]
    nodes: dict[int | None, list[Mapping[str, Any]]] = {}
    for rank in order:
        nodes.setdefault(rank["node_rank"], []).append(rank)
    groups, several = list(nodes.items()), -(-len(nodes) // _MOST_ROWS)
    found = []
    for start in range(0, len(groups), several):
        (node, here), *others = groups[start : start + several]
        label = f"node {node}" + (f" to {others[-1][0]}" if others else f" {here[0]['host'] or ''}")
        found.append(_together([*here, *(rank for _, more in others for rank in more)], label))
    return found


def _together(ranks: Sequence[Mapping[str, Any]], label: str) -> Row:
    latest: dict[str, float] = {}
    for rank in ranks:
        for name, when in rank["steps"].items():
            latest[name] = max(seconds(when), latest.get(name, 0.0))
    return Row(label, latest)


def _row(row: Row, found: Mapping[str, tuple[float, float]], axis: Axis, *, label: bool, texts: bool) -> str:
    bars = []
    for name, (begin, end) in found.items():
        left, right = axis.percent(begin), axis.percent(end)
        said = text(f"{row.label}: {_SAID[name]}, {duration(end - begin)}")
        where = f"left:{left:.2f}%;width:{right - left:.2f}%"
        bars.append(f'<i class="{name}" style="{where}" title="{said}">{name if texts else ""}</i>')
    side = f'<span class="label" title="{text(row.label)}">{text(row.label, 60)}</span>' if label else ""
    after = duration(max(end for _, end in found.values()) - axis.zero) if found else ""
    last = f'<span class="last">{after}</span>' if texts and found else ""
    nothing = '<em class="last">did not join</em>' if texts and not found else ""
    return f'<div class="row">{side}<div class="track">{"".join(bars)}{nothing}</div>{last}</div>'


def _ticks(length: float) -> str:
    step = next((one for one in _TICKS if length / one <= 8), _TICKS[-1])
    count = int(length / step)
    return "".join(
        f'<span style="left:{100 * number * step / length:.2f}%">{_short(number * step)}</span>'
        for number in range(count + 1)
        if number * step <= 0.95 * length
    )


def _legend(used: set[str]) -> str:
    items = [f'<li><i class="{one.name}"></i> {one.name}: {_SAID[one.name]}</li>' for one in PHASES if one.name in used]
    return f'<ul class="legend phases">{"".join(items)}</ul>'


def _short(given: float) -> str:
    """`"30 ms"`, `"1.5 s"`, `"2 min"`."""
    if 0 < given < 1:
        return f"{max(given * 1000, 0.1):.3g} ms"
    if given < 60:
        return f"{given:.3g} s"
    return f"{given / 60:.3g} min" if given < 3600 else f"{given / 3600:.3g} h"
