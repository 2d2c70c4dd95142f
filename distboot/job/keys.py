"""Keys: where ranks wait for each other. Pure; rank 0's agent asks it, and sends what is in `outbox`.

`barrier()` is over when all ranks have come. `main_first()` and `local_main_first()` have a leader, rank 0 or the first
rank of a node, for whom the others wait, as parameter servers do until it ends. In `init()` each rank gets ready and
publishes what the others need to know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from ..base.errors import DistbootError
from ..base.text import (
    escape_control,
    ranks_said,
    short_repr,
    with_nodes,
)
from ..rendezvous.membership import JoinTable, Membership
from ..rendezvous.messages import (
    BARRIER,
    READY,
    SERVE,
    Arrive,
    Failed,
    Go,
    Key,
    Leave,
    Offer,
    Ready,
    Release,
    as_error,
    as_problem,
)
from ..rendezvous.protocol import ProtocolError

# Seconds; one rank may well be slower than another for a moment
_FIRST_LINE, _MOST_BETWEEN = 10.0, 300.0
# The import of a framework takes seconds where all is well; never where no rank is late.
_LINES = {READY: (15.0, 15.0), SERVE: (inf, inf)}
_NETWORK = "look for what cuts the connection to that host: a firewall, or the network"
_ENDED = "ended, or closed its context"
_MOST = 1000  # keys at which ranks wait at the same time


@dataclass(slots=True)
class _Waiting:
    """Ranks at a key: when each one gives up, and after how many seconds; and those that have given up."""

    next_line: float
    between: float
    ends: dict[int, float] = field(default_factory=dict)
    limits: dict[int, float] = field(default_factory=dict)
    timed_out: dict[int, float] = field(default_factory=dict)


class Keys:
    """All keys of a job."""

    def __init__(self, membership: Membership, table: JoinTable, say: Callable[..., None]) -> None:
        self.outbox: list[tuple[int, object]] = []  # what is to be sent to which rank
        self.has_begun = False  # whether all ranks have once been ready
        # The ranks that are not, when it is clear that they never will be
        self.not_ready: list[int] | None = None
        self._membership, self._table, self._say = membership, table, say
        self._node_of = membership.node_of()
        self._waiting: dict[Key, _Waiting] = {}
        # By place, for late ranks: how often a leader has been through; at which count all have failed last, and why.
        self._released: dict[tuple[str, int | None], int] = {}
        self._failed: dict[tuple[str, int | None], tuple[int, DistbootError]] = {}
        self._ready: dict[int, Ready] = {}
        # The first of these ranks that names one, which is to be that of all
        self._framework = 0, ""
        # Ranks whose agents give no sign for now, and since when: they are waited for as all others
        self.unreachable: dict[int, float] = {}
        self._gone: dict[int, str] = {}  # ranks that come to no key any more, and why
        self._ended: set[int] = set()  # of these, those that do not get ready again, either

    @property
    def unready(self) -> list[int]:
        if self.has_begun and not self._ready:
            return []
        latest = max((one.count for one in self._ready.values()), default=0)
        return sorted(
            self._node_of.keys()
            - {rank for rank, one in self._ready.items() if one.count == latest}
        )

    def due(self) -> list[float]:
        """When `expire` has something to do."""
        return [
            min(one.next_line, *one.ends.values()) for one in self._waiting.values() if one.ends
        ]

    def take(self, rank: int, message: Arrive | Ready | Leave, now: float) -> None:
        """What a rank says; `ProtocolError`: it may not wait there, or not lead."""
        if isinstance(message, Arrive):
            self._arrive(rank, message, now)
        elif isinstance(message, Ready):
            self._get_ready(rank, message, now)
        else:
            self.leave(rank, has_ended=False)

    def leave(self, rank: int, *, has_ended: bool = True, why: str = _ENDED) -> None:
        """A rank has closed its context, has ended, or is not connected any more; `why` reads well after "rank 3"."""
        self._gone.setdefault(rank, why)
        if has_ended:
            self._ended.add(rank)
            self._ready.pop(rank, None)
        for one in self._waiting.values():
            one.ends.pop(rank, None)
        for key in list(self._waiting):
            if key in self._waiting:  # else it was that of another one
                self._settle(key)

    def expire(self, now: float) -> None:
        """Say which ranks are waited for, and fail those that have waited for as long as they would."""
        for key, one in list(self._waiting.items()):
            late = {rank: one.limits[rank] for rank, end in one.ends.items() if now >= end}
            if late and key.is_for_all:
                self._abort(key, min(late.values()), now)
            elif late:
                self._fail(late, self._not_opened(key, min(late.values()), now), key)
                one.timed_out |= late
            elif one.ends and now >= one.next_line:
                one.next_line, one.between = now + one.between, min(one.between * 2, _MOST_BETWEEN)
                left = max(one.ends.values()) - now
                self._say(self._progress(key, left), event="waiting")

    def _arrive(self, rank: int, message: Arrive, now: float) -> None:
        key = message.key
        is_foreign = key.node is not None and self._node_of[rank] != key.node
        if key.name == READY or is_foreign or len(self._waiting) > _MOST:
            raise ProtocolError(f"waits at a key that is not its own: {key.text}")
        if message.leads:
            self._lead(rank, key, message.failure)
        else:
            self._wait(rank, key, message.limit, now)

    def _wait(self, rank: int, key: Key, limit: float, now: float) -> None:
        if self._answer([rank], key):
            return
        first, between = _LINES.get(key.name, (_FIRST_LINE, _FIRST_LINE))
        one = self._waiting.setdefault(key, _Waiting(now + first, between))
        one.ends[rank], one.limits[rank] = now + limit, limit
        self._settle(key)

    def _settle(self, key: Key) -> None:
        """Release or fail the ranks at a key, if it is clear by now what becomes of them."""
        one, gone = self._waiting[key], self._ended if key.name == READY else self._gone.keys()
        if key.is_for_all:
            if len(one.ends) == len(self._node_of):
                answer = self._begin() if key.name == READY else Release(key)
                self.outbox += [(rank, answer) for rank in one.ends]
                del self._waiting[key]
            elif one.ends and not gone <= one.ends.keys():
                self._abort(key, 0.0, 0.0)
        elif self._leader(key) in gone:
            leader = self._leader(key)
            why = f"{self._ranks([leader])} {self._gone[leader]}, without finishing its block"
            self._fail(one.ends, _missing(key, why, "look at its output"), key)

    def _answer(self, ranks: Iterable[int], key: Key) -> bool:
        """Let ranks on, or fail them, if it is clear by now what becomes of this key; whether it is."""
        count, error = self._failed.get(key.place, (0, None))
        if error is not None and (key.count == count or (key.is_for_all and key.count < count)):
            self._fail(ranks, error, key)
        elif self._released.get(key.place, 0) >= key.count:
            self.outbox += [(rank, Release(key)) for rank in ranks]
        else:
            return False
        return True

    def _lead(self, rank: int, key: Key, failure: str | None) -> None:
        if rank != self._leader(key):
            raise ProtocolError(f"leads at a key that is not its own: {key.text}")
        self._released[key.place] = key.count
        if failure is not None:
            error = leader_failed(key, self._leader_text(key), escape_control(failure))
            self._failed[key.place] = key.count, error
        one = self._waiting.pop(key, None)
        if one is not None:
            self._answer(one.ends, key)
        if one is not None and one.timed_out:
            hint = f"give the block more time: {key.name.removesuffix('()')}(timeout=…)"
            self._fail(
                [rank], _not_waited_for(key, one.timed_out, min(one.timed_out.values()), hint), key
            )
        else:
            self.outbox.append((rank, Release(key)))

    def _abort(self, key: Key, limit: float, now: float) -> None:
        """No rank gets past a key any more."""
        if key.name == READY:
            self._fail_to_begin(self._not_ready(now), key)
            return
        one = self._waiting.pop(key)
        missing = self._node_of.keys() - one.ends.keys()
        hint = "look at the output of the missing ranks: they ended early, hang, or never get here"
        gone = missing & self._gone.keys()
        if gone:
            why = f"{self._ranks(gone)} {self._gone[min(gone)]}, without getting here"
            error = too_late = _missing(key, why, hint)
        else:
            came = f"{len(one.ends)} of {len(self._node_of)} ranks arrived"
            absent = self._unreachable_text(missing, now)
            hint = _NETWORK if absent else hint
            who = f"{self._ranks(missing)}{absent}"
            error = _missing(key, f"{came} within {limit:g} s; missing: {who}", hint)
            hint = "look for what kept this rank, or give it more time: init(timeout=…)"
            too_late = _not_waited_for(key, one.ends, limit, hint)
        self._failed[key.place] = key.count, too_late
        self._fail(one.ends, error, key)

    def _fail(self, ranks: Iterable[int], error: DistbootError, key: Key) -> None:
        """These do not get past a key."""
        failed = Failed(as_problem(error), key)
        for rank in list(ranks):
            self.outbox.append((rank, failed))
            if key in self._waiting:
                self._waiting[key].ends.pop(rank, None)

    # Getting ready

    def _get_ready(self, rank: int, message: Ready, now: float) -> None:
        self._gone.pop(rank, None)
        if self._answer([rank], message.key):
            return
        try:
            self._enter(rank, message)
        except DistbootError as error:
            self._ready.pop(rank, None)
            self._fail_to_begin(error, message.key)
        else:
            self._wait(rank, message.key, message.limit, now)

    def _begin(self) -> Go:
        """What all ranks are told that are ready."""
        self.has_begun = True
        offers = [
            Offer(rank, one.offer)
            for rank, one in sorted(self._ready.items())
            if one.offer is not None
        ]
        self._ready.clear()
        for earlier in (self._released, self._failed):  # of a context that all ranks have left
            earlier.clear()
        return Go(tuple(offers))

    def _enter(self, rank: int, message: Ready) -> None:
        record = self._table.records[rank]
        if not self._ready:
            self._framework = 0, ""
            self._table.forget_accelerators()  # of which the frameworks know better
        if message.problem is not None:
            raise as_error(message.problem, f"rank {rank} on {short_repr(record.host)}")
        self._table.claim_device(record, message.device)
        self._ready[rank] = message
        other, named = self._framework
        if not named:
            self._framework = rank, message.framework
        elif message.framework not in ("", named):
            what = f"rank {rank} is about to start {message.framework}, and rank {other} {named}"
            hint = "let all ranks call init() with the same arguments, and give the wrapper the same --framework"
            raise DistbootError("membership-mismatch", what, hint)

    def _fail_to_begin(self, error: DistbootError, key: Key) -> None:
        """All ranks hear of it, also those that are not ready yet: this one may have ended by then."""
        self.not_ready = self.unready
        key = replace(key, count=max([key.count, *(one.count for one in self._ready.values())]))
        self._failed[key.place] = key.count, error
        self._fail(sorted(self._node_of), error, key)
        self._waiting.pop(key, None)
        self._ready.clear()

    def _not_ready(self, now: float) -> DistbootError:
        ended = [self._table.records[rank] for rank in self.unready if rank in self._ended]
        if ended:
            who = f"rank {ended[0].rank} (process {ended[0].pid} on {short_repr(ended[0].host)})"
            why = f"{who} joined, and ended before the framework could start"
            return DistbootError("rank-failed", why, "look at the output of that rank")
        why = f"all ranks joined, and then did not get ready in time: {self._ranks(self.unready)}"
        why += self._unreachable_text(self.unready, now)
        hint = "look at their output: the import of the framework hangs or is slow there, or their host is down"
        return DistbootError("missing-rank", why, hint)

    # Texts

    def _unreachable_text(self, ranks: Iterable[int], now: float) -> str:
        """`"; rank 1 (node-b) has been unreachable for 40 s"`; empty if none of these ranks is."""
        absent = sorted(self.unreachable.keys() & set(ranks))
        if not absent:
            return ""
        first = absent[0]
        seconds = now - self.unreachable[first]
        more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
        host = escape_control(self._membership.hosts[self._node_of[first]])
        return f"; rank {first} ({host}) has been unreachable for {seconds:.0f} s{more}"

    def _not_opened(self, key: Key, limit: float, now: float) -> DistbootError:
        """The error for ranks whose leader is not through in time."""
        absent = self._unreachable_text([self._leader(key)], now)
        if not absent:
            return not_opened(key, self._leader_text(key), limit)
        why = f"{self._leader_text(key)} did not finish its block within {limit:g} s{absent}"
        return _missing(key, why, _NETWORK)

    def _progress(self, key: Key, left: float) -> str:
        if key.name == READY:
            return f"all ranks joined; {self._starting()} still starting (limit {left:.0f} s)"
        return f"{self._arrived(key)}; giving up in {left:.0f} s"

    def _starting(self) -> str:
        """`"rank 0 is"`, `"ranks 1 (node 0), 3 (node 1) are"`: those that are not ready."""
        unready = self.unready
        who = ranks_said(unready)
        if len(self._membership.nodes) > 1:
            who = self._ranks(unready)
        return f"{who} is" if len(unready) == 1 else f"{who} are"

    def _arrived(self, key: Key) -> str:
        here = self._waiting[key].ends
        if key.name != BARRIER:
            leader = self._leader_text(key)
            return f"{key.text}: {ranks_said(sorted(here))} waiting for {leader} to leave its block"
        missing = self._ranks(self._node_of.keys() - here.keys())
        return f"{key.text}: {len(here)}/{len(self._node_of)} ranks are here; missing: {missing}"

    def _leader(self, key: Key) -> int:
        return 0 if key.node is None else self._membership.nodes[key.node][0]

    def _leader_text(self, key: Key) -> str:
        return "rank 0" if key.node is None else f"rank {self._leader(key)} (node {key.node})"

    def _named(self, ranks: Iterable[int]) -> str:
        return with_nodes(sorted(ranks), self._node_of)

    def _ranks(self, ranks: Collection[int]) -> str:
        return f"rank{'s' if len(ranks) > 1 else ''} {self._named(ranks)}"


def _missing(key: Key, why: str, hint: str) -> DistbootError:
    return DistbootError("missing-rank", f"{key.text}: {why}", hint)


def _not_waited_for(key: Key, ranks: Iterable[int], limit: float, hint: str) -> DistbootError:
    return _missing(
        key, f"{ranks_said(sorted(ranks))} timed out after {limit:g} s waiting for this one", hint
    )


def not_opened(key: Key, leader: str, limit: float) -> DistbootError:
    """The error for a rank that has waited so many seconds in vain for the leader to be through."""
    hint = (
        f"look at its output, or give its block more time: {key.name.removesuffix('()')}(timeout=…)"
    )
    return _missing(key, f"{leader} did not finish its block within {limit:g} s", hint)


def leader_failed(key: Key, leader: str, why: str) -> DistbootError:
    """The error for a rank that has waited for a leader whose block failed."""
    return DistbootError(
        "rank-failed", f"{key.text}: the block failed on {leader}: {why}", "look at its output"
    )
