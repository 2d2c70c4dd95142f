"""What differs between the ranks and should not: versions, variables, clocks, the framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.errors import DistbootError
from ..base.text import escape_control, nodes_said, ranks_said, short_repr
from ..host import FRAMEWORK
from .membership import Membership
from .messages import SAME_FRAMEWORK, WorkerInfo

# Seconds; beyond that logs cannot be compared and credentials expire early
_MOST_SKEW = 30.0
_MOST_GROUPS = 4  # groups of ranks that one fact names
_MISSING = {True: "not set", False: "not there"}  # by whether it is a variable


def consistency_warnings(
    records: Sequence[WorkerInfo], membership: Membership, skews: Mapping[int, float]
) -> list[str]:
    """Lines like "ranks 8-15 (node 1): torch 2.12.0, others 2.13.0".

    Args:
        records: in the order of ranks.
        membership: of the job.
        skews: seconds by which the clock of a rank is ahead of rank 0's.
    """
    node_of = membership.node_of()
    found: list[str] = []
    facts = _facts_of(records)
    for name in _names_of_facts(records):
        ranks_by_value = _ranks_by_value(name, facts)
        found += _describe_fact(name, ranks_by_value, node_of)
    clocks = {0: 0.0, **skews}
    found += _describe_clocks(clocks, node_of)
    return found


def refuse_several_frameworks(records: Sequence[WorkerInfo], membership: Membership) -> None:
    """Refuse ranks that start different frameworks, or one in different ways: they cannot meet."""
    ranks_by_value = _ranks_by_value(FRAMEWORK, _facts_of(records))
    if None in ranks_by_value or len(ranks_by_value) == 1:
        return
    node_of = membership.node_of()
    differences = _describe_fact(FRAMEWORK, ranks_by_value, node_of)
    raise DistbootError(
        "membership-mismatch",
        "; ".join(differences),
        SAME_FRAMEWORK,
    )


def _names_of_facts(records: Sequence[WorkerInfo]) -> list[str]:
    """Those that any rank has; none, if all ranks have the same facts, as most jobs do."""
    different = {record.facts for record in records}
    if len(different) == 1:
        return []
    names: set[str] = set()
    for facts in different:
        names.update(dict(facts))
    return sorted(names)


def _facts_of(records: Sequence[WorkerInfo]) -> list[dict[str, str]]:
    return [dict(record.facts) for record in records]


def _ranks_by_value(
    name: str,
    facts: Sequence[Mapping[str, str]],  # of each rank
) -> dict[str | None, list[int]]:
    """The ranks whose fact has each value, the most frequent value first."""
    found: dict[str | None, list[int]] = {}
    for rank, own in enumerate(facts):
        found.setdefault(own.get(name), []).append(rank)
    # Sorting keeps the order of the first ranks where two values are as frequent
    by_frequency = sorted(found.items(), key=lambda item: len(item[1]), reverse=True)
    return dict(by_frequency)


def _describe_fact(
    name: str,
    ranks_by_value: Mapping[str | None, list[int]],
    node_of: Mapping[int, int],
) -> list[str]:
    """A line for each group of ranks whose value is not the most frequent one."""
    usual, *odd = ranks_by_value
    rest = "most"
    if len(odd) == 1:
        rest = "others"
    lines = []
    for value in odd[:_MOST_GROUPS]:
        ranks = _describe_ranks(ranks_by_value[value], node_of)
        here = _describe_value(name, value)
        there = _short_value(name, usual)
        lines.append(f"{ranks}: {here}, {rest} {there}")
    more = len(odd) - _MOST_GROUPS
    if more > 0:
        lines.append(f"{_shown_name(name)}: {more} more values on other ranks")
    return lines


def _describe_value(name: str, value: str | None) -> str:
    shown = _short_value(name, value)
    if name == "accelerators":
        return f"{shown} accelerators visible"
    if name.endswith("=") and value is not None:
        return f"{_shown_name(name)}={shown}"
    return f"{_shown_name(name)} {shown}"


def _shown_name(name: str) -> str:
    bare = name.rstrip("=")
    return escape_control(bare)


def _short_value(name: str, value: str | None) -> str:
    is_setting = name.endswith("=")
    if value is None:
        return _MISSING[is_setting]
    if is_setting:
        return short_repr(value)
    return escape_control(value)


def _describe_clocks(clocks: Mapping[int, float], node_of: Mapping[int, int]) -> list[str]:
    """Compare with the median: rank 0's own clock may be the one that is wrong."""
    in_order = sorted(clocks.values())
    middle = in_order[len(in_order) // 2]
    ahead: dict[int, float] = {}
    behind: dict[int, float] = {}
    for rank, clock in sorted(clocks.items()):
        seconds = clock - middle
        if seconds > _MOST_SKEW:
            ahead[rank] = seconds
        elif seconds < -_MOST_SKEW:
            behind[rank] = -seconds
    return [
        *_describe_clock(ahead, "ahead of", node_of),
        *_describe_clock(behind, "behind", node_of),
    ]


def _describe_clock(
    seconds_by_rank: Mapping[int, float],
    how: str,
    node_of: Mapping[int, int],
) -> list[str]:
    if not seconds_by_rank:
        return []
    ranks = _describe_ranks(list(seconds_by_rank), node_of)
    most = max(seconds_by_rank.values())
    return [f"{ranks}: clock up to {most:.0f} s {how} that of the others"]


def _describe_ranks(ranks: list[int], node_of: Mapping[int, int]) -> str:
    """`"ranks 0-3 (node 0)"`."""
    nodes = {node_of[rank] for rank in ranks}
    return f"{ranks_said(ranks)} {nodes_said(sorted(nodes))}"
