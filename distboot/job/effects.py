"""What an agent has to do for its job: the effects of an event, as data.

The job decides, and does no io. Its agent carries these out in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.events import Kind
    from ..rendezvous.messages import Answer
    from .messages import Abort
    from .root_cause import RootCause


# Of every agent


class Reply(NamedTuple):
    """Answer the script of a rank, which waits at a key."""

    rank: int
    message: Answer


class Execute(NamedTuple):
    """Do what rank 0's job asks of every agent."""

    message: object


class Say(NamedTuple):
    """Print a text, of an event with its details."""

    text: str
    event: str = ""
    details: Mapping[str, Any] = {}
    topic: str = ""  # what all agents of a node know, and one of them prints


class Stop(NamedTuple):
    """Stop our own ranks, and print why, once."""

    cause: RootCause
    told: Abort | None = None  # the first message of rank 0 about it


class QuestionPeers(NamedTuple):
    """Ask the hosts that are silent whether they are there, as a signal has arrived here."""


# Of rank 0's


class Send(NamedTuple):
    """Send a message to the agents of these ranks, each once. Rank 0's own may be one of them."""

    message: object
    ranks: Collection[int]


class Record(NamedTuple):
    """Add an event to the log of the job."""

    event: Kind
    rank: int | None
    details: Mapping[str, Any]


class Heard(NamedTuple):
    """Write into the journal, if there is one, what the job hears."""

    rank: int
    message: object


class Tell(NamedTuple):
    """Tell all agents why the job ends: they stop their ranks."""

    cause: RootCause
    speakers: frozenset[int]  # ranks whose agents print it


class Remind(NamedTuple):
    """Tell that to the agent of a rank that has just begun."""

    cause: RootCause
    speakers: frozenset[int]
    rank: int


class Blame(NamedTuple):
    """Add a host to the file of bad hosts, if there is one."""

    host: str
    why: str


# Of any other agent's


class Report(NamedTuple):
    """Send a message of a rank of ours to rank 0's agent."""

    rank: int
    message: object


class DoubtRank0(NamedTuple):
    """A rank of ours has failed, perhaps as rank 0 is gone: find out whether it answers."""


class ReleaseReads(NamedTuple):
    """Rank 0 cannot say any more where all stop: let the reads that wait go on."""


OfEveryAgent = Reply | Execute | Say | Stop | QuestionPeers
OfRank0 = Send | Record | Heard | Tell | Remind | Blame
OfOthers = Report | DoubtRank0 | ReleaseReads
Effect = OfEveryAgent | OfRank0 | OfOthers


class Conclude(NamedTuple):
    """What a service wants of the job: that it ends for this cause."""

    cause: RootCause
    text: str  # of the event
    kind: str = "late"
    traceback: str = ""


class Amend(NamedTuple):
    """The same: more is known of the cause for which the job ends."""

    cause: RootCause


Request = Conclude | Amend
