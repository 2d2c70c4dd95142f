"""The side of the lifeline that is this rank's, made of what the roll call has left."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import tell
from ..report.history import History
from ..rollcall.handed import Handed
from ..roster import Roster
from .hub import Hub
from .line import FOR_OTHERS, KINDS, Line, interval_of
from .report import summarize
from .settings import Settings
from .spoke import Spoke
from .trunk import Trunk
from .verdict import seats

_LEAST_BEATS = 2  # within the bound, however large the job is


def side_of(
    rank: int,
    roster: Roster,
    connections: Iterable[Handed],
    settings: Settings,
    *,
    held: bool,
    history: History | None = None,
) -> Hub | Spoke:
    """Rank 0's side, or that of another rank.

    Args:
        rank: of this process.
        roster: of the job.
        connections: of the roll call.
        settings: of this rank.
        held: whether its exit waits for us, as in the wrapper.
        history: how the job has begun, for the report of rank 0.
    """
    interval = interval_of(roster)
    lines = {}
    for ranks, connection, session, is_relay in connections:
        kinds = (*KINDS, *FOR_OTHERS) if is_relay else KINDS
        line = (Trunk if is_relay else Line)(connection, session, interval, kinds=kinds)
        lines.update(dict.fromkeys(ranks, line))
    settings = settings._replace(bound=max(settings.bound, _LEAST_BEATS * interval))

    def say(text: str) -> None:
        tell(f"rank {rank}", text)

    if rank == 0:
        return Hub(seats(roster), lines, settings, held=held, say=say, conclude=summarize, history=history)
    return Spoke(rank, seats(roster)[0], lines[0], settings, held=held, say=say)
