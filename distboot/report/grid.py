"""The map of a job: every rank a cell, every node a box; colour, sign and text say what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .markup import text

Rank = Mapping[str, Any]  # as the report has it

# State -> class, sign and what it means, in the order of the legend. A sign, as some cannot tell the colours apart.
STATES = {
    "failed first": ("first", "✕", "failed first"),
    "lost": ("lost", "?", "lost: nothing was heard of it any more"),
    "failed later": ("later", "!", "failed later, or was killed by the launcher then"),
    "missing": ("missing", "○", "missing: did not join"),
    "not ready": ("unready", "…", "joined, and did not get ready"),
    "stopped": ("stopped", "■", "stopped because of the others, or from outside"),
    "joined": ("joined", "•", "joined"),
    "ended": ("ended", "✓", "ended well"),
    "not known": ("unknown", "–", "how it ended is not known"),
}
_NUMBERED = 1024  # ranks, whose numbers are shown
_LARGE = 128  # ranks, whose cells are large
_MOST = 16384  # ranks that have a cell each; in larger jobs each node has one


def grid(ranks: Sequence[Rank]) -> str:
    """The map and its legend."""
    size = "large" if len(ranks) <= _LARGE else "medium" if len(ranks) <= _NUMBERED else "small"
    nodes: dict[int | None, list[Rank]] = {}
    for rank in ranks:
        nodes.setdefault(rank["node_rank"], []).append(rank)
    places = sorted(nodes.items(), key=lambda one: (one[0] is None, one[0] or 0))
    if len(ranks) > _MOST:
        boxes = [f'<div class="cells">{"".join(_node_cell(node, here) for node, here in places)}</div>']
    else:
        boxes = [_box(node, here, numbered=len(ranks) <= _NUMBERED) for node, here in places]
    return f'{legend(ranks)}<div class="map {size}">{"".join(boxes)}</div>'


def legend(ranks: Iterable[Rank]) -> str:
    """The states that there are, with the number of ranks in each."""
    counts = Counter(rank["state"] for rank in ranks)
    found = [(state, *STATES[state]) for state in STATES if counts[state]]
    items = [
        f'<li><i class="cell {name}" aria-hidden="true">{sign}</i> <b>{counts[state]}</b> {said}</li>'
        for state, name, sign, said in found
    ]
    return f'<ul class="legend states">{"".join(items)}</ul>'


def _box(node: int | None, ranks: Sequence[Rank], *, numbered: bool) -> str:
    host = next((rank["host"] for rank in ranks if rank["host"]), None)
    name = "node not known" if node is None else f"node {node}" + ("" if host is None else f": {host}")
    order = sorted(ranks, key=lambda rank: (rank["local_rank"] is None, rank["local_rank"] or 0, rank["rank"]))
    cells = "".join(_cell(rank, numbered=numbered) for rank in order)
    short = "?" if host is None else host
    return (
        f'<section class="node" aria-label="{text(name, 100)}"><h3 title="{text(name)}">{text(short, 60)}</h3>'
        f'<div class="cells">{cells}</div></section>'
    )


def _cell(rank: Rank, *, numbered: bool) -> str:
    name, sign, _ = STATES[rank["state"]]
    number = f"<span>{rank['rank']}</span>" if numbered else ""
    return (
        f'<i class="cell {name}" data-rank="{rank["rank"]}" data-state="{rank["state"]}" title="{text(_said(rank))}">'
        f"{number}<b>{sign}</b></i>"
    )


def _node_cell(node: int | None, ranks: Sequence[Rank]) -> str:
    """A whole node: the state that comes first in the order of the legend."""
    state = min((rank["state"] for rank in ranks), key=list(STATES).index)
    name, sign, _ = STATES[state]
    said = f"node {'not known' if node is None else node} ({ranks[0]['host'] or '?'}), {len(ranks)} ranks: {state}"
    return f'<i class="cell {name}" data-node="{node}" data-state="{state}" title="{text(said)}"><b>{sign}</b></i>'


def _said(rank: Rank) -> str:
    where = "" if rank["host"] is None else f" on {rank['host']} (local rank {rank['local_rank']})"
    code = "" if rank["exit_code"] is None else f", exit code {rank['exit_code']}"
    return f"rank {rank['rank']}{where}: {rank['state']}{code}"
