"""Failures as a service of the job: it collects what may be the root cause, and decides which it is."""

from __future__ import annotations

from math import inf

from ..base.dataclass import replace
from .device_failure import is_of_device
from .effects import Amend, Blame, Conclude, QuestionPeers, Record
from .exit_status import ExitStatus
from .facts import Facts
from .first_failure import FailureReport, RootCauseAnalysis
from .late import LateService
from .messages import Exited, Failing, Reaped, Terminating
from .root_cause import BY_HANG_STOP, RankState, RootCause
from .service import Emit, Service
from .stop_agreement import StopAgreement


class FailureService(Service):
    """Which failure was first."""

    def __init__(
        self,
        facts: Facts,
        emit: Emit,
        late: LateService,
        agreement: StopAgreement,
        *,
        is_by_node: bool,
    ) -> None:
        super().__init__(facts, emit)
        self._late = late
        self._agreement = agreement
        # Whether the first report waits for the positions of all ranks, which may explain it
        self._waits_for_positions = False
        self.analysis = RootCauseAnalysis(
            list(facts.members.values()),
            is_by_node=is_by_node,
            reports=facts.reports,
        )
        self.handlers = {
            Failing: self._failing,
            Terminating: self._terminating,
            Exited: self._exited,
            Reaped: self._tell_again,
        }

    def lost(self, member: RankState, why: str, now: float, gathering: float) -> None:
        """The agent of a rank is gone."""
        self._emit(Record("unreachable", member.rank, {"text": why}))
        self.analysis.lost(member, why, now, gathering)

    def returned(self, member: RankState) -> None:
        """A rank that was lost has returned."""
        self.analysis.returned(member)
        self._emit(Record("reachable", member.rank, {}))

    def tick(self, now: float) -> None:
        self._waits_for_positions = False
        if not self._facts.is_undecided:
            return
        report = self.analysis.conclude(now, has_launcher=self._facts.has_launcher)
        if report is None:
            return
        is_explained: bool | None = False
        if report.kind == "failed":
            is_explained = self._late.explains(report.member.rank, report.end, now)
        if is_explained is False:
            self._conclude(report, now)
        self._waits_for_positions = is_explained is None

    def due(self) -> float:
        is_open = self._facts.is_undecided and not self._waits_for_positions
        if not is_open:
            return inf
        return self.analysis.awaited().due

    def _terminating(self, member: RankState, message: Terminating, now: float) -> None:
        if member.is_local:  # another agent has done this itself
            if not self._facts.detects:
                return
            if not self._facts.was_stopped:  # ask the hosts that are silent, once
                self._facts.was_stopped = True
                self._emit(QuestionPeers())
        self.analysis.stopped(
            member,
            message.signal,
            now,
            of_wrapper=message.of_wrapper,
        )
        if self._facts.is_followed:
            assert self._facts.cause is not None
            self._facts.was_stopped = True
            self._emit(Amend(self._facts.cause))  # no round follows

    def _failing(self, member: RankState, message: Failing, now: float) -> None:
        is_first = member.failing is message.end  # of this rank
        if is_first and self._facts.is_detected(member):
            self.analysis.failed(member, message.end, now)

    def _exited(self, member: RankState, message: Exited, now: float) -> None:
        self._tell_again(member, message, now)
        end = member.end
        assert end is not None
        if not self._facts.is_detected(member):
            return
        if member.was_terminated:
            self._terminated(member, end, now)
        elif end.is_failure and member.failing is None:
            self.analysis.failed(member, end, now)

    def _terminated(self, member: RankState, end: ExitStatus, now: float) -> None:
        number = end.terminated_by
        assert number is not None
        asked = self._agreement.asked
        has_got_no_signal = {end.signal, end.external_signal} == {None}
        is_agreed = has_got_no_signal and self._agreement.is_of_script
        if is_agreed and asked is not None:
            asked_first = self._facts.members[asked]
            self.analysis.stopped(asked_first, number, now, agreed=self._agreement.why)
        else:
            self.analysis.stopped(member, number, now)

    def _tell_again(self, member: RankState, _message: Exited | Reaped, _now: float) -> None:
        """More is known of the rank that failed first: its exit code, or that its launcher has seen it."""
        cause = self._facts.cause
        if cause is None or not cause.is_first(member.rank):
            return
        again = cause
        if cause.delay:  # else no agent waits for its end, as after an external signal
            again = replace(cause, delay=self._facts.delay(member))
        if member.end is not None:
            again = replace(again, exit_code=_code_of_job(cause, member.end))
        self._emit(Amend(again))

    def _conclude(self, report: FailureReport, now: float) -> None:
        cause = self.analysis.explain(
            report,
            self._facts.delay(report.member),
            self._late.held_up(now),
        )
        first = self._facts.members[cause.failed]
        end: ExitStatus | None = first.end or first.failing
        traceback = ""
        is_hosts_fault = report.kind == "lost"
        if end is not None:
            traceback = end.traceback
            is_hosts_fault |= is_of_device(end)
        is_blamed = first.node_rank in self._facts.unfit  # by the check before this round
        if is_hosts_fault and not is_blamed:
            self._emit(Blame(first.host, cause.headline))
        conclusion = Conclude(
            cause,
            cause.headline,
            kind=report.kind,
            traceback=traceback,
        )
        self._emit(conclusion)


def _code_of_job(cause: RootCause, end: ExitStatus) -> int:
    """The exit code of the job, once the rank that failed first has ended so.

    A rank that hung did not fail: however it ends then, the code is that of the stop.
    """
    is_of_hang = BY_HANG_STOP in cause.headline
    if is_of_hang or not end.tells_code_of_job:
        return cause.exit_code
    return end.code_of_job
