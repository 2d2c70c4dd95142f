"""The job of an agent other than rank 0's as a table: what happens, and what it leads to.

The agent has rank 2 of four ranks on two nodes; rank 0 is on the other node. What happens is a message of its own rank
(`Own`), one of rank 0's agent (`From0`), or something about the connection or the clock. An effect is a line of text:

    rank 0 <- Exited           a message of the rank to rank 0's agent
    rank 2 <- Release          an answer to the script
    do StopAt 44               what rank 0's job asks of every agent
    stop: rank 3               our own ranks are stopped, for this cause
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from inside import replace
from supervised import raised

from distboot.base.settings import SupervisionSettings
from distboot.job.effects import (
    DoubtRank0,
    Effect,
    Execute,
    QuestionPeers,
    ReleaseReads,
    Reply,
    Report,
    Say,
    Stop,
)
from distboot.job.exit_status import ExitStatus
from distboot.job.facts import Facts, KeyWait
from distboot.job.follower import Follower
from distboot.job.messages import (
    Abort,
    CountReads,
    Exited,
    Failing,
    Reads,
    Register,
    StopAt,
    Terminating,
)
from distboot.job.rank_0_link import Rank0Link
from distboot.job.root_cause import RootCause, ranks_of
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import (
    BARRIER,
    READY,
    Arrive,
    AskStacks,
    Detach,
    Failed,
    Go,
    Hello,
    Key,
    Ready,
    Release,
    RequestStop,
    ShowStacks,
)
from distboot.rendezvous.protocol import ProtocolError

RANK = 2
GRACE = 30.0
_MEMBERSHIP = Membership(("host-0", "host-1"), ((0, 1), (2, 3)))
KEY = Key(BARRIER)
AT_START = Key(READY)
LIMIT = 60.0  # seconds that the script waits at a key
WELL = ExitStatus(code=0, when=1.0)
CODE_3 = ExitStatus(code=3, when=1.0)
BUG = raised("ValueError: boom", "train.py:7", when=1.0)
OF_A_PEER = raised("RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:3456")
OTHER_FAILED = Abort(RootCause((3,), True, "rank 3 failed first: exit code 3"))
OTHER_FAILED_ONCE = Abort(replace(OTHER_FAILED.root_cause, restarts=True))
OWN_FAILED = Abort(RootCause((RANK,), True, "rank 2 failed first: exit code 3"))
STOPPED_BY_TERM = Abort(
    RootCause((RANK,), False, "stopped by an external SIGTERM: rank 2 got it first, on host-1")
)
NO_DRIVER = Failed(("device-failed", "no driver", ""))
UNREACHABLE = "gave no answer for 15 s, though its host answers (a firewall?)"


class Own(NamedTuple):
    """The own rank says something."""

    message: object


class From0(NamedTuple):
    """Rank 0's agent says something."""

    message: object


class Lost(NamedTuple):
    """The connection has ended, or rank 0's host does not answer."""


class Silent(NamedTuple):
    """Rank 0's host does not answer when a signal arrives."""


class CutOff(NamedTuple):
    """Rank 0's host answers, but nothing gets through on the connection."""


class Left(NamedTuple):
    """Rank 0 leaves the job."""

    message: Detach


class Later(NamedTuple):
    """Time passes, in which nothing else happens."""

    seconds: float


Event = Own | From0 | Lost | Silent | CutOff | Left | Later
Rows = Sequence[tuple[Event, Sequence[str]]]


class PureFollower:
    """The job of the agent, without a connection or a clock."""

    def __init__(self, *, is_held: bool = False, may_restart: bool = False) -> None:
        self.now = 1000.0
        ranks = ranks_of(_MEMBERSHIP)
        members = {rank: ranks[rank] for rank in (0, RANK)}
        members[0].is_local = False
        members[0].connection = self
        self.facts = Facts(members, SupervisionSettings(grace=GRACE), is_held, may_restart)
        self.link = Rank0Link()
        self.job = Follower(self.facts, self.link)
        self._events: dict[type, Callable[[Any], list[Effect]]] = {
            Own: self._take,
            From0: lambda event: self.job.told(RANK, event.message, self.now),
            Lost: lambda _: self._end(self.job.lost("the connection closed", self.now)),
            Silent: lambda _: self.job.silent(self.now, " when SIGTERM arrived"),
            CutOff: self._cut_off,
            Left: lambda event: self._end(self.job.left(event.message)),
            Later: self._wait,
        }

    def refuses(self, message: object) -> bool:
        """Whether rank 0's agent must not say that."""
        try:
            self.after(From0(message))
        except ProtocolError as error:
            return "which only another rank may" in str(error)
        return False

    def after(self, event: Event) -> list[str]:
        """What an event leads to."""
        lines = []
        for effect in self._events[type(event)](event):
            lines.append(_line(effect))
            if isinstance(effect, Reply):
                self.facts.waits.pop(effect.rank, None)
        return lines

    def _take(self, event: Own) -> list[Effect]:
        message = event.message
        if isinstance(message, Arrive | Ready):
            until = self.now + message.limit
            self.facts.waits[RANK] = KeyWait(message.key, until, lambda _: None)
        return self.job.take(RANK, message, self.now)

    def _end(self, effects: list[Effect]) -> list[Effect]:
        self.link.is_there = False
        self.link.gone_at = self.now
        return effects + self.job.gone(self.now)

    def _cut_off(self, _: CutOff) -> list[Effect]:
        self.link.unreachable_since = self.now - 15
        return self.job.unreachable(UNREACHABLE, self.now)

    def _wait(self, event: Later) -> list[Effect]:
        self.now += event.seconds
        return self.job.tick(self.now)


