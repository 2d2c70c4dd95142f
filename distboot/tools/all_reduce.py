"""Measure all-reduce: of all ranks by size, and of pairs of nodes. All ranks call it together.

Pairs of nodes reduce in rounds (`tools/tournament`), all pairs of a round at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from ..agent.link_messages import MOST_PAIRS, Measured
from ..context import Context
from ..rendezvous.membership import Membership
from ..report.all_reduce import bus_rate
from .tournament import Pair, rounds_of_pairs

_KIB = 1 << 10
_SIZES = tuple(_KIB << power for power in (2, 6, 10, 14, 18))  # 4 KiB to 256 MiB
_STEP = 16  # from one size to the next
_FLOAT = 4  # bytes
_SAMPLE = 0.2  # seconds for one size
_LONGEST = 2.0  # seconds for one operation: a size that would take longer is left out
_MOST_TIMES = 100
TIMEOUT = 120.0  # seconds for one operation to end at all
_PAIRS_TAKE = 0.05  # seconds for one operation of a pair, at most
_rate = itemgetter(2)  # of a pair
_PASSES = 2  # the better one counts: a node may be busy for a moment


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

    def steady_seconds(self, size: int) -> float:
        """The same, of as many as a sample has time for."""
        once = self.seconds(size, 1)
        times = int(_SAMPLE / once)
        return self.seconds(size, min(max(times, 1), _MOST_TIMES))

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
    size = _SIZES[0]
    for larger, seconds in sizes:
        if seconds <= _PAIRS_TAKE:
            size = larger
    pairs = _rates(every, membership.nodes, size)
    pairs.sort(key=_rate)
    usual = 0.0
    if pairs:
        usual = median(map(_rate, pairs))
    return Measured(
        torch.distributed.get_backend(),
        tuple(sizes),
        tuple(pairs[:MOST_PAIRS]),
        usual,
    )


def _by_size(every: _Group) -> Iterator[tuple[int, float]]:
    """Sizes in bytes, with the seconds for one operation: the same numbers on all ranks."""
    for size in _SIZES:
        seconds = every.steady_seconds(size)
        yield size, seconds
        if seconds * _STEP > _LONGEST:
            return


def _rates(
    every: _Group,
    nodes: Sequence[Sequence[int]],
    size: int,
) -> list[tuple[int, int, float]]:
    """Pairs of nodes with their bus bandwidth, on all ranks."""
    rounds = rounds_of_pairs(len(nodes))
    own = every.context.node_rank
    groups = [_own_group(every, own, pairs, nodes) for pairs in rounds]
    best = every.torch.zeros(len(rounds) or 1, dtype=every.torch.float32)
    for _ in range(_PASSES):
        for number, group in enumerate(groups):
            every.seconds(_FLOAT, 1)  # all pairs of a round at the same time
            if group is not None:
                per_second = 1 / group.steady_seconds(size)
                best[number] = max(float(best[number]), per_second)
    speeds = _gathered(every, best)
    found = []
    for number, pairs in enumerate(rounds):
        for first, second in pairs:
            ranks = len(nodes[first]) + len(nodes[second])
            per_second = float(speeds[nodes[first][0]][number])
            rate = bus_rate(size, 1 / per_second, ranks)
            found.append((first, second, rate))
    return found


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
    group = every.torch.distributed.new_group(
        ranks,
        timeout=timedelta(seconds=TIMEOUT),
        use_local_synchronization=True,
    )
    if len(partners) == 1:
        return None
    return every._replace(group=group)


def _gathered(every: _Group, own: Any) -> list[Any]:
    """The numbers of all ranks."""
    own = own.to(every.context.device)
    found = [every.torch.zeros_like(own) for _ in range(every.context.world_size)]
    every.torch.distributed.all_gather(found, own)
    return found
