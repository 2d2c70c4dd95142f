"""Variables that reached one node only, or have another value there. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..base.text import escape_control, joined
from .messages import NodeSeen

Variables = tuple[tuple[str, str], ...]  # names and digests
_MOST_NAMES = 8


def odd_variables(seen: Mapping[int, NodeSeen], hosts: Sequence[str]) -> list[str]:
    """Which nodes have other variables than most, with the names of these: a line for each."""
    nodes: defaultdict[Variables, list[int]] = defaultdict(list)
    for node, one in seen.items():
        if one.variables:
            nodes[one.variables].append(node)
    # Of as many nodes on both sides, that of the first node is the usual one
    ordered = sorted(nodes, key=lambda variables: (-len(nodes[variables]), nodes[variables]))
    found = []
    for variables in ordered[1:]:
        names = _different(variables, ordered[0])
        listed = ", ".join(names[:_MOST_NAMES])
        more = len(names) - _MOST_NAMES
        if more > 0:
            listed += f", and {more} more"
        where = joined((hosts[node] for node in nodes[variables]), _MOST_NAMES)
        usual = hosts[nodes[ordered[0]][0]]
        found.append(f"{where}: variables that differ from those on {usual}: {listed}")
    return found


def _different(here: Variables, usual: Variables) -> list[str]:
    """The names of variables that differ, and how."""
    own = dict(here)
    others = dict(usual)
    names: set[str] = set()
    for name, _ in set(here) ^ set(usual):
        names.add(name)
    found = []
    for name in sorted(names):
        how = "a different value"
        if name not in own:
            how = "not set"
        elif name not in others:
            how = "only here"
        found.append(f"{escape_control(name)} ({how})")
    return found
