"""What the agent of rank 0 has to do for its job: the effects of an event, as data.

The job decides, and does no io. Its agent carries these out in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.events import Kind
    from .root_cause import RootCause


class Send(NamedTuple):
    """Send a message to the agents of these ranks, each once. Rank 0's own may be one of them."""

    message: object
    ranks: Collection[int]


class Reply(NamedTuple):
    """Answer the script of a rank, which waits at a key."""

    rank: int
    message: object


class Say(NamedTuple):
    """Print a text, of an event with its details."""

    text: str
    event: str = ""
    details: Mapping[str, Any] = {}


class Record(NamedTuple):
    """Add an event to the log of the job."""

    event: Kind
    rank: int | None
    details: Mapping[str, Any]


class Tell(NamedTuple):
    """Tell all agents why the job ends: they stop their ranks."""

    cause: RootCause


class Remind(NamedTuple):
    """Tell that to the agent of a rank that has just begun."""

    cause: RootCause
    rank: int


class Blame(NamedTuple):
    """Add a host to the file of bad hosts, if there is one."""

    host: str
    why: str


class QuestionPeers(NamedTuple):
    """Ask the hosts that are silent whether they are there, as a signal has arrived here."""


Effect = Send | Reply | Say | Record | Tell | Remind | Blame | QuestionPeers


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
