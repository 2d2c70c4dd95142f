"""Which ranks hold up a job, judged by how far all ranks are. Pure.

A `Position` is how far one rank is: how many collective operations it has begun in each process
group, for how many seconds none of these numbers has grown, and its stack. Four rules apply, in
this order; the first that finds something decides:

1. *Numbers.* All ranks of a process group begin the same operations in the same order. The ranks
   with the highest number wait, once they have not moved for long enough; those with a lower
   number are late. A rank that is late in one group may wait in another group. So only ranks that
   wait in no group are named. If there are none, the ranks wait for each other.
2. *Held.* All ranks that can move have not, and wait or use no processor: those that are stopped,
   or in the kernel, are late.
3. *Stacks.* Without such numbers, a rank waits if its stack is in a function that waits for other
   processes. So does one that has begun, by its number, the operation in which others wait: in
   `backward()` of DistributedDataParallel, for example. All other ranks are late, provided that
   each of them has a known stack elsewhere.
4. *Idle.* No rank moves, and none uses a processor: all ranks are late, and none waits.

A rank that waits may use a processor all the time. Without numbers it then seems to move, and only
its stack shows that it does not: it is the same at two looks some seconds apart. Such ranks are
called *still* here.

A rank whose script is over counts as late only if no other one is: it waits in `MPI_Finalize`, most
likely.

A rank that the kernel has stopped (`Position.is_held`) never counts as waiting: others wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from .messages import Position
from .stacks import may_compute

Positions: TypeAlias = Mapping[int, Position]  # by rank


class Late(NamedTuple):
    """What holds up a job."""

    # The late ranks; empty: all wait for each other
    ranks: list[int]
    # The ranks that wait for these, or for each other; empty: no rank does anything
    waiting: list[int]
    # The process group whose numbers prove it; empty: only the stacks do
    group: str = ""

    @property
    def witnesses(self) -> list[int]:
        """The ranks that move when the wait is over."""
        if self.waiting:
            return self.waiting
        return self.ranks


class _Look:
    """All ranks at one look, as sets by what is known of each."""

    def __init__(self, positions: Positions, before: Positions, least: float) -> None:
        self._positions = positions
        self.all = set(positions)
        self.counted = self.where(lambda one: one.is_counted)
        self.held = self.where(lambda one: one.is_held)
        self.located = self.where(lambda one: one.stacks is not None)
        self.with_frames = self.where(lambda one: one.has_frames)
        self.in_wait = self.where(lambda one: one.is_in_wait)
        self.in_operation = self.where(lambda one: one.is_in_operation)
        # With the numbers of the lowest rank
        lowest = positions[min(positions)]
        self.alike = self.where(lambda one: one.counts == lowest.counts)
        # For at least `least` seconds
        self.unmoved = self.where(lambda one: one.since >= least)
        self.idle = self.where(lambda one: one.idle >= least)
        self.has_waited = self.in_wait & self.unmoved
        self.still = self._still(before)
        self.counts: dict[str, dict[int, int]] = defaultdict(dict)  # by group and rank
        for rank, position in positions.items():
            for group, count in position.counts.items():
                self.counts[group][rank] = count

    def where(self, holds: Callable[[Position], bool]) -> set[int]:
        positions = self._positions
        return set(filter(lambda rank: holds(positions[rank]), positions))

    def _still(self, before: Positions) -> set[int]:
        """The ranks without numbers whose stack has not changed since the look before."""
        found = set()
        for rank in (self.located - self.counted).intersection(before):
            position = self._positions[rank]
            earlier = before[rank]
            if (earlier.stacks, earlier.keys) == (position.stacks, position.keys):
                found.add(rank)
        return found


def find_late(positions: Positions, before: Positions, least: float) -> Late | None:
    """Which ranks are late, if others have waited for `least` seconds; None: not known, or none.

    `positions` has all ranks that have answered; `before` has their positions some seconds earlier.
    """
    late = _judge(positions, before, least)
    staying = dict(filter(_stays, positions.items()))
    if len(staying) == len(positions):
        return late
    without = _judge(staying, before, least)
    names_both = without is not None and all(without[:2])
    if names_both:
        return without
    return late


def _stays(rank_and_position: tuple[int, Position]) -> bool:
    _, position = rank_and_position
    return not position.has_left


def _judge(positions: Positions, before: Positions, least: float) -> Late | None:
    """The first thing that one of the rules finds."""
    if len(positions) < 2:
        return None
    look = _Look(positions, before, least)
    rules = (_by_numbers, _held, _by_stacks, _all_idle)
    found = (rule(look) for rule in rules)
    return next(filter(None, found), None)


def may_be_late(positions: Positions, least: float) -> bool:
    """Whether to read the stacks, which slows the scripts down a little."""
    if len(positions) < 2:
        return False
    look = _Look(positions, {}, least)
    late = _by_numbers(look)
    return late is not None or look.counted <= look.unmoved


def _by_numbers(look: _Look) -> Late | None:
    found: list[Late] = []
    waiting: set[int] = set()
    victims: set[int] = set()  # late in one group, as they wait in another one
    for group in sorted(look.counts):
        late = _late_in(group, look)
        if late is not None:
            found.append(late)
            waiting.update(late.waiting)
            victims.update(look.has_waited.intersection(late.ranks))
    for late in found:
        ranks = sorted(set(late.ranks) - waiting - victims)
        if ranks:
            held_up = victims.intersection(late.ranks).union(late.waiting)
            return Late(ranks, sorted(held_up), late.group)
    if not found:
        return None
    return Late([], sorted(waiting | victims))


def _late_in(group: str, look: _Look) -> Late | None:
    """The late ranks of one process group, by its numbers alone."""
    counts = look.counts[group]
    by_count: dict[int, set[int]] = defaultdict(set)
    for rank in counts.keys() - look.held:
        by_count[counts[rank]].add(rank)
    first = by_count[max(by_count, default=0)]
    late = counts.keys() - first
    waiting = first & look.unmoved
    if not late or not waiting:
        return None
    return Late(sorted(late), sorted(waiting), group)


def _in_one_operation(look: _Look) -> set[int]:
    """All ranks, if all have begun the same one, by their numbers, and some wait in it; or none."""
    waits = look.in_operation & look.counted
    waits_elsewhere = look.in_wait - waits
    if waits_elsewhere or not waits:
        return set()
    have_same_numbers = look.alike == look.all
    if not have_same_numbers or not look.counts:
        return set()
    return look.all


def _held(look: _Look) -> Late | None:
    """The ranks that cannot go on, if no other rank moves."""
    others = look.all - look.held
    stuck = look.counted & look.unmoved & others
    may_move = others - stuck
    may_compute = stuck - look.idle - look.in_wait
    if not look.held or not stuck:
        return None
    may_go_on = may_move | may_compute
    if may_go_on:
        return None
    late = sorted(look.held)
    waiting = sorted(stuck)
    return Late(late, waiting)


def _by_stacks(look: _Look) -> Late | None:
    in_operation = _in_one_operation(look)
    waiting = look.has_waited | (look.in_wait & look.still) | (in_operation & look.unmoved)
    others = look.all - waiting
    # These have just begun to wait, or are at an unknown place: the job may be in order.
    unknown = look.all - look.located
    unclear = others & (look.in_wait | unknown | in_operation)
    if not others:
        # A function that waits may also compute.
        busy = look.in_wait - look.idle
        unclear = busy & look.where(lambda one: may_compute(one.stacks))
    if unclear or not waiting:
        return None
    late = sorted(others)
    return Late(late, sorted(waiting))


def _all_idle(look: _Look) -> Late | None:
    """All ranks, if none of them moves or uses a processor."""
    certain = look.counted | look.still
    idle = look.with_frames & look.unmoved & look.idle & certain
    if idle != look.all:
        return None
    late = sorted(idle)
    return Late(late, [])
