"""The lines of rank 0 and who is at the other end of each: one rank, or behind a relay those of a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .cases import Member
from .line import Line


class Lines:
    """All of them.

    Args:
        members: the ranks, with their lines.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self._members: dict[Line, list[Member]] = {}
        # How many are there yet at the other end of each: asked for at every wake-up, of thousands of lines.
        self._there: Counter[Line] = Counter()
        for member in members:
            if member.line is not None:
                self._members.setdefault(member.line, []).append(member)
                self._there[member.line] += 1

    def open(self) -> list[Line]:
        """Those with somebody at the other end."""
        return list(self._there)

    def members(self, line: Line) -> list[Member]:
        """Who is there yet at the other end."""
        return [member for member in self._members[line] if member.line is line]

    def forget(self, member: Member) -> Line | None:
        """A rank is not at the other end of its line any more: that line, if it was the last one there."""
        line, member.line = member.line, None
        if line is None:
            return None
        self._there[line] -= 1
        if self._there[line]:
            return None
        del self._there[line]
        return line
