"""What ends a job: the first failure of a rank, or a signal from outside. Every rank prints the same."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..base.text import escape_control, ranks_said
from ..rendezvous.protocol import (
    both,
    flag,
    integer,
    number,
    of,
    optional,
    several,
    text,
    time_or_duration,
    valid,
)
from .exit_status import (
    LONGEST_HEADLINE,
    STOPPED,
    ExitStatus,
    fitting,
    shown,
    signal_name,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..rendezvous.membership import Membership

# Seconds for a failure to become known to which a signal is the answer; mpirun gives us 0.24 to live
SETTLING = 0.15
EXPLAINING = 0.5  # seconds for one to become known that explains what a rank says of a peer
GATHERING = 0.1  # seconds in which the ranks of a host that died are lost
# Seconds for a Python that is about to end to do so, while other ranks have lost it already
_LEAVING = 10.0
_FINISHING = 5.0  # seconds for the rank that failed first to end by itself, with its own exit code
_FOLLOWING = 0.6  # seconds for another one that fails, too
# Characters in a headline of what an exception says: so many unless the host's name and the place leave less room,
# and so many in any case
_ENOUGH, _LEAST = 70, 40
_SHORT_HOST, _SHORT_PLACE = 26, 32  # characters of these where there is not room for all
# Gloo's unbound_buffer.cc: "Timed out waiting 8000ms for recv operation to complete"; the watchdog of NCCL:
# "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, …, Timeout(ms)=8000) ran for …"
_TIMEOUT = re.compile(
    r"Timed out waiting (\d+) ?ms|collective operation timeout: .*?Timeout\(ms\)=(\d+)"
)
_delay = both(time_or_duration, valid(lambda seconds: seconds <= 10.0, "delay"))
_LONGEST_TEXT = 16384  # characters


@dataclass(slots=True, eq=False)
class RankState:
    """What an agent knows of one rank: where it is, and what has become of it."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    pid: int = 0  # 0: it is not watched yet
    # Of its agent; None: it is our own, or not watched any more
    connection: Any = None  # a HeartbeatConnection, of which this floor knows nothing
    failing: ExitStatus | None = None  # how it fails, although it has not ended yet
    exiting: float | None = None  # since when it is about to end, as `time.monotonic` has it
    end: ExitStatus | None = None  # how it has ended
    is_watched: bool = True  # whether its failure is to be told to all
    is_local: bool = True  # whether this agent is its own

    @property
    def where(self) -> str:
        """`"on node-a (node 1, local rank 0, process 4711)"`."""
        process = f", process {self.pid}" if self.pid else ""
        return f"{self.host_said} (node {self.node_rank}, local rank {self.local_rank}{process})"

    @property
    def host_said(self) -> str:
        return f"on {escape_control(self.host)}"

    @property
    def is_open(self) -> bool:
        """Whether it is to end yet, and we would hear of it."""
        return self.end is None and (self.connection is not None or self.is_local)

    @property
    def is_reachable(self) -> bool:
        """The same, and its agent can be reached now."""
        if self.connection is not None and self.connection.is_silent:
            return False
        return self.is_open


def ranks_of(membership: Membership) -> list[RankState]:
    """All ranks of a job."""
    places = sorted(
        (rank, node, local)
        for node, on in enumerate(membership.nodes)
        for local, rank in enumerate(on)
    )
    return [
        RankState(rank, membership.hosts[node], node, local_rank)
        for rank, node, local_rank in places
    ]


@dataclass(slots=True, eq=False)
class FailureReport:
    """Something for which the job may have to end."""

    kind: Literal["failed", "lost", "stopped"]
    member: RankState
    due: float  # when it is decided, if nothing comes that explains it
    end: ExitStatus | None = None  # how the rank failed
    signal: int = 0  # from outside, that asked it to stop
    of_wrapper: bool = False  # whether the wrapper of the rank got that signal
    why: str = ""  # it counts as lost

    @property
    def is_secondary(self) -> bool:
        """Whether it only speaks of a peer."""
        return self.end is not None and self.end.is_secondary


