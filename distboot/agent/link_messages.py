"""The one socket between a script and its agent: where it is, and what both ends send there.

The agent of `init` has the other end of a pair of sockets. That of the wrapper listens at a name in
the abstract namespace of Unix sockets, which ends with the process and is not seen from another
network namespace; DISTBOOT_AGENT has the name, and a token that a process of another user cannot
read.
"""

from __future__ import annotations

import re
from typing import Any

from ..base.dataclass import dataclass
from ..base.settings import SupervisionSettings
from ..rendezvous.membership import JoinPlan
from ..rendezvous.messages import (
    Arrive,
    AskStacks,
    Leave,
    Ready,
    RequestStop,
)
from ..rendezvous.protocol import (
    Channel,
    both,
    nested,
    number,
    of,
    optional,
    several,
    table,
    text,
    valid,
)

# Of the name of a socket; the name of the job, a mark of it, and a random number follow
PREFIX = "distboot-agent-"
UNAUTHENTICATED_MOST = 1000  # bytes of a message before the token
FROM_SCRIPTS = 1 << 20  # bytes of a message of a script
MOST = 1 << 28  # bytes of one message of an agent to its script, or of the first one to that
OPEN = Channel()  # a socket that no other process has needs no proof
MOST_PAIRS = 1000  # of nodes, the slowest ones
_LONG = 1 << 20  # characters
_LARGEST = 1e18
_SETTINGS = len(SupervisionSettings._fields)


def socket_name(job: str) -> str:
    """What the launcher calls a job, as it stands in the name of a socket."""
    return re.sub(r"[^\w.-]", "_", job, flags=re.ASCII)[:60]


def _unchecked(value: object) -> object:
    return value


_number = valid(lambda value: type(value) in (int, float) and 0 <= value < _LARGEST, "number")
_positive = valid(lambda value: type(value) in (int, float) and 0 < value < _LARGEST, "number")
_settings = both(
    several(_unchecked, _SETTINGS, _SETTINGS, "list of settings"),
    SupervisionSettings._make,
)
_events = several(several(_unchecked, 4, 4, "event"))


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to the agent of `init`: join, and then watch this process."""

    plan: JoinPlan = of(nested(JoinPlan))
    pid: int = of(number)
    settings: SupervisionSettings = of(_settings)


@dataclass(frozen=True, slots=True)
class Attach:
    """The first message to the agent of the wrapper, which answers with a `JoinResult`."""

    token: str = of(text(100))


@dataclass(frozen=True, slots=True)
class Raised:
    """The ranks have not met."""

    code: str = of(text(100))
    message: str = of(text(_LONG))
    hint: str = of(text(_LONG))


@dataclass(frozen=True, slots=True)
class Listen:
    """The script asks for rank 0's listening socket; `Listening` brings it, if it is there."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The answer, with one file or none; also to `Leave`, when the port is free."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The script does not need rank 0's listening socket: the agent is to answer there."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The script does not need this agent any more."""


@dataclass(frozen=True, slots=True)
class StartEnded:
    """From rank 0's script, for the report: how the start has ended; `Written` is the answer."""

    # The fields of a `StartFailure`; None: all ranks have started
    failure: tuple[Any, ...] | None = of(optional(several(_unchecked, 4, 4, "failure")))
    # Of the script, see `Phases`
    steps: dict[str, float] = of(table(20, _number), default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """The report of the start is written."""


@dataclass(frozen=True, slots=True)
class AskLog:
    """A command on all ranks asks what rank 0 has learned of the job."""


@dataclass(frozen=True, slots=True)
class Log:
    """The events so far."""

    events: tuple[Any, ...] = of(_events, default=())


@dataclass(frozen=True, slots=True)
class Measured:
    """From rank 0's script: what `check --allreduce` has measured, for the report of the job."""

    backend: str = of(text(100))
    sizes: tuple[tuple[float, float], ...] = of(several(several(_positive, 2, 2), 100))
    # Two nodes, and a rate, see `report/all_reduce`
    pairs: tuple[tuple[float, float, float], ...] = of(several(several(_number, 3, 3), MOST_PAIRS))
    median: float = of(_number)  # of the rates of all pairs; 0.0: there is none


FROM_SCRIPT = (
    Attach,
    AskStacks,
    Ready,
    Arrive,
    RequestStop,
    Leave,
    Listen,
    Keep,
    StartEnded,
    AskLog,
    Measured,
    Finish,
)
