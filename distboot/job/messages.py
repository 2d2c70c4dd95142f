"""The messages of agents after the rendezvous, on the connections over which the ranks have met.

`KINDS` has all that an agent accepts. A connection that ends before Exited or Detach is that of a
rank that is lost.
"""

from __future__ import annotations

from ..base.dataclass import dataclass
from ..rendezvous import messages as rendezvous
from ..rendezvous.messages import cpu_list
from ..rendezvous.protocol import (
    both,
    flag,
    integer,
    nested,
    number,
    of,
    optional,
    several,
    shared,
    table,
    text,
    time_or_duration,
    valid,
)
from ..script.progress import MOST_GROUPS
from ..script.stop_page import LARGEST
from .exit_status import ExitStatus
from .root_cause import RootCause
from .stacks import AT_ITS_END, OPERATION, Stacks, has_called, waits

_count = integer(most=LARGEST)
LONGEST_SEEN = 200  # characters of a text about a node or a link
MOST_SEEN = 20  # amounts, names and problems of a node
_short = text(LONGEST_SEEN)
_variables = shared(several(several(text(100), 2, 2, "name and digest"), 300))
_LARGEST_AMOUNT = 1e18  # bytes, or bytes a second
_amount = valid(
    lambda value: type(value) in (int, float) and 0 <= value < _LARGEST_AMOUNT, "amount"
)


@dataclass(frozen=True, slots=True)
class Register:
    """The process of this rank is watched from now on; rank 0 answers with its own."""

    pid: int = of(number)
    # Whether all ranks are told of its failure, which may be switched off
    detects: bool = of(flag, default=True)
    cpus: str = of(cpu_list, default="")  # to which it is bound, "0-3,8"; empty: to none


@dataclass(frozen=True, slots=True)
class Phases:
    """The steps of a rank's start, for the report of the job."""

    # Seconds since the epoch, by step
    times: dict[str, float] = of(table(20, both(time_or_duration, valid(bool, "time"))))


@dataclass(frozen=True, slots=True)
class Failing:
    """The script fails, and will end soon; or it cannot go on."""

    end: ExitStatus = of(nested(ExitStatus))


@dataclass(frozen=True, slots=True)
class Exiting:
    """The script is about to end, well or not; its connections to other ranks end first."""


@dataclass(frozen=True, slots=True)
class Terminating:
    """An external signal asks this rank to stop."""

    signal: int = of(integer(1, 64, "signal"))
    # Whether the wrapper got it, and not the script
    of_wrapper: bool = of(flag, default=False)


@dataclass(frozen=True, slots=True)
class Exited:
    """The script has ended."""

    end: ExitStatus = of(nested(ExitStatus))
    is_reaped: bool = of(flag, default=True)  # else Reaped follows


@dataclass(frozen=True, slots=True)
class Reaped:
    """The process has ended, too, and its parent has read its exit code."""


@dataclass(frozen=True, slots=True)
class Abort:
    """From rank 0: why all ranks stop."""

    root_cause: RootCause = of(nested(RootCause))
    # Whether this agent prints it, for all that print to the same place
    speaks: bool = of(flag, default=False)


@dataclass(frozen=True, slots=True)
class Done:
    """From rank 0: its script has ended well. The others only serve it, and end, too."""


@dataclass(frozen=True, slots=True)
class CountReads:
    """From rank 0, as a rank is asked to stop: how many reads has each script begun?"""


@dataclass(frozen=True, slots=True)
class Reads:
    """The script of this rank has begun so many reads of `ctx.preempted`."""

    count: int = of(_count)


@dataclass(frozen=True, slots=True)
class StopAt:
    """From rank 0: the read of `ctx.preempted` from which on it is true."""

    read: int = of(integer(1, LARGEST))


@dataclass(frozen=True, slots=True)
class Stalled:
    """This rank has not moved for DISTBOOT_LATE_AFTER seconds."""


@dataclass(frozen=True, slots=True)
class SeparateModel:
    """This rank trains a model of its own, for a reason of `script/separate_model`; or not any more."""

    reason: str = of(_short)


