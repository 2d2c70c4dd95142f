"""Ranks of a node that their launcher has bound to the same CPUs. Pure.

They are slowed down, and nothing else shows why.

| CPUs of two ranks of a node              | are odd |
|------------------------------------------|---------|
| the same, and at least one for each rank | no: a launcher has bound them to a NUMA node, or a socket |
| the same, and fewer                      | yes     |
| others, of which both have some          | yes     |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..base.text import counted, listed_cpus, ranks_said, written_cpus
from .membership import Membership
from .messages import WorkerInfo

_MOST_NODES = 3


class _Shared(NamedTuple):
    """Ranks of one node that share CPUs."""

    ranks: list[int]
    how: str


def shared_cpus(records: Sequence[WorkerInfo], membership: Membership, remedy: str) -> list[str]:
    """Lines like `"ranks 0-3 (node 0): all bound to the same 1 CPU (0): mpirun --bind-to none"`.

    Args:
        records: in the order of ranks.
        membership: of the job.
        remedy: how the launcher is told not to bind.
    """
    found = []
    for number, node in enumerate(membership.nodes):
        of_node = [records[rank] for rank in sorted(node)]
        shared = _shared_on_node(of_node)
        if shared is not None:
            ranks = ranks_said(shared.ranks)
            found.append(f"{ranks} (node {number}): {shared.how}: {remedy}")
    more = len(found) - _MOST_NODES
    if more > 0:
        found[_MOST_NODES:] = [f"bound to the same CPUs: ranks of {counted(more, 'more node')}"]
    return found


def _shared_on_node(records: Sequence[WorkerInfo]) -> _Shared | None:
    """The first ranks that share CPUs."""
    ranks_by_cpus: defaultdict[str, list[int]] = defaultdict(list)
    for record in records:
        ranks_by_cpus[record.cpus].append(record.rank)
    ranks_by_cpus.pop("", None)  # these are not bound
    owners: dict[int, list[int]] = {}  # by CPU, the ranks that are bound to it
    for listed, ranks in ranks_by_cpus.items():
        cpus = listed_cpus(listed)
        if len(cpus) < len(ranks):
            many = counted(len(cpus), "CPU")
            return _Shared(ranks, f"all bound to the same {many} ({listed})")
        both = owners.keys() & cpus
        if both:
            first = min(both)
            of_both = sorted([*owners[first], *ranks])
            return _Shared(of_both, f"bound to CPUs that overlap ({written_cpus(both)})")
        owners.update(dict.fromkeys(cpus, ranks))
    return None
