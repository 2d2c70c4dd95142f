"""What an agent knows of its job, for all services to read.

Each fact has one writer: `Job` writes what follows from messages and from its conclusion, the agent
what it knows by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import filterfalse
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from ..base.dataclass import dataclass, field
from ..base.settings import SupervisionSettings
from ..base.table import first_that_holds
from ..rendezvous.messages import Answer, Key
from .exit_status import ExitStatus
from .root_cause import Circumstances, RankState, RootCause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .first_failure import FailureReport

# Seconds; torchrun polls 10 times a second which ranks have ended, and lists them in that order
AFTER_THE_FIRST = 0.15
LAUNCHER_LOOKS = 0.25  # seconds from an exit code on a host to the launcher that is elsewhere
_STILL_ENDING = 3.0  # seconds for a Python with torch in it to end after an uncaught exception
# Seconds, where its collective operation has timed out: it first ends the group that did not answer.
# Or where its exit code is known, and its host is busy: its agent looks whether it still runs
LONGEST_ENDING = 9.0
_end = attrgetter("end")
_is_local = attrgetter("is_local")
_has_succeeded = attrgetter("has_succeeded")


class RestartDecision(Protocol):
    """Decides whether another round follows; see `agent/restarts`."""

    def decided(
        self,
        cause: RootCause,
        end: ExitStatus | None,
        now: float,
        circumstances: Circumstances,
        pids: list[int],
    ) -> tuple[RootCause, str | None]: ...


class KeyWait(NamedTuple):
    """A script of this agent that waits at a key."""

    key: Key
    until: float  # for rank 0 to answer
    reply: Callable[[Answer], object]

    def ends_with(self, message: Answer) -> bool:
        """Whether this is the answer; the script may have given up another wait."""
        return message.key in (self.key, None)


@dataclass(slots=True)
class Ends:
    """When this agent learned what its own end depends on. Times are those of `time.monotonic`."""

    ended_at: float = 0.0  # the last of our own ranks
    concluded_at: float = inf  # why the job ends
    # From when on ranks that failed of a peer need not wait for the one that failed first
    release_at: float = inf
    delay: float = inf  # of the cause, in seconds


@dataclass(slots=True)
class Facts:
    """Times are those of `time.monotonic`."""

    members: dict[int, RankState]  # by rank
    settings: SupervisionSettings
    is_held: bool  # whether the exit of our ranks waits for this agent, as in the wrapper
    may_restart: bool = False  # whether another round can follow when a rank fails
    # Whether the ranks are still starting; until then a failure is one of the start
    is_starting: bool = False
    has_launcher: bool = False  # whether the launcher's process above our ranks is watched
    is_orphaned: bool = False  # whether the launcher's process above our ranks is gone
    is_served: bool = False  # whether the other ranks only serve rank 0, and end with it
    # Whether a signal asks one of our own ranks to stop; or any, while another round was to follow
    was_stopped: bool = False
    restarts: RestartDecision | None = None  # on rank 0, where another round may follow
    cause: RootCause | None = None  # why the job ends, once that is known
    is_followed: bool = False  # whether it ends this round, and another one follows
    # Nodes that have failed the check before this round: what follows there is not the script's
    unfit: set[int] = field(default_factory=set)
    # On rank 0: what may be the cause, as `first_failure` puts it in order
    reports: list[FailureReport] = field(default_factory=list)
    waits: dict[int, KeyWait] = field(default_factory=dict)  # by rank of our own
    ends: Ends = field(default_factory=Ends)
    own: list[RankState] = field(default_factory=list)  # the ranks of this agent

    def __post_init__(self) -> None:
        self.own = list(filter(_is_local, self.members.values()))

    def conclude(self, cause: RootCause, now: float) -> None:
        """The job ends; a second time with the exit code, once that is known."""
        ends = self.ends
        ends.concluded_at = min(ends.concluded_at, now)
        delay = max(cause.delay, AFTER_THE_FIRST)
        release_at = now + delay
        if delay <= ends.delay:  # else the rank that failed first gets more time to end
            release_at = min(release_at, ends.release_at)
        ends.release_at = release_at
        ends.delay = delay
        self.cause = cause
        self.is_followed = cause.restarts

    def running(self) -> list[RankState]:
        """Those of our ranks that have not ended."""
        return list(filterfalse(_end, self.own))

    def has_own(self, ranks: Collection[int]) -> bool:
        """Whether one of these is a rank of this agent."""
        own = {member.rank for member in self.own}
        return not own.isdisjoint(ranks)

    @property
    def detects(self) -> bool:
        """Whether all ranks are told of a failure, now."""
        if self.is_starting:
            return False
        return self.settings.detects

    @property
    def is_undecided(self) -> bool:
        """Whether there may be a cause, which is not known yet."""
        return self.cause is None and bool(self.reports)

    @property
    def holds_failed_end(self) -> bool:
        """Whether a wrapper has to end, or has ended, with another exit code than 0."""
        if not self.is_held:
            return False
        ended = filter(_end, self.members.values())
        failed = filterfalse(_has_succeeded, ended)
        return any(failed)

    def is_detected(self, member: RankState) -> bool:
        """Whether all ranks are told of the failure of this one."""
        return self.detects and member.is_watched

    def delay(self, member: RankState, ending: float = _STILL_ENDING) -> float:
        """Seconds for which the others wait before they stop: their launcher has to see first who failed.

        `ending`: for its script to end.
        """
        agents_cause = ""
        if member.failing is not None:
            agents_cause = member.failing.cause
        return first_that_holds(
            (self.is_held, 0.0),
            (agents_cause != "", 0.0),  # it does not end by itself
            (member.is_reaped, LAUNCHER_LOOKS),
            (member.end is not None, LONGEST_ENDING),
            (True, ending),
        )
