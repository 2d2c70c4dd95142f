"""One wait of ranks for late ones: how it is described, and whether it is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ..base.text import escape_control, ranks_said
from .exit_status import ExitStatus
from .find_late import Late, Positions
from .messages import Position
from .root_cause import HELD_UP, RankState
from .stacks import fold, partings, where

_MOST_PLACES = 4  # in one line
# Of a wait for which the job ends, and of one that something else has ended, by whether ranks are
# late; else all wait for each other
_BEGIN_OF_CAUSE = {True: f"{{}} {HELD_UP}", False: "the ranks have waited for {}"}
_BEGIN_OF_PAST = {True: f"{{}} had {HELD_UP}", False: "the ranks had waited for {}"}
_SINGULAR = {"wait": "waits", "are": "is", "have": "has", "continue": "continues"}

# Ranks, and where they are: " in load (data.py:41)"
Places: TypeAlias = Sequence[tuple[Sequence[int], str]]


class Wait:
    """What `find_late` has found, with the positions that prove it."""

    def __init__(
        self,
        late: Late,
        positions: Positions,
        as_of: float,  # when the positions were asked for
        least: float,  # seconds without movement that an agent reports
    ) -> None:
        self.late = late
        self.witness = late.witnesses[0]
        self._positions = positions
        self._as_of = as_of
        # A rank that waits may use a processor; then only the late ranks show since when.
        ranks = late.waiting
        if not late.group:
            ranks = [*late.waiting, *late.ranks]
        self.waited = max(positions[rank].since for rank in ranks)  # seconds
        self.since = as_of - self.waited
        # Since when no rank at all has moved
        self.rest_since = as_of - min(one.since for one in positions.values())
        # Whether the witness uses a processor: then only its stack shows whether it moves.
        position = positions[self.witness]
        self.is_busy = not position.is_counted and position.since < least

    def is_over(self, position: Position, now: float) -> bool:
        """Whether the witness has moved, by its new position."""
        if not self.is_busy:
            return position.since < now - self._as_of
        before = self._positions[self.witness]
        if position.keys != before.keys:
            return True
        stacks = position.stacks
        return stacks not in (None, before.stacks)

    def explains(self, rank: int, end: ExitStatus) -> bool:
        """Whether a rank may have failed as it waited for the late ones."""
        return rank in self.late.waiting and end.may_have_waited

    def describe(
        self,
        begin: str,  # "waiting for {}", for example
        members: Mapping[int, RankState],
        now: float,
    ) -> str:
        """What is printed of the wait.

        `"waiting for rank 3 (node-1) for 60 s: it is in load (data.py:41); …"`,
        `"waiting for each other for 60 s: ranks 0-1 wait in all_reduce (train.py:84); …"`
        """
        late = self.late
        length = f"{now - self.since:.0f} s"
        is_counted = all(self._positions[rank].is_counted for rank in late.witnesses)
        if not late.group and not is_counted:
            length += ", judging by the stacks"
        places = self._places(late.ranks)
        there = _listed(places, "are")
        if not late.waiting:
            return f"no rank has moved for {length}: {there}"
        waiting = _listed(self._places(late.waiting), "wait")
        if not late.ranks:
            who = begin.format("each other")
            reason = self._reason(members)
            return f"{who} for {length}: {waiting}{reason}"
        if len(late.ranks) == 1:
            _, place = places[0]
            there = f"it is{place or ' there'}"
        hosts = {members[rank].host for rank in late.ranks}
        host = f"{len(hosts)} hosts"
        if len(hosts) == 1:
            host = escape_control(hosts.pop())
        who = begin.format(f"{ranks_said(late.ranks)} ({host})")
        counts = self._describe_counts()
        return f"{who} for {length}: {there}; {waiting}{counts}"

    def as_cause(self, members: Mapping[int, RankState], now: float) -> str:
        """Why the job ends: `"rank 1 (vm) held up the job for 600 s: it is in load (data.py:41)"`."""
        return self.describe(_BEGIN_OF_CAUSE[bool(self.late.ranks)], members, now)

    def held_up(self, members: Mapping[int, RankState], now: float) -> str:
        """What went on when something else ended the job.

        `"rank 1 (vm) had held up the job for 600 s, in load (data.py:41)"`,
        `"the ranks had waited for each other for 600 s: rank 0 waits in …"`,
        `"no rank had moved for 600 s: …"`
        """
        text = self.describe(_BEGIN_OF_PAST[bool(self.late.ranks)], members, now)
        # The signal that stops the job has ended ranks by now, so the reason may be wrong.
        first, _, _ = text.partition("; ")
        first = first.replace("no rank has moved", "no rank had moved")
        return first.replace(": it is in ", ", in ")

    def describe_end(self) -> str:
        """`"rank 3 continues"`."""
        ranks = self.late.ranks
        if not ranks:
            return "the ranks continue"
        return _clause(ranks, "continue")

    def _reason(self, members: Mapping[int, RankState]) -> str:
        """Why all may wait for each other; empty: not known."""
        ended = []
        for rank, member in members.items():
            if member.end is not None:
                ended.append(rank)
        if ended:
            return f"; {ranks_said(ended)} ended before"
        places = self._places(self.late.waiting)
        if len(places) > 1:
            return ""
        stacks = {rank: self._positions[rank].stacks for rank in self.late.waiting}
        calls = fold(partings(stacks))
        if calls:
            listed = _listed(calls, "are")
            return f"; there, they wait in different calls: {listed}"
        return "; the network between them, or a device, may not answer"

    def _describe_counts(self) -> str:
        """`", collective operation 1,968, rank 3 has begun 1,967"`; empty: only stacks prove it."""
        late = self.late
        group = late.group
        if not group:
            return ""
        positions = self._positions
        most = max(positions[rank].counts[group] for rank in late.waiting)
        counts = {}
        for rank in late.ranks:
            counts[rank] = positions[rank].counts[group]
        least = min(counts.values())
        at_least = "at least "  # they may have begun more since they have reported
        for rank, count in counts.items():
            if count == least and not positions[rank].is_held:
                at_least = ""
        late_ranks = _clause(late.ranks, "have")
        return f", collective operation {most:,}, {late_ranks} begun {at_least}{least:,}"

    def _places(self, ranks: Iterable[int]) -> Places:
        """Where ranks are, as far as is known; the place of the fewest ranks first."""
        found = {}
        for rank in ranks:
            stacks = self._positions[rank].stacks
            place = ""
            if stacks is not None:
                place = f" {where(stacks)}"
            found[rank] = place
        return fold(found)


def _listed(
    places: Places,
    verb: str,  # in the plural
) -> str:
    """`"rank 1 waits in a (x.py:3), ranks 0, 2 wait in b (x.py:4)"`."""
    shown = []
    for ranks, place in places[:_MOST_PLACES]:
        clause = _clause(ranks, verb)
        shown.append(f"{clause}{place}")
    left_out = len(places) - _MOST_PLACES
    if left_out > 0:
        shown.append(f"{left_out} other places")
    return ", ".join(shown)


def _clause(
    ranks: Sequence[int],
    verb: str,  # in the plural
) -> str:
    """`"rank 1 waits"`, `"ranks 0, 2 wait"`."""
    if len(ranks) == 1:
        verb = _SINGULAR[verb]
    return f"{ranks_said(ranks)} {verb}"