_NO_REPORTS = "failures of other ranks are no longer reported"
_GONE = ["do ShowStacks", "let reads go on"]

ROWS: dict[str, Rows] = {
    "what a rank says is sent on": [
        (Own(Register(102)), ["rank 0 <- Register"]),
        (Own(Reads(7)), ["rank 0 <- Reads"]),
        (Own(Failing(BUG)), ["rank 0 <- Failing"]),
    ],
    "rank 0 answers who waits": [
        (Own(Arrive(KEY, LIMIT)), ["rank 0 <- Arrive"]),
        (From0(Release(KEY)), ["rank 2 <- Release"]),
        (Later(LIMIT), []),
    ],
    "rank 0 does not answer who waits": [
        (Own(Arrive(KEY, LIMIT)), ["rank 0 <- Arrive"]),
        (Later(LIMIT), ["rank 2 <- Failed missing-rank"]),
    ],
    "rank 0 is lost while a rank waits": [
        (Own(Arrive(KEY, LIMIT)), ["rank 0 <- Arrive"]),
        (Lost(), ["stop: rank 0", *_GONE, "rank 2 <- Failed missing-rank"]),
        (Own(Arrive(KEY, LIMIT)), ["rank 2 <- Failed missing-rank"]),
    ],
    "who gets ready later hears why rank 0 cannot": [
        (From0(NO_DRIVER), ["rank 2 <- Failed device-failed"]),
        (Own(Ready(limit=LIMIT)), ["rank 2 <- Failed device-failed"]),
    ],
    "rank 0 says why all stop, and then the exit code": [
        (From0(OTHER_FAILED), ["stop: rank 3"]),
        (From0(OTHER_FAILED), ["stop: rank 3"]),
    ],
    "a rank fails, and rank 0 decides": [
        (Own(Exited(CODE_3)), ["rank 0 <- Exited", "does rank 0 answer?"]),
    ],
    "a rank ends well": [(Own(Exited(WELL)), ["rank 0 <- Exited"])],
    "a rank fails while rank 0 cannot be reached": [
        (
            CutOff(),
            [
                (
                    f"say: warning: rank 0 on host-0 (node 0, local rank 0) {UNREACHABLE}; "
                    "this rank continues without failure detection until it answers again"
                ),
                "do ShowStacks",
            ],
        ),
        (Own(Exited(CODE_3)), ["rank 0 <- Exited", "stop: rank 2"]),
    ],
    "a rank ends after it was told why": [
        (From0(OTHER_FAILED), ["stop: rank 3"]),
        (Own(Exited(ExitStatus(signal=15))), ["rank 0 <- Exited"]),
        (Lost(), _GONE),
    ],
    "rank 0 ends well, and leaves the others": [
        (
            Left(Detach(ended=True)),
            [
                f"say once: rank 0 has exited; {_NO_REPORTS}",
                *_GONE,
            ],
        ),
        (Own(RequestStop("user")), ["do StopAt 1"]),
        (Own(AskStacks()), ["rank 0 <- AskStacks", "do ShowStacks"]),
    ],
    "the agent of rank 0 has a defect": [
        (
            Left(Detach(gave_up=True)),
            [
                f"say once: the agent of rank 0 has given up; {_NO_REPORTS}",
                *_GONE,
            ],
        ),
    ],
    "rank 0 is lost once the ranks have ended": [
        (Own(Exited(WELL)), ["rank 0 <- Exited"]),
        (Lost(), _GONE),
    ],
    "rank 0 leaves once the ranks have ended": [
        (Own(Exited(WELL)), ["rank 0 <- Exited"]),
        (Left(Detach(ended=True)), _GONE),
    ],
    "a rank is asked to stop": [
        (Own(RequestStop("user")), ["rank 0 <- RequestStop"]),
        (From0(CountReads()), ["do CountReads"]),
        (From0(StopAt(44)), ["do StopAt 44"]),
    ],
    "a signal asks whether rank 0 is there": [
        (Own(Terminating(15)), ["ask the silent hosts", "rank 0 <- Terminating"]),
        (Silent(), ["stop: rank 0"]),
    ],
}
# What is not for every job: what happens first, before all are ready
STARTING: dict[str, Rows] = {
    "all are ready": [
        (Own(Ready(limit=LIMIT)), ["rank 0 <- Ready"]),
        (From0(Go()), ["do Go"]),
    ],
    "rank 0 is lost before all are ready": [
        (Own(Ready(limit=LIMIT)), ["rank 0 <- Ready"]),
        (Lost(), [*_GONE, "rank 2 <- Failed rank-failed"]),
    ],
    "a failure of the start is not reported": [
        (Own(Failing(BUG)), []),
        (Own(Terminating(15)), []),
        (Own(Exited(CODE_3)), ["rank 0 <- Exited"]),
    ],
}
NOT_FROM_RANK_0 = (Exited(WELL), Arrive(KEY, LIMIT), Hello("job", "0" * 32), Reads(1))