@dataclass(slots=True)
class RootCauseAnalysis:
    """All reports until one of them is the root cause."""

    members: list[RankState]
    is_by_node: bool = False  # whether one agent has all ranks of a node
    reports: list[FailureReport] = field(default_factory=list)

    def failed(self, member: RankState, end: ExitStatus, now: float) -> None:
        self.reports.append(
            FailureReport("failed", member, now + (EXPLAINING if end.is_secondary else 0.0), end)
        )

    def lost(self, member: RankState, why: str, now: float, gathering: float = GATHERING) -> None:
        self.reports.append(FailureReport("lost", member, now + gathering, why=why))

    def postpone(self, member: RankState, due: float) -> None:
        """A rank that was lost may be about to return."""
        for report in self.reports:
            if report.kind == "lost" and report.member is member:
                report.due = max(report.due, due)

    def returned(self, member: RankState) -> None:
        """A rank that was lost is there again."""
        self.reports = [
            one for one in self.reports if one.kind != "lost" or one.member is not member
        ]

    def terminating(
        self, member: RankState, number: int, now: float, *, of_wrapper: bool = False
    ) -> None:
        self.reports.append(
            FailureReport("stopped", member, now + SETTLING, signal=number, of_wrapper=of_wrapper)
        )

    def conclude(self, now: float) -> FailureReport | None:
        """What came first, once that is clear; None: not yet."""
        if not self.reports:
            return None
        report = min(self.reports, key=lambda one: one.due)
        # When all have ended there is nothing to wait for.
        if report.due > now and any(member.is_reachable for member in self.members):
            return None
        if report.is_secondary and self._may_be_explained(report, now):
            report.due = now + EXPLAINING
            return None
        # What only speaks of a peer may have had a cause, and a signal is what a launcher answers to one.
        return min(self.reports, key=lambda one: one.kind == "stopped" or one.is_secondary)

    def explain(self, report: FailureReport, delay: float, held_up: str = "") -> RootCause:
        """The root cause that a report is: all ranks of a node that were lost are lost together."""
        member = report.member
        if report.kind == "stopped":
            return from_signal(member, report.signal, self._receiver(report), held_up)
        if report.end is not None:
            done = [one for one in self.members if one.end is not None and one.end.succeeded]
            end = _end_of(member, report.end)
            if done and report.is_secondary:
                return from_early_end(
                    done, len(self.members) - len(done), from_exit(member, end, delay, "failed")
                )
            return from_exit(member, end, delay)
        lost = {one.member.rank: one.member for one in self.reports if one.kind == "lost"}
        here = [other for _, other in sorted(lost.items()) if other.node_rank == member.node_rank]
        return from_disconnect(here, report.why)

    def _receiver(self, report: FailureReport) -> str:
        """Which process got a signal, or which ranks got Ctrl-C; empty: the rank did."""
        member = report.member
        if report.of_wrapper:
            on_node = [one for one in self.members if one.node_rank == member.node_rank]
            whose = f"rank {member.rank}"
            if self.is_by_node and len(on_node) > 1:
                whose = f"node {member.node_rank}"
            return f"the wrapper of {whose} got it"
        interrupted = {one.member.rank for one in self.reports if one.signal == signal.SIGINT}
        if report.signal == signal.SIGINT and len(interrupted) > 1:
            return f"Ctrl-C, which {ranks_said(sorted(interrupted))} got"
        return ""

    def _may_be_explained(self, report: FailureReport, now: float) -> bool:
        """Whether another rank is about to end, with an exit code that is not known yet."""
        others = (
            one
            for one in self.members
            if one is not report.member and one.is_reachable and one.failing is None
        )
        return any(
            member.exiting is not None and now < member.exiting + _LEAVING for member in others
        )


@dataclass(frozen=True, slots=True)
class RootCause:
    """Why the job ends."""

    # Those that failed first, or that were stopped first
    ranks: tuple[int, ...] = of(several(number))
    is_failure: bool = of(flag)  # else an external signal stopped the job
    # The headline, which all ranks print, and the lines of a traceback
    text: str = of(text(_LONGEST_TEXT))
    # Seconds before the others stop, so that their launcher sees it first
    delay: float = of(_delay, default=0.0)
    exit_code: int = of(integer(1, 255), default=STOPPED)  # of the job
    restarts: bool = of(flag, default=False)  # whether another round follows
    # The rank that failed as it had waited for `ranks`: its exit code is the first to be seen
    then: int | None = of(optional(number), default=None)

    @property
    def headline(self) -> str:
        return self.text.partition("\n")[0]

    def until_stop(self, member: RankState) -> float:
        """Seconds until a rank has to stop for it, which may be about to end by itself."""
        is_first = self.is_first(member.rank)
        if member.failing is not None and not member.failing.cause:
            if self.then == member.rank:
                return max(self.delay, _FOLLOWING)  # without a delay no launcher sees how it ends
            return _FINISHING if is_first else _FOLLOWING
        return 0.0 if is_first else self.delay

    def is_first(self, rank: int) -> bool:
        """Whether the launcher is to see the exit code of a rank before all others."""
        if self.then is not None:
            return rank == self.then
        return rank in self.ranks

    def exit_code_for(self, end: ExitStatus) -> int:
        """With what the process of a rank has to end that has ended so, as a job has one exit code; 0: with its own.

        | the job ends for   | a rank                              | exit code        |
        |--------------------|-------------------------------------|------------------|
        | a failure          | that ended well, and was not asked  | 0                |
        |                    | of any other end                    | that of the job  |
        | an external signal | that ended by itself                | its own          |
        |                    | that was killed, or missed a peer   | that of the job  |
        """
        if self.is_failure:
            keeps_own = end.succeeded and end.external_signal is None
        else:
            keeps_own = end.signal is None and not end.is_secondary
        return 0 if keeps_own else self.exit_code

    def escaped(self) -> RootCause:
        """The same, as it may be printed; another process has sent it."""
        return replace(self, text="\n".join(map(escape_control, self.text.split("\n"))))


