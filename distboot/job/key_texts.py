"""The errors and lines of ranks that wait for each other at a key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..base.errors import DistbootError
from ..base.text import escape_control, ranks_said, short_repr, with_nodes
from ..rendezvous.membership import Membership
from ..rendezvous.messages import BARRIER, SAME_FRAMEWORK, Key, WorkerInfo
from .exit_status import BEFORE_START

_HINT_AT_NETWORK = "look for what cuts the connection to that host: a firewall, or the network"
_HINT_AT_MISSING = (
    "look at the output of the missing ranks: they ended early, hang, or never get here"
)
_HINT_AT_LATE = "look for what kept this rank, or give it more time: init(timeout=…)"
_HINT_AT_IMPORT = (
    "look at their output: they have not called init() yet, the import of the framework "
    "hangs or is slow there, or their host is down"
)


class KeyTexts:
    """Texts about the ranks of one job; times are those of `time.monotonic`."""

    def __init__(
        self,
        membership: Membership,
        unreachable: Mapping[int, float],  # ranks whose agents do not answer, and since when
    ) -> None:
        self._membership = membership
        self._node_of = membership.node_of()
        self._unreachable = unreachable

    # Lines while ranks wait

    def starting(self, unready: Collection[int], left: float) -> str:
        """`"all ranks joined; rank 0 is still starting (limit 285 s)"`, for `init()`."""
        who = ranks_said(sorted(unready))
        if len(self._membership.nodes) > 1:
            who = self._ranks(unready)
        are = "are"
        if len(unready) == 1:
            are = "is"
        return f"all ranks joined; {who} {are} still starting (limit {left:.0f} s)"

    def progress(self, key: Key, here: Collection[int], left: float) -> str:
        """`"barrier(): 1/4 ranks are here; missing: ranks 1-3 (nodes 0-1); giving up in 90 s"`."""
        all_ranks = self._node_of.keys()
        missing = self._ranks(all_ranks - set(here))
        state = f"{len(here)}/{len(all_ranks)} ranks are here; missing: {missing}"
        if key.name != BARRIER:
            leader = self._leader(key)
            waiting = ranks_said(sorted(here))
            state = f"{waiting} waiting for {leader} to leave its block"
        return f"{key.text}: {state}; giving up in {left:.0f} s"

    # Keys for all ranks

    def ranks_gone(self, key: Key, gone: Collection[int], why: str) -> DistbootError:
        """`why`: what has become of the first of them."""
        text = f"{self._ranks(gone)} {why}, without getting here"
        return _missing(key, text, _HINT_AT_MISSING)

    def ranks_missing(
        self, key: Key, missing: Collection[int], limit: float, now: float
    ) -> DistbootError:
        """For the ranks that are at a key, when the limit is over."""
        all_ranks = len(self._node_of)
        absent = self._describe_unreachable(missing, now)
        came = f"{all_ranks - len(missing)} of {all_ranks} ranks arrived"
        who = f"{self._ranks(missing)}{absent}"
        text = f"{came} within {limit:g} s; missing: {who}"
        hint = _HINT_AT_MISSING
        if absent:
            hint = _HINT_AT_NETWORK
        return _missing(key, text, hint)

    def not_waited_for(self, key: Key, ranks: Iterable[int], limit: float) -> DistbootError:
        """For a rank that arrives after the others have given up."""
        return _not_waited_for(key, ranks, limit, _HINT_AT_LATE)

    # Keys with a leader

    def leader_gone(self, key: Key, why: str) -> DistbootError:
        leader = self._ranks([self._membership.leader(key.node)])
        text = f"{leader} {why}, without finishing its block"
        return _missing(key, text, "look at its output")

    def leader_failed(self, key: Key, why: str) -> DistbootError:
        return leader_failed(key, self._leader(key), why)

    def not_opened(self, key: Key, limit: float, now: float) -> DistbootError:
        """For ranks whose leader has not left its block in time."""
        rank = self._membership.leader(key.node)
        leader = self._leader(key)
        absent = self._describe_unreachable([rank], now)
        if not absent:
            return not_opened(key, leader, limit)
        text = f"{leader} did not finish its block within {limit:g} s{absent}"
        return _missing(key, text, _HINT_AT_NETWORK)

    def not_waited_for_leader(self, key: Key, timed_out: Mapping[int, float]) -> DistbootError:
        """For a leader that has left its block when others had given up, after these limits."""
        limit = min(timed_out.values())
        hint = f"give the block more time: {_call(key)}"
        return _not_waited_for(key, timed_out, limit, hint)

    # Getting ready

    def ended_unready(self, record: WorkerInfo) -> DistbootError:
        process = f"process {record.pid} on {short_repr(record.host)}"
        text = f"rank {record.rank} ({process}) joined, and {BEFORE_START}"
        return DistbootError("rank-failed", text, "look at the output of that rank")

    def not_ready(self, unready: Collection[int], now: float) -> DistbootError:
        absent = self._describe_unreachable(unready, now)
        who = f"{self._ranks(unready)}{absent}"
        text = f"all ranks joined, and then did not get ready in time: {who}"
        return DistbootError("missing-rank", text, _HINT_AT_IMPORT)

    def two_frameworks(self, rank: int, its: str, other: int, others: str) -> DistbootError:
        text = f"rank {rank} starts {its}, but rank {other} starts {others}"
        return DistbootError("membership-mismatch", text, SAME_FRAMEWORK)

    # Parts

    def _describe_unreachable(self, ranks: Iterable[int], now: float) -> str:
        """`"; rank 1 (node-b) has been unreachable for 40 s"`; empty if all can be reached."""
        absent = sorted(self._unreachable.keys() & set(ranks))
        if not absent:
            return ""
        first = absent[0]
        seconds = now - self._unreachable[first]
        host = escape_control(self._membership.hosts[self._node_of[first]])
        text = f"; rank {first} ({host}) has been unreachable for {seconds:.0f} s"
        more = len(absent) - 1
        if more:
            text += f", and {more} more"
        return text

    def _leader(self, key: Key) -> str:
        if key.node is None:
            return "rank 0"
        return f"rank {self._membership.leader(key.node)} (node {key.node})"

    def _ranks(self, ranks: Collection[int]) -> str:
        named = with_nodes(sorted(ranks), self._node_of)
        if len(ranks) > 1:
            return f"ranks {named}"
        return f"rank {named}"


def not_opened(key: Key, leader: str, limit: float) -> DistbootError:
    """For a rank that has waited so many seconds in vain for the leader to leave its block."""
    hint = (
        f"look at its output: it is still in that block, or never comes to {key.name}; or give "
        f"the block more time: {_call(key)}"
    )
    return _missing(key, f"{leader} did not finish its block within {limit:g} s", hint)


def leader_failed(key: Key, leader: str, why: str) -> DistbootError:
    """For a rank that has waited for a leader whose block failed."""
    text = f"{key.text}: the block failed on {leader}: {why}"
    return DistbootError("rank-failed", text, "look at its output")


def _call(key: Key) -> str:
    name = key.name.removesuffix("()")
    return f"{name}(timeout=…)"


def _missing(key: Key, why: str, hint: str) -> DistbootError:
    return DistbootError("missing-rank", f"{key.text}: {why}", hint)


def _not_waited_for(key: Key, ranks: Iterable[int], limit: float, hint: str) -> DistbootError:
    who = ranks_said(sorted(ranks))
    return _missing(key, f"{who} timed out after {limit:g} s waiting for this one", hint)
