"""Which failure was first: all reports of trouble, until one of them is the root cause. Pure.

One failure makes others fail: a rank dies, its peers lose their connections to it, and the launcher
stops the rest with signals. The reports of all that reach rank 0 in any order. There are three
kinds:

    failed     a rank has failed, or its script is about to end with an exception
    lost       the connection to the agent of a rank has ended
    stopped    an external signal has asked a rank to stop

Each report is due some time after it arrived, so that what explains it can arrive, too:

    failed     at once; after `EXPLAINING` if it is *secondary*: its exception only tells that a
               peer is gone, and the failure of that peer may be on its way
    lost       after `GATHERING`, in which all ranks of a host that died are lost
    stopped    after `SETTLING`: a launcher sends signals when a rank has failed

When the first report is due, the root cause is the first to arrive that explains itself, which is
neither secondary nor a signal; without one, it is the first of all. But a signal explains the
failure of a rank that tells of a peer and still ran when the signal came: that may have ended the
peer. A secondary failure waits longer while another rank is about to end with an exit code that is
not known yet.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from typing import Literal

from ..base.dataclass import dataclass, field
from ..base.process import INTERRUPT
from ..base.text import ranks_said
from .exit_status import ExitStatus
from .root_cause import (
    RankState,
    RootCause,
    from_agreed_stop,
    from_disconnect,
    from_early_end,
    from_exit,
    from_signal,
)

SETTLING = 0.15  # seconds; mpirun leaves 0.24 until its next signal
EXPLAINING = 0.5  # seconds
GATHERING = 0.1  # seconds
_FAILURE_DUE = {False: 0.0, True: EXPLAINING}  # seconds, by whether it is secondary
_end = operator.attrgetter("member.end")
_is_of_peer = operator.attrgetter("end.is_of_peer")
_rank = operator.attrgetter("rank")
_node = operator.attrgetter("node_rank")
_is_reachable = operator.attrgetter("is_reachable")
_has_succeeded = operator.attrgetter("has_succeeded")


@dataclass(slots=True, eq=False)
class FailureReport:
    """A report for which the job may have to end."""

    kind: Literal["failed", "lost", "stopped"]
    member: RankState
    due: float
    end: ExitStatus = ExitStatus()  # how the rank failed
    signal: int = 0  # from outside, that asked it to stop
    of_wrapper: bool = False  # whether the wrapper of the rank got that signal
    # Why all ranks had agreed to stop; empty: that signal is why
    agreed: str = ""
    why: str = ""  # it counts as lost
    is_secondary: bool = False  # whether it only tells that a peer is gone
    has_waited: bool = False  # whether it tells of a peer that did not answer in time
    may_be_consequence: bool = False  # whether another report may explain it


@dataclass(slots=True)
class RootCauseAnalysis:
    """All reports until one of them is the root cause."""

    members: list[RankState]
    is_by_node: bool  # whether one agent has all ranks of a node
    # In the order of arrival, but for a signal that explains those before
    reports: list[FailureReport]
    # Of these, the lost ones, by node and rank
    _lost: dict[int, dict[RankState, FailureReport]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def failed(self, member: RankState, end: ExitStatus, now: float) -> None:
        delay = _FAILURE_DUE[end.is_secondary]
        if end.external_signal is not None:
            delay = max(delay, SETTLING)  # as for the signal
        report = FailureReport(
            kind="failed",
            member=member,
            due=now + delay,
            end=end,
            is_secondary=end.is_secondary,
            has_waited=end.has_waited,
            may_be_consequence=end.may_be_consequence,
        )
        self.reports.append(report)

    def lost(self, member: RankState, why: str, now: float, gathering: float) -> None:
        due = now + gathering
        earlier = self._lost[member.node_rank].get(member)
        if earlier is not None:
            earlier.due = min(earlier.due, due)
            return
        report = FailureReport("lost", member, due, why=why)
        self._lost[member.node_rank][member] = report
        self.reports.append(report)

    def stopped(
        self,
        member: RankState,
        number: int,
        now: float,
        *,
        of_wrapper: bool = False,
        agreed: str = "",
    ) -> None:
        """A signal has asked a rank to stop.

        `agreed`: why all had agreed to stop when `member` was asked; a rank has ended with the code
        of that signal.
        """
        report = FailureReport(
            kind="stopped",
            member=member,
            due=now + SETTLING,
            signal=number,
            of_wrapper=of_wrapper,
            agreed=agreed,
            may_be_consequence=True,
        )
        place = len(self.reports)
        if self._is_of_running_peers():
            place = 0
        self.reports.insert(place, report)

    def _is_of_running_peers(self) -> bool:
        """Whether all reports are of ranks that still run, the first of which tells of a peer.

        A signal that arrives now may have ended that peer; no launcher sends one because of a rank
        that still runs.
        """
        first = self.reports[:1]
        if not any(map(_is_of_peer, first)):
            return False
        return not any(map(_end, self.reports))

    def postpone(self, member: RankState, due: float) -> None:
        """A rank that was lost may be about to return."""
        report = self._lost[member.node_rank].get(member)
        if report is not None:
            report.due = max(report.due, due)

    def returned(self, member: RankState) -> None:
        """A rank that was lost has returned."""
        report = self._lost[member.node_rank].pop(member, None)
        if report is not None:
            self.reports.remove(report)

    def conclude(self, now: float, *, has_launcher: bool = False) -> FailureReport | None:
        """The root cause of what was reported, once it is certain; None: not yet.

        `has_launcher`: whether the launcher is watched, which may turn out to be gone.
        """
        report = self.awaited()
        # When all ranks have ended, the launcher alone can explain a signal that has stopped them
        is_of_launcher = (has_launcher, report.kind) == (True, "stopped")
        may_be_explained = any((is_of_launcher, *map(_is_reachable, self.members)))
        if report.due > now and may_be_explained:
            return None
        may_explain = operator.methodcaller("may_explain", now)
        if report.is_secondary and any(map(may_explain, self.members)):
            report.due = now + EXPLAINING
            return None
        return self._first()

    def awaited(self) -> FailureReport:
        """Of all reports, which there have to be, the one whose `due` counts."""
        first = self._first()
        if first.kind == "lost":  # it may return until then, and is no cause if it does
            return first
        return min(self.reports, key=operator.attrgetter("due"))

    def _first(self) -> FailureReport:
        first = min(self.reports, key=operator.attrgetter("may_be_consequence"))
        if not first.is_secondary:
            return first
        # One that has waited in vain closes its connections, which the others see as a peer's end
        waited = filter(operator.attrgetter("has_waited"), self.reports)
        return next(waited, first)

    def explain(self, report: FailureReport, delay: float, held_up: str) -> RootCause:
        """The root cause that a report is.

        Args:
            report: from `conclude`.
            delay: seconds before the other ranks stop.
            held_up: `"rank 1 (vm) had held up the job for 600 s"`, or empty.
        """
        member = report.member
        if report.agreed:
            return from_agreed_stop(member, report.signal, report.agreed)
        if report.kind == "stopped":
            receiver = self._receiver(report)
            return from_signal(member, report.signal, receiver, held_up)
        if report.kind == "lost":
            there = self._lost[member.node_rank]
            return from_disconnect(sorted(there, key=_rank), report.why)
        end = _end_of(member, report.end)
        done = list(filter(_has_succeeded, self.members))
        if done and end.has_missed_peer:
            others = len(self.members) - len(done)
            then = from_exit(member, end, delay, "failed")
            return from_early_end(done, others, then, has_started=not end.is_before_start)
        return from_exit(member, end, delay)

    def _receiver(self, report: FailureReport) -> str:
        """Which process got a signal, or which ranks got Ctrl-C; empty: the rank did."""
        if report.of_wrapper:
            whose = self._name_of_wrapper(report.member)
            return f"the wrapper of {whose} got it"
        interrupted = set()
        for one in self.reports:
            if one.signal == INTERRUPT and not one.agreed:
                interrupted.add(one.member.rank)
        if report.signal != INTERRUPT or len(interrupted) == 1:
            return ""
        return f"Ctrl-C, which {ranks_said(sorted(interrupted))} got"

    def _name_of_wrapper(self, member: RankState) -> str:
        node = member.node_rank
        sizes = Counter(map(_node, self.members))
        if self.is_by_node and sizes[node] > 1:
            return f"node {node}"
        return f"rank {member.rank}"


def _end_of(member: RankState, reported: ExitStatus) -> ExitStatus:
    """How a rank has ended that was reported to fail so."""
    if member.end is None:
        return reported
    if member.end.terminated_by is not None:  # by a signal that came while it was about to end
        return reported
    return member.end
