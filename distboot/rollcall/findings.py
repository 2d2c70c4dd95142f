"""What the ranks should have alike and have not: versions, settings, accelerators, clocks. Each is one line of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..errors import DistbootError, printable, quoted
from ..facts import FRAMEWORK
from ..record import Record
from ..roster import Roster, ranges, ranks_said

_MOST_SKEW = 30.0  # seconds; more than that, and logs cannot be compared and credentials expire early
_MOST_GROUPS = 4  # odd groups named for one fact


def findings(records: Sequence[Record], roster: Roster, skews: Mapping[int, float]) -> list[str]:
    """Lines like "ranks 8-15 (node 1): torch 2.12.0, others 2.13.0".

    Args:
        records: of all ranks, in rank order.
        roster: of the same ranks.
        skews: rank -> seconds that its clock is ahead of rank 0's.
    """
    node_of = roster.node_of()
    found: list[str] = []
    if len({record.facts for record in records}) > 1:
        tables = [dict(record.facts) for record in records]
        for name in sorted({name for table in tables for name in table}):
            found += _about(name, [table.get(name) for table in tables], node_of)
    return found + _clocks(skews, node_of)


def refuse_several_frameworks(records: Sequence[Record], roster: Roster) -> None:
    """Refuse ranks that are about to start different frameworks, or one in different ways: they could not meet there.

    Raises:
        DistbootError: `roster-mismatch`.
    """
    chosen = [dict(record.facts).get(FRAMEWORK) for record in records]
    if len(set(chosen)) > 1 and None not in chosen:
        raise DistbootError(
            "roster-mismatch",
            "; ".join(_about(FRAMEWORK, chosen, roster.node_of())),
            "let all ranks call init() with the same arguments, and give the wrapper the same --framework",
        )


def _about(name: str, values: Sequence[str | None], node_of: Mapping[int, int]) -> list[str]:
    groups: dict[str | None, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        groups[value].append(rank)
    usual, *odd = sorted(groups, key=lambda value: (-len(groups[value]), groups[value][0]))
    rest = "others" if len(odd) == 1 else "most"
    said = [
        f"{_ranks(groups[value], node_of)}: {_said(name, value)}, {rest} {_value(name, usual)}"
        for value in odd[:_MOST_GROUPS]
    ]
    if len(odd) > _MOST_GROUPS:
        said.append(f"{printable(name.rstrip('='))}: {len(odd) - _MOST_GROUPS} more values on other ranks")
    return said


def _said(name: str, value: str | None) -> str:
    if name == "accelerators":
        return f"{_value(name, value)} accelerators visible"
    if name.endswith("=") and value is not None:
        return f"{printable(name)}{_value(name, value)}"
    return _named(name, value)


def _named(name: str, value: str | None) -> str:
    return f"{printable(name.rstrip('='))} {_value(name, value)}"


def _value(name: str, value: str | None) -> str:
    if value is None:
        return "not set" if name.endswith("=") else "not there"
    return quoted(value) if name.endswith("=") else printable(value)


def _clocks(skews: Mapping[int, float], node_of: Mapping[int, int]) -> list[str]:
    """Against the middle one: rank 0's own clock may be the one that is wrong."""
    clocks = {0: 0.0, **skews}
    middle = sorted(clocks.values())[len(clocks) // 2]
    said = []
    for sign, how in ((1, "ahead of"), (-1, "behind")):
        off = {rank: sign * (clock - middle) for rank, clock in sorted(clocks.items())}
        off = {rank: seconds for rank, seconds in off.items() if seconds > _MOST_SKEW}
        if off:
            most = max(off.values())
            said.append(f"{_ranks(list(off), node_of)}: clock up to {most:.0f} s {how} that of the others")
    return said


def _ranks(ranks: list[int], node_of: Mapping[int, int]) -> str:
    nodes = sorted({node_of[rank] for rank in ranks})
    return f"{ranks_said(ranks)} (node{'s' if len(nodes) > 1 else ''} {ranges(nodes)})"