_SECONDARY = Exited(OF_A_PEER)
_WELL = Exited(WELL)
_FAILED = Exited(CODE_3)
_ASKS_FOR_MORE = Exited(ExitStatus(code=143, when=1.0))


class Stay(NamedTuple):
    """What has happened, and how many seconds after that the agent may exit."""

    events: Sequence[Event]
    seconds: float
    is_held: bool = False
    may_restart: bool = False


STAYS = {
    "ended well": Stay([Own(_WELL)], 0.0),
    "failed, not told why": Stay([Own(_FAILED)], 1.0),
    "failed of a peer, not told why": Stay([Own(_SECONDARY)], 11.0),
    "all may begin again": Stay([Own(_WELL)], inf, may_restart=True),
    "rank 0 is gone": Stay([Left(Detach()), Own(_WELL)], 0.0),
    "stopped for another one, told at once": Stay([From0(OTHER_FAILED), Own(_FAILED)], 0.0),
    "failed of a peer: the first one is seen before": Stay(
        [From0(OTHER_FAILED), Own(_SECONDARY)], 0.15
    ),
    "a wrapper waits for the exit code of the job": Stay(
        [From0(OTHER_FAILED), Own(_FAILED)], GRACE + 3.0, is_held=True
    ),
    "a wrapper of the first one, whose rank 0 is gone": Stay(
        [From0(OWN_FAILED), Own(_FAILED), Lost()], 0.0, is_held=True
    ),
    "another round may be called off": Stay(
        [From0(OTHER_FAILED_ONCE), Own(_FAILED)], GRACE + 3.0, is_held=True, may_restart=True
    ),
    "another round follows, as rank 0 has left": Stay(
        [From0(OTHER_FAILED_ONCE), Own(_FAILED), Lost()], 0.0, is_held=True, may_restart=True
    ),
    "stopped by a signal, and saved": Stay([From0(STOPPED_BY_TERM), Own(_WELL)], 0.0, is_held=True),
    "stopped by a signal, without a wrapper": Stay(
        [From0(STOPPED_BY_TERM), Own(_ASKS_FOR_MORE)], 0.0
    ),
    "a wrapper that a signal stopped waits for those that save": Stay(
        [From0(STOPPED_BY_TERM), Own(_ASKS_FOR_MORE)], GRACE + 3.0, is_held=True
    ),
    "nor does it go first where its script missed a peer": Stay(
        [From0(STOPPED_BY_TERM), Own(_SECONDARY)], GRACE + 3.0, is_held=True
    ),
    "a wrapper that a signal stopped, let go by rank 0": Stay(
        [From0(STOPPED_BY_TERM), Own(_ASKS_FOR_MORE), Left(Detach(ended=True))], 0.0, is_held=True
    ),
    "a wrapper whose rank 0 is gone": Stay(
        [From0(OTHER_FAILED), Own(_FAILED), Lost()], 0.15, is_held=True
    ),
}


def _line(effect: Effect) -> str:
    match effect:
        case Report():
            return f"rank 0 <- {_said(effect.message)}"
        case Reply():
            return f"rank {effect.rank} <- {_said(effect.message)}"
        case Execute():
            return f"do {_said(effect.message)}"
        case Say():
            return f"say{' once' if effect.topic else ''}: {effect.text}"
        case Stop():
            return f"stop: rank {effect.cause.ranks[0]}"
        case QuestionPeers():
            return "ask the silent hosts"
        case DoubtRank0():
            return "does rank 0 answer?"
        case ReleaseReads():
            return "let reads go on"
    raise AssertionError(effect)


def _said(message: object) -> str:
    name = type(message).__name__
    if isinstance(message, Failed):
        return f"{name} {message.problem[0]}"
    if isinstance(message, StopAt):
        return f"{name} {message.read}"
    if isinstance(message, ShowStacks):
        assert message.lines[0].startswith("rank 0, which ")
    return name
