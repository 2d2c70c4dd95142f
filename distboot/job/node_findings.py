"""What differs between the nodes of a job, or their links, and should not. Pure.

A node or link is compared with the median of all. Text begins after the name of the host:
`"1.1 Gbit/s to node-8, median of the others 94 Gbit/s"`.

| what             | is odd when                                                     |
|------------------|-----------------------------------------------------------------|
| name             | it is not that of most nodes                                    |
| amount           | it is less than half the median, and below the amount that is enough |
| link: rate       | it is less than an eighth of the median                         |
| link: round trip | it is over ten times the median, and 20 ms more                 |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeVar

from ..base.text import escape_control
from ..base.units import bit_rate, duration, size
from .messages import NodeSeen, Probed

_LESS = 2.0
_SLOWER = 8.0  # a link of a busy host was seen to be 7 times slower
_LONGER = 10.0
_MORE_SECONDS = 0.02
_GIB = float(1 << 30)
_NUMBERS = {"CPUs": "{:g}".format}  # all other amounts are bytes
V = TypeVar("V")
# Above that no amount is too low, in bytes
_ENOUGH = {
    "free memory": 64 * _GIB,
    "free space in /dev/shm": 8 * _GIB,
    "free space in the work folder": 100 * _GIB,
    "memory that may be locked": 64 * _GIB,
}


class Finding(NamedTuple):
    """What is wrong with a node."""

    node: int
    text: str  # reads well after the name of its host, and a colon


class Link(NamedTuple):
    """The link from one node to another one, as it was probed.

    Its second best probe counts, where there are several: a link that loses packets may be lucky
    once, and one of a busy host is good again and again.
    """

    start: int
    end: int
    probes: Sequence[Probed]

    @property
    def rate(self) -> float:
        """Bytes a second; 0.0: no probe has reached the other node."""
        rates: list[float] = sorted(map(_rate, self.probes))
        return rates[-2:][0]

    @property
    def best_rate(self) -> float:
        """The same of the best probe."""
        best: float = max(map(_rate, self.probes))
        return best

    @property
    def round_trip(self) -> float:
        """Seconds; infinite: likewise."""
        times = sorted(map(_round_trip, self.probes))
        return times[:2][-1]

    @property
    def problem(self) -> str:
        """Why the last probe has not reached the other node."""
        return self.probes[-1].problem


def _round_trip(probe: Probed) -> float:
    if probe.problem:
        return inf
    return probe.round_trip


_rate = attrgetter("rate")


class _Usual(NamedTuple):
    """The medians of all links that work, of what each can."""

    rate: float
    round_trip: float

    def describe(self, link: Link, other: str) -> str:
        """What is wrong with a link to a host; empty: nothing is."""
        if not link.rate:
            return f"does not reach {other}: {escape_control(link.problem)}"
        if link.rate < self.rate / _SLOWER:
            here = bit_rate(link.rate)
            return f"{here} to {other}, median of the others {bit_rate(self.rate)}"
        most = max(
            self.round_trip * _LONGER,
            self.round_trip + _MORE_SECONDS,
        )
        if link.round_trip > most:
            here = f"a round trip of {duration(link.round_trip)}"
            return f"{here} to {other}, median of the others {duration(self.round_trip)}"
        return ""


def odd_links(links: Sequence[Link], hosts: Sequence[str]) -> list[Finding]:
    """The links that are slower than the others, or do not work; none, if none works.

    Args:
        links: all of them.
        hosts: the name of each node.
    """
    working = list(filter(_rate, links))
    if not working:
        return []
    rates = sorted(map(attrgetter("best_rate"), working))
    times = sorted(map(attrgetter("round_trip"), working))
    # Of two links the better one is the usual one
    usual = _Usual(
        rates[len(rates) // 2],
        times[(len(times) - 1) // 2],
    )
    found = []
    for link in links:
        text = usual.describe(link, hosts[link.end])
        if text:
            found.append(Finding(link.start, text))
    return found


def why_none_works(links: Sequence[Link], hosts: Sequence[str]) -> list[Finding]:
    """What is wrong if no link works at all, which is no matter of one host: one finding or none."""
    if not links or any(map(_rate, links)):
        return []
    link = links[0]
    why = escape_control(link.problem)
    text = f"no node reaches the next one; {hosts[link.end]}: {why}"
    finding = Finding(
        link.start,
        text,
    )
    return [finding]


def odd_nodes(seen: Mapping[int, NodeSeen]) -> list[Finding]:
    """What is wrong with nodes, or differs from most others; `seen`: by node."""
    found = []
    names: defaultdict[str, dict[int, str]] = defaultdict(dict)
    amounts: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for node, one in seen.items():
        for problem in one.problems:
            found.append(Finding(node, escape_control(problem)))
        _add(names, node, one.names)
        _add(amounts, node, one.amounts)
    for name, values in sorted(names.items()):
        found += _odd_names(name, {node: values.get(node, "none") for node in seen})
    for name, sizes in sorted(amounts.items()):
        found += _low_amounts(name, sizes)
    return found


def _add(table: dict[str, dict[int, V]], node: int, row: Mapping[str, V]) -> None:
    for name, value in row.items():
        table[name][node] = value


def _odd_names(name: str, values: Mapping[int, str]) -> list[Finding]:
    counts = Counter(values.values())
    usual, _ = counts.most_common(1)[0]
    found = []
    for node, value in values.items():
        if value != usual:
            here = escape_control(value)
            text = f"{name}: {here}, most have {escape_control(usual)}"
            found.append(Finding(node, text))
    return found


def _low_amounts(name: str, amounts: Mapping[int, float]) -> list[Finding]:
    ordered = sorted(amounts.values())
    median = ordered[len(ordered) // 2]
    least = median / _LESS
    if name in _ENOUGH:
        least = min(least, _ENOUGH[name])
    found = []
    for node, amount in amounts.items():
        if amount < least:
            here = describe_amount(name, amount)
            usual = describe_amount(name, median)
            text = f"{name}: {here}, median of all nodes {usual}"
            found.append(Finding(node, text))
    return found


def describe_amount(name: str, amount: float) -> str:
    """`"7.5 GiB"` of memory, `"8"` of CPUs."""
    describe = _NUMBERS.get(name, size)
    return describe(amount)
