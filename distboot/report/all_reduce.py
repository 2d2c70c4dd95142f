"""What `python -m distboot check --allreduce` has measured, as the report has it. Pure.

A rate is the bus bandwidth as NVIDIA's nccl-tests count it, in bytes a second: the bytes of the
array, divided by the time, times 2 (n - 1) / n for n ranks. So it can be compared with what a link
can do, whatever n is. A pair of nodes is odd if its rate is less than half the median of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.text import escape_control
from ..base.units import byte_rate
from ..rendezvous.events import Event
from .job_state import of_kinds

_LESS = 2.0
_LEAST_PAIRS = 3  # of two it is not known which one is odd


def all_reduce_of(events: Iterable[Event], hosts: Sequence[str]) -> dict[str, Any] | None:
    """The table of sizes and the pairs of nodes, the slowest first; None: nothing was measured."""
    found = None
    for one in of_kinds(events, "allreduce"):
        found = _report(one.details, hosts)
    return found


def bus_rate(size: float, seconds: float, ranks: int) -> float:
    """The bus bandwidth of an all-reduce of `size` bytes."""
    return size / seconds * 2 * (ranks - 1) / ranks


def _report(details: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, Any]:
    ranks = details["ranks"]
    sizes = []
    for size, seconds in details["sizes"]:
        row = {
            "bytes": int(size),
            "seconds": seconds,
            "rate": bus_rate(size, seconds, ranks),
        }
        sizes.append(row)
    pairs = []
    for first, second, rate in sorted(details["pairs"], key=_rate):
        names = [hosts[int(first)], hosts[int(second)]]
        pairs.append({"hosts": names, "rate": rate})
    return {
        "backend": details["backend"],
        "ranks": ranks,
        "sizes": sizes,
        "pairs": pairs,
        "median": details["median"],
        "findings": _findings(pairs, details["median"]),
    }


def _rate(pair: Sequence[float]) -> float:
    return pair[2]


def _findings(pairs: Sequence[Mapping[str, Any]], median: float) -> list[str]:
    if len(pairs) < _LEAST_PAIRS:
        return []
    found = []
    for pair in pairs:
        if pair["rate"] * _LESS < median:
            names = " and ".join(map(escape_control, pair["hosts"]))
            usual = byte_rate(median)
            found.append(f"{names}: {byte_rate(pair['rate'])}, median of all pairs {usual}")
    return found