@dataclass(frozen=True, slots=True)
class Locate:
    """From rank 0: how far are the ranks of this agent? With `stacks`: where in their scripts?"""

    number: int = of(number)  # of the question; 0: one for a single rank
    stacks: bool = of(flag, default=False)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank is, as its agent knows."""

    number: int = of(number)  # of the question
    since: float = of(time_or_duration)  # seconds for which it has not moved
    # Collective operations begun, by process group
    counts: dict[str, int] = of(table(MOST_GROUPS, _count))
    reads: int = of(_count)  # of `ctx.preempted`
    steps: int = of(_count)  # calls of `ctx.step()`
    stacks: Stacks | None = of(optional(nested(Stacks)), default=None)
    idle: float = of(time_or_duration, default=0.0)  # seconds for which it has not used a processor
    keys: int = of(_count, default=0)  # arrivals at `barrier()` and the like, and departures
    is_at_key: bool = of(flag, default=False)  # whether a thread of it waits there

    @property
    def is_counted(self) -> bool:
        """Whether it has a number that grows as it moves."""
        return any((*self.counts.values(), self.reads, self.steps))

    @property
    def is_held(self) -> bool:
        """Whether it cannot go on: it is stopped, or in the kernel."""
        return self.stacks is not None and bool(self.stacks.state) and not self.has_left

    @property
    def has_left(self) -> bool:
        """Whether its script is over, and its process is not: MPI waits for the other ranks then."""
        return self.stacks is not None and self.stacks.state.startswith(AT_ITS_END)

    @property
    def has_frames(self) -> bool:
        return self.stacks is not None and bool(self.stacks.main)

    @property
    def is_in_operation(self) -> bool:
        """Whether it waits in a collective operation of torch, which is counted."""
        return self.stacks is not None and has_called(self.stacks, OPERATION)

    @property
    def is_in_wait(self) -> bool:
        """Whether it is in a function that waits for other processes."""
        if self.stacks is None or self.is_held:
            return False
        if self.is_at_key and not self.is_counted:  # else its numbers say more
            return True
        return waits(self.stacks)


# The check of all nodes, see `job/check`


@dataclass(frozen=True, slots=True)
class Probeable:
    """The first agent of a node waits there for the probe of a neighbor."""

    port: int = of(integer(1, 65535, "port"))
    token: str = of(_short)  # which the neighbor has to show


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What the first agent of a node has seen there."""

    # Bytes, or a number of things, by name
    amounts: dict[str, float] = of(table(MOST_SEEN, _amount), default_factory=dict)
    # What should be the same on all nodes, by name
    names: dict[str, str] = of(table(MOST_SEEN, _short), default_factory=dict)
    problems: tuple[str, ...] = of(several(_short, MOST_SEEN), default=())
    # Names and digests of the variables that should be the same on all nodes
    variables: tuple[tuple[str, str], ...] = of(_variables, default=())


@dataclass(frozen=True, slots=True)
class Probe:
    """From rank 0: how fast is the link to this neighbor?"""

    number: int = of(number)  # of the probe
    host: str = of(_short)  # address; empty: that of rank 0, as this agent knows it
    port: int = of(integer(1, 65535, "port"))
    token: str = of(_short)


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to `Probe`."""

    number: int = of(number)
    round_trip: float = of(time_or_duration, default=0.0)  # the shortest one, in seconds
    rate: float = of(_amount, default=0.0)  # bytes a second
    problem: str = of(_short, default="")  # why the neighbor was not reached


KINDS = (
    # Processes and how they end
    Register,
    Phases,
    Failing,
    Exiting,
    Terminating,
    Exited,
    Reaped,
    Abort,
    Done,
    rendezvous.Detach,
    # The agreed stop
    rendezvous.RequestStop,
    CountReads,
    Reads,
    StopAt,
    # Late ranks, and stacks for users
    Stalled,
    Locate,
    Position,
    rendezvous.AskStacks,
    rendezvous.ShowStacks,
    # Ranks that train a model each
    SeparateModel,
    # Keys
    rendezvous.Arrive,
    rendezvous.Ready,
    rendezvous.Leave,
    rendezvous.Release,
    rendezvous.Go,
    rendezvous.Failed,
    # The check of all nodes
    Probeable,
    NodeSeen,
    Probe,
    Probed,
    # Connections
    rendezvous.Resumed,
    rendezvous.Refused,
)