def _end_of(member: RankState, reported: ExitStatus) -> ExitStatus:
    """How a rank has ended that was reported to fail so."""
    if member.end is None:
        return reported
    if member.end.terminated_by is not None:  # by a signal that came while it was about to end
        return reported
    return member.end


def from_exit(
    member: RankState, end: ExitStatus, delay: float, failed: str = "failed first"
) -> RootCause:
    """A rank ended in failure."""
    why = ", because a peer disconnected" if end.is_secondary else ""
    begin = f"rank {member.rank} {failed}{why}: "
    head = _headline(begin, end.failure_text, member, end.place)
    return RootCause(
        (member.rank,), True, head + shown("\n".join(end.excerpt())), delay, end.code_of_job
    )


def from_early_end(done: Sequence[RankState], others: int, then: RootCause) -> RootCause:
    """Ranks had ended well when one of the others failed, as a peer had disconnected."""
    ranks = [member.rank for member in done]
    training = "1 other rank was" if others == 1 else f"{others} other ranks were"
    victim, lines = then.text.partition(": ")[0], then.text.removeprefix(then.headline)
    said = f"{ranks_said(ranks)} exited with code 0 while {training} still training, {done[0].host_said}; then {victim}"
    return replace(then, ranks=tuple(ranks), text=fitting(said) + lines)


def from_disconnect(gone: Sequence[RankState], why: str) -> RootCause:
    """Ranks of one node are unreachable, and have not said anything."""
    first, ranks = gone[0], [member.rank for member in gone]
    begin, node = f"{ranks_said(ranks)} became unreachable first: ", f" (node {first.node_rank})"

    def text(most: int) -> str:
        return fitting(why, most)

    return RootCause(tuple(ranks), True, _headline(begin, text, first, node=node))


def from_late(ranks: Sequence[int], text: str, stacks: Sequence[str] = ()) -> RootCause:
    """Others have waited in vain for ranks; `text`: it in words."""
    rest = ""
    if len(text) > LONGEST_HEADLINE:
        text, _, rest = text.partition("; ")
    return RootCause(tuple(ranks), True, fitting(text) + shown("\n".join([rest, *stacks])))


def from_late_failure(
    ranks: Sequence[int], text: str, failed: int, end: ExitStatus, delay: float
) -> RootCause:
    """Others have waited in vain for ranks, and one of those others has failed of a timeout."""
    held_up, _, rest = text.partition("; ")
    what = timeout_text(end)
    begin = f"; then rank {failed} failed: "
    begin = fitting(held_up, LONGEST_HEADLINE - len(begin) - _ENOUGH) + begin
    lines = [rest, f"rank {failed}: {end.failure_text()}"]
    headline = begin + fitting(what, LONGEST_HEADLINE - len(begin))
    return RootCause(
        tuple(ranks), True, headline + shown("\n".join(lines)), delay, end.code_of_job, then=failed
    )


def timeout_text(end: ExitStatus) -> str:
    """`"Timed out waiting 8000 ms (timeout= of init)"`, where torch's own timeout has ended a rank."""
    message = "" if end.exception is None else end.exception.message
    found = _TIMEOUT.search(f"{message} {end.traceback}")
    if found is None:
        return end.failure_text()
    return f"Timed out waiting {found[1] or found[2]} ms (timeout= of init)"


def from_signal(member: RankState, number: int, receiver: str = "", held_up: str = "") -> RootCause:
    """An external signal stopped a rank, and so the job; `receiver` got it, or the rank first.

    `held_up`: that a rank had held up the job by then.
    """
    name = signal_name(number)
    got = receiver or f"rank {member.rank} got it first"
    end = f": {got}, {member.host_said}"
    text = f"stopped by an external {name}"
    if held_up:
        room = LONGEST_HEADLINE - len(text) - len(end)
        text += fitting(f" after {held_up}", room)
    return RootCause((member.rank,), False, fitting(text + end), exit_code=128 + number)


def _headline(
    begin: str, what: Callable[[int], str], member: RankState, place: str = "", node: str = ""
) -> str:
    """One line that says who, what and where; `what` is told how many characters it may have."""
    end = _where(member.host_said, place, node)
    if len(begin) + _ENOUGH + len(end) > LONGEST_HEADLINE:
        host = fitting(member.host_said, _SHORT_HOST)
        if len(place) > _SHORT_PLACE:  # its end has the file and the line
            place = "…" + place[1 - _SHORT_PLACE :]
        end = _where(host, place, node)
    begin = fitting(begin, LONGEST_HEADLINE - _LEAST - len(end))
    return begin + what(LONGEST_HEADLINE - len(begin) - len(end)) + end


def _where(host: str, place: str, node: str) -> str:
    if place:
        return f", {host}{node}, in {place}"
    return f", {host}{node}"
