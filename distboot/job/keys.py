"""Keys: the places where ranks wait for each other.

A key is a call that several ranks make: its name, the node whose ranks make it (None: all), and how
often they have made it. Rank 0's agent receives who arrives, and answers `Release`, `Go` or
`Failed`. There are two kinds of keys:

    for all    `barrier()`, and `init()` where ranks get ready. Over once all ranks are here. What
               each rank offers in `init()` is sent to all, with Go.
    led        `main_first()` and `local_main_first()` have a leader, rank 0 or the first rank of a
               node; parameter servers have rank 0. The others wait until it has left its block.

A key fails

1. when a rank has waited for as long as it allows: all ranks at a key for all fail, since none can
   go on without the others; at a led key only those that give up;
2. when a rank that is missing is *gone*: it ended, closed its context or disconnected. A rank that
   has only closed its context may still get ready again; so at `init()` only ranks that have ended
   are gone;
3. when the block of the leader fails; or, at `init()`, when a rank reports a problem.

Some ranks arrive after a key is over. So for each *place*, a key without its count, the last count
that was released and the failures are kept: a later rank gets the same answer at once. A failure at
a key for all is also the answer at its earlier counts, as no rank waits there any more. Of a leader
whose blocks fail again and again, the last hundred failures are kept, and answer for earlier ones.
Go clears all this: after that the ranks have new contexts, and count from one again.

What always holds: a rank is among those that wait at a key only while it has no answer; it gets one
answer for each arrival; a rank that is gone waits nowhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import cached_property
from math import inf
from operator import attrgetter

from ..base.dataclass import dataclass, field, replace
from ..base.errors import DistbootError
from ..base.text import escape_control, short_repr
from ..rendezvous.membership import Membership
from ..rendezvous.messages import (
    READY,
    SERVE,
    Answer,
    Arrive,
    Failed,
    Go,
    Key,
    Offer,
    Ready,
    Release,
    as_error,
    as_problem,
)
from ..rendezvous.protocol import ProtocolError
from .effects import Record, Say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.join_table import JoinTable
    from .key_texts import KeyTexts

# Seconds until a line about the missing ranks, and until the second one, which doubles
_LINES = (10.0, 10.0)
_LINES_AT = {
    # The import of a framework takes seconds
    READY: (15.0, 15.0),
    # They are to wait until the training ends.
    SERVE: (inf, inf),
}
_MOST_BETWEEN = 300.0
GONE = "ended, or closed its context"
_MOST = 1000  # keys at which ranks wait at the same time, beside one of each node
_MOST_FAILURES = 100  # that are kept of one place


@dataclass(slots=True)
class _Waiting:
    """The ranks at a key."""

    next_line: float  # when a line about the missing ranks is due
    between: float  # seconds from one line to the next
    ends: dict[int, float] = field(default_factory=dict)  # when each of them gives up
    limits: dict[int, float] = field(default_factory=dict)  # after how many seconds
    timed_out: dict[int, float] = field(default_factory=dict)  # those that have, with their limits

    def add(self, rank: int, limit: float, now: float) -> None:
        self.ends[rank] = now + limit
        self.limits[rank] = limit

    def overdue(self, now: float) -> dict[int, float]:
        """The ranks that give up now, with their limits."""
        found = {}
        for rank, end in self.ends.items():
            if now >= end:
                found[rank] = self.limits[rank]
        return found

    def take_line(self, now: float) -> bool:
        """Whether a line is due; the next one is later."""
        if not self.ends or now < self.next_line:
            return False
        self.next_line = now + self.between
        self.between = min(self.between * 2, _MOST_BETWEEN)
        return True


class _Failures:
    """The failures at a place."""

    def __init__(self) -> None:
        self._errors: dict[int, DistbootError] = {}  # by count
        # Up to this count, the first of these errors is the answer: also for a block that ended well,
        # as none that failed is to be run
        self._same_until = 0

    def add(self, key: Key, error: DistbootError) -> None:
        if key.is_for_all:
            self._errors.clear()
            self._same_until = key.count
        self._errors[key.count] = error
        if len(self._errors) > _MOST_FAILURES:
            oldest = min(self._errors)
            del self._errors[oldest]
            self._same_until = oldest

    def at(self, key: Key) -> DistbootError | None:
        if key.count <= self._same_until:
            first = min(self._errors)
            return self._errors[first]
        return self._errors.get(key.count)


class Keys:
    """All keys of a job."""

    def __init__(self, membership: Membership, table: JoinTable) -> None:
        # What is to be sent to which rank, or to all
        self.outbox: list[tuple[int | None, Answer]] = []
        self.effects: list[Say | Record] = []
        self.has_begun = False  # whether all ranks have once been ready
        self.held = ""  # the name of keys that wait for the check of all nodes
        # Since when the agents of ranks do not answer; others wait for them all the same
        self.unreachable: dict[int, float] = {}
        self._membership = membership
        self._table = table
        self._node_of = membership.node_of()
        self._waiting: dict[Key, _Waiting] = {}
        # By place: the last count at which the leader has left its block
        self._released: dict[tuple[str, int | None], int] = {}
        self._failed: dict[tuple[str, int | None], _Failures] = defaultdict(_Failures)
        self._ready: dict[int, Ready] = {}
        # The first of these ranks that names its framework, and that
        self._framework: tuple[int, str] = (0, "")
        self._gone: dict[int, str] = {}  # ranks that will be at no key any more, and why
        self._ended: set[int] = set()  # of these, those that do not get ready again, either

    @property
    def unready(self) -> list[int]:
        if not self._ready and self.has_begun:
            return []
        count = self._latest_count()
        ready = set()
        for rank, message in self._ready.items():
            if message.count == count:
                ready.add(rank)
        return sorted(self._node_of.keys() - ready)

    def due(self) -> list[float]:
        """When `expire` has something to do."""
        found: list[float] = []
        for one in self._waiting.values():
            if one.ends:
                first_end = min(one.ends.values())
                found += (one.next_line, first_end)
        return found

    def leave(self, rank: int, *, has_ended: bool = True, why: str = GONE) -> None:
        """A rank is gone; `why` reads well after "rank 3"."""
        self._gone.setdefault(rank, why)
        if has_ended:
            self._ended.add(rank)
            self._ready.pop(rank, None)
        for one in self._waiting.values():
            one.ends.pop(rank, None)
        self._settle_all()

    def expire(self, now: float) -> None:
        """Report which ranks are missing, and fail those that have waited as long as they allow."""
        for key, one in list(self._waiting.items()):
            overdue = one.overdue(now)
            if overdue:
                self._time_out(key, one, overdue, now)
            elif one.take_line(now):
                left = max(one.ends.values()) - now
                progress = self._progress(key, left)
                self.effects.append(Say(progress, event="waiting"))

    def let_start(self) -> None:
        """The check of all nodes is over: ranks that are ready go on."""
        self.held = ""
        self._settle_all()

    def fail_start(self, error: DistbootError) -> None:
        """No rank is to start, those that get ready later included."""
        self._fail_to_begin(error, Key(READY, None, 1))

    # Arriving

    def arrive(self, rank: int, message: Arrive, now: float) -> None:
        """A rank has arrived; `ProtocolError`: it may not wait or lead there."""
        key = message.key
        is_own = key.node in (None, self._node_of[rank])
        may_wait = is_own and key.name != READY
        if not may_wait:
            raise ProtocolError(f"waits at a key that is not its own: {key.text}")
        if message.leads:
            self._lead(rank, key, message.failure)
        else:
            self._wait(rank, key, message.limit, now)

    def _wait(self, rank: int, key: Key, limit: float, now: float) -> None:
        if self._answer([rank], key):
            return
        if key not in self._waiting:
            if len(self._waiting) >= _MOST + len(self._membership.nodes):
                raise ProtocolError("waits at too many keys at once")
            first, between = _LINES_AT.get(key.name, _LINES)
            self._waiting[key] = _Waiting(now + first, between)
        one = self._waiting[key]
        one.add(rank, limit, now)
        self._settle(key)

    def _lead(self, rank: int, key: Key, failure: str | None) -> None:
        if rank != self._leader(key):
            raise ProtocolError(f"leads at a key that is not its own: {key.text}")
        self._released[key.place] = key.count
        if failure is not None:
            why = escape_control(failure)
            error = self._texts.leader_failed(key, why)
            self._failed[key.place].add(key, error)
        one = self._waiting.pop(key, None)
        timed_out: dict[int, float] = {}
        if one is not None:
            self._answer(one.ends, key)
            timed_out = one.timed_out
        if timed_out:
            error = self._texts.not_waited_for_leader(key, timed_out)
            self._fail([rank], error, key)
        else:
            self._send([rank], Release(key))

    def _answer(self, ranks: Iterable[int], key: Key) -> bool:
        """Answer ranks if the outcome of a key is known; return whether it is."""
        error = self._failed[key.place].at(key)
        if error is not None:
            self._fail(ranks, error, key)
            return True
        released = self._released.get(key.place, 0)
        if released >= key.count:
            self._send(ranks, Release(key))
            return True
        return False

    # Outcomes

    def _settle_all(self) -> None:
        for key in list(self._waiting):
            if key in self._waiting:  # it may have ended with another one
                self._settle(key)

    def _settle(self, key: Key) -> None:
        """Answer the ranks at a key, if its outcome has become clear."""
        one = self._waiting[key]
        here = one.ends.keys()
        is_complete = len(here) == len(self._node_of)
        gone: AbstractSet[int] = self._gone.keys()
        if key.name == READY:
            gone = self._ended
        if not key.is_for_all:
            leader = self._leader(key)
            if leader in gone:
                error = self._texts.leader_gone(key, self._gone[leader])
                self._fail(one.ends, error, key)
                del self._waiting[key]
        elif is_complete:
            if key.name != self.held:
                self._complete(key)
        elif here and not gone <= here:
            self._abort(key, 0.0, 0.0)

    def _complete(self, key: Key) -> None:
        """All ranks are at a key for all."""
        ranks = self._waiting.pop(key).ends
        if key.name == READY:
            self.outbox.append((None, self._begin()))
        else:
            self._send(ranks, Release(key))

    def _time_out(self, key: Key, one: _Waiting, overdue: dict[int, float], now: float) -> None:
        limit = min(overdue.values())
        if key.is_for_all:
            self._abort(key, limit, now)
            return
        error = self._texts.not_opened(key, limit, now)
        self._fail(overdue, error, key)
        one.timed_out.update(overdue)

    def _abort(self, key: Key, limit: float, now: float) -> None:
        """A key for all fails for good; limit 0: since a rank is gone."""
        if key.name == READY:
            self._fail_to_begin(self._not_ready(now), key)
            return
        here = self._waiting.pop(key).ends
        missing = self._node_of.keys() - here.keys()
        gone = missing & self._gone.keys()
        if gone:
            why = self._gone[min(gone)]
            error = self._texts.ranks_gone(key, gone, why)
            error_for_later = error
        else:
            error = self._texts.ranks_missing(key, missing, limit, now)
            error_for_later = self._texts.not_waited_for(key, here, limit)
        self._failed[key.place].add(key, error_for_later)
        self._fail(here, error, key)

    def _send(self, ranks: Iterable[int], answer: Answer) -> None:
        for rank in ranks:
            self.outbox.append((rank, answer))

    def _fail(self, ranks: Iterable[int], error: DistbootError, key: Key) -> None:
        failed = Failed(as_problem(error), key)
        ranks = list(ranks)
        self._send(ranks, failed)
        one = self._waiting.get(key)
        if one is not None:
            for rank in ranks:
                one.ends.pop(rank, None)

    # Getting ready

    def get_ready(self, rank: int, message: Ready, now: float) -> None:
        """A rank is ready to start its framework, or not."""
        self._gone.pop(rank, None)
        key = message.key
        if self._answer([rank], key):
            return
        try:
            self._enter(rank, message)
        except DistbootError as error:
            self._ready.pop(rank, None)
            self._fail_to_begin(error, key)
        else:
            self._wait(rank, key, message.limit, now)

    def _enter(self, rank: int, message: Ready) -> None:
        record = self._table.records[rank]
        if not self._ready:
            self._framework = (0, "")
            self._table.forget_accelerators()
        if message.problem is not None:
            whose = f"rank {rank} on {short_repr(record.host)}"
            raise as_error(message.problem, whose)
        self._table.claim_device(record, message.device)
        self._ready[rank] = message
        other, framework = self._framework
        if not framework:
            self._framework = (rank, message.framework)
        elif message.framework not in ("", framework):
            raise self._texts.two_frameworks(rank, message.framework, other, framework)

    def _begin(self) -> Go:
        """All ranks are ready."""
        self.has_begun = True
        offers = []
        for rank, message in sorted(self._ready.items()):
            if message.offer is not None:
                offer = Offer(rank, message.offer)
                offers.append(offer)
        self._ready.clear()
        # These are of contexts that all ranks have left.
        self._released.clear()
        self._failed.clear()
        return Go(tuple(offers))

    def _fail_to_begin(self, error: DistbootError, key: Key) -> None:
        """Answer all ranks, also those that are not ready yet: this process may end before."""
        # It is clear that they never will be ready
        self.effects.append(Record("not_ready", None, {"ranks": self.unready}))
        count = max(key.count, self._latest_count())
        key = replace(key, count=count)
        self._failed[key.place].add(key, error)
        self._fail(sorted(self._node_of), error, key)
        self._waiting.pop(key, None)
        self._ready.clear()

    def _not_ready(self, now: float) -> DistbootError:
        unready = self.unready
        ended = sorted(self._ended.intersection(unready))
        if ended:
            first = ended[0]
            record = self._table.records[first]
            return self._texts.ended_unready(record)
        return self._texts.not_ready(unready, now)

    def _latest_count(self) -> int:
        counts = map(attrgetter("count"), self._ready.values())
        return max(counts, default=0)

    # Texts

    @cached_property
    def _texts(self) -> KeyTexts:
        from .key_texts import KeyTexts  # here, as most ranks arrive in time

        return KeyTexts(self._membership, self.unreachable)

    def _progress(self, key: Key, left: float) -> str:
        if key.name == READY:
            return self._texts.starting(self.unready, left)
        here = self._waiting[key].ends
        return self._texts.progress(key, here, left)

    def _leader(self, key: Key) -> int:
        return self._membership.leader(key.node)
