"""Measure all-reduce: of all ranks by size, and of pairs of nodes. All ranks call it together.

The pairs are those of a round-robin tournament: in each round every node works with another one, all
pairs at the same time. A node that is slow shows in all of its pairs, a link in one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..agent.link_messages import MOST_PAIRS, Measured
from ..context import Context
from ..rendezvous.membership import Membership
from ..report.all_reduce import bus_rate

_KIB = 1 << 10
_SIZES = tuple(_KIB << power for power in (2, 6, 10, 14, 18))  # 4 KiB to 256 MiB
_STEP = 16  # from one size to the next
_FLOAT = 4  # bytes
_SAMPLE = 0.2  # seconds for one size
_LONGEST = 2.0  # seconds for one operation: a size that would take longer is left out
_MOST_TIMES = 100
_PAIRS_TAKE = 0.05  # seconds for one operation of a pair, at most
_PASSES = 2  # the better one counts: a node may be busy for a moment
_MOST_ROUNDS = 15  # of pairs
Pair = tuple[int, int]  # of nodes


class _Group(NamedTuple):
    """Ranks that reduce together."""

    context: Context
    torch: Any
    group: Any = None  # None: all ranks

    def seconds(self, size: int, times: int) -> float:
        """Of one all-reduce of `size` bytes, of its slowest rank."""
        data = self.torch.zeros(size // _FLOAT, device=self.context.device)
        self._reduce(data)  # the first one also connects
        self._wait()
        start = time.perf_counter()
        for _ in range(times):
            self._reduce(data)
        self._wait()
        return self._most((time.perf_counter() - start) / times)

    def _reduce(self, data: Any) -> None:
        self.torch.distributed.all_reduce(data, group=self.group)

    def _wait(self) -> None:
        """Until the device has done all of that; the CPU has."""
        device = self.context.device
        if device.type != "cpu":
            getattr(self.torch, device.type).synchronize(device)

    def _most(self, value: float) -> float:
        distributed = self.torch.distributed
        found = self.torch.tensor([value], device=self.context.device)
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=self.group)
        return float(found.item())


def measured(context: Context, membership: Membership) -> Measured:
    """What all ranks have measured; the same on all, as far as rank 0 needs it."""
    import torch

    every = _Group(context, torch)
    sizes = list(_by_size(every))
    fitting = [size for size, seconds in sizes if seconds <= _PAIRS_TAKE]
    size = max(fitting, default=_SIZES[0])
    rates = _rates(every, membership.nodes, size)
    slowest = sorted(rates.items(), key=lambda pair: pair[1])[:MOST_PAIRS]
    return Measured(
        torch.distributed.get_backend(),
        tuple(sizes),
        tuple((first, second, rate) for (first, second), rate in slowest),
        median(rates.values()) if rates else 0.0,
    )


def rounds_of_pairs(nodes: int, most: int = _MOST_ROUNDS) -> list[list[Pair]]:
    """The rounds of a tournament: in each a node is in one pair, or in none where they are odd.

    The circle method: the first place stays, all others move on by one in each round.
    """
    places: list[int | None] = [*range(nodes)]
    if nodes % 2:
        places.append(None)
    rounds = []
    for _ in range(min(len(places) - 1, most)):
        pairs = []
        for first, second in zip(places, reversed(places[len(places) // 2 :]), strict=False):
            if first is not None and second is not None:
                pairs.append((min(first, second), max(first, second)))
        rounds.append(sorted(pairs))
        places.insert(1, places.pop())
    return rounds


def _by_size(every: _Group) -> Iterator[tuple[int, float]]:
    """Sizes in bytes, with the seconds for one operation: the same numbers on all ranks."""
    for size in _SIZES:
        once = every.seconds(size, 1)
        times = int(_SAMPLE / once)
        seconds = every.seconds(size, min(max(times, 1), _MOST_TIMES))
        yield size, seconds
        if seconds * _STEP > _LONGEST:
            return


def _rates(every: _Group, nodes: Sequence[Sequence[int]], size: int) -> dict[Pair, float]:
    """The bus bandwidth of each pair of nodes, on all ranks."""
    rounds = rounds_of_pairs(len(nodes))
    own = every.context.node_rank
    groups = []
    for pairs in rounds:
        group = _own_group(every, own, pairs, nodes)
        groups.append(group)
    best = every.torch.zeros(len(rounds) or 1, dtype=every.torch.float32)
    for _ in range(_PASSES):
        for number, group in enumerate(groups):
            every.seconds(_FLOAT, 1)  # all pairs of a round at the same time
            if group is not None:
                best[number] = max(float(best[number]), 1 / _pair_seconds(group, size))
    speeds = _gathered(every, best)
    found = {}
    for number, pairs in enumerate(rounds):
        for first, second in pairs:
            ranks = len(nodes[first]) + len(nodes[second])
            per_second = float(speeds[nodes[first][0]][number])
            found[first, second] = bus_rate(size, 1 / per_second, ranks)
    return found


def _pair_seconds(group: _Group, size: int) -> float:
    once = group.seconds(size, 1)
    times = int(_SAMPLE / once)
    return group.seconds(size, min(max(times, 1), _MOST_TIMES))


def _own_group(
    every: _Group,
    own: int,
    pairs: Iterable[Pair],
    nodes: Sequence[Sequence[int]],
) -> _Group | None:
    """The ranks of the two nodes of this rank's pair; None: this node has none in this round.

    A node without a pair makes a group of its own: torch names a group after its ranks and the
    number of groups that its rank has made so far, so that has to be the same on all ranks.
    """
    partners: tuple[int, ...] = (own,)
    for pair in pairs:
        if own in pair:
            partners = pair
    ranks = sorted(rank for node in partners for rank in nodes[node])
    group = every.torch.distributed.new_group(ranks, use_local_synchronization=True)
    if len(partners) == 1:
        return None
    return every._replace(group=group)


def _gathered(every: _Group, own: Any) -> list[Any]:
    """The numbers of all ranks."""
    own = own.to(every.context.device)
    found = [every.torch.zeros_like(own) for _ in range(every.context.world_size)]
    every.torch.distributed.all_gather(found, own)
    return found
