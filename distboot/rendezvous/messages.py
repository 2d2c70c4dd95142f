"""The messages of a job, in the order in which they are due.

docs/explanation/rendezvous.md has them in a table. Rank 0 answers only when all ranks have
reported. In place of Members and Go it may send Failed, which ends the job on every rank: a rank is
missing, there twice, does not fit or has failed. In place of any message it may send Refused, which
ends this connection only. How a rank ends is in `job.messages`.
"""

from __future__ import annotations

from typing import ClassVar

from ..base.dataclass import dataclass
from ..base.errors import CODES, DistbootError
from ..base.patterns import pattern
from ..base.text import escape_control, is_list_of_cpus, without_secret
from .protocol import (
    VERSION,
    both,
    flag,
    in_range,
    integer,
    nested,
    number,
    of,
    optional,
    several,
    shared,
    text,
    time_or_duration,
    valid,
)

Problem = tuple[str, str, str]  # code, message and hint of an error
LONGEST_TEXT = 1000  # characters
LONGEST_OFFER = 300  # characters
LONGEST_FAILURE = 500  # characters
_LONGEST_LINE = 4000  # characters of a line for users
_MOST_LINES = 200
# The names of keys
BARRIER = "barrier()"
MAIN_FIRST = "main_first()"
LOCAL_MAIN_FIRST = "local_main_first()"
READY = "init()"
SERVE = "parameter servers"  # these wait until rank 0 is done
_KEY_NAMES = (BARRIER, MAIN_FIRST, LOCAL_MAIN_FIRST, READY, SERVE)
MOST_RANKS_A_NODE = 9999
MOST_ROUNDS = 1_000_000
# Hints: if VERSION differs, or the framework
ONE_DISTBOOT = "install the same version of distboot on all nodes"
SAME_FRAMEWORK = (
    "let all ranks call init() with the same arguments, and give the wrapper the same --framework"
)

line = text(LONGEST_TEXT)
port = integer(0, 65535, "port")
cpu_list = both(text(4000), valid(is_list_of_cpus, "list of CPUs"))
_count = integer(1, what="count")
_round = integer(0, MOST_ROUNDS, "number of restarts")
heartbeat_timeout = in_range((int, float), 2, 86400, "heartbeat timeout")
_problem = several(line, 3, least=3, what="error")
_facts = shared(several(several(line, 2, least=2, what="list of names and values"), 100))
# Names and values, as `host.shared_variables` bounds them
shared_variables = several(several(text(1 << 14), 2, least=2, what="variable"), 100)
_run = several(number, 2, least=2, what="first rank and number of ranks")
_offer = both(text(LONGEST_OFFER), valid(str.isprintable, "printable text"))
_key_name = valid(lambda value: value in _KEY_NAMES, "name of a key")
_NONCE = pattern("[0-9a-f]{32}")
# A lambda, so that it is compiled when it is used
_nonce = both(text(32), valid(lambda value: _NONCE.fullmatch(value), "nonce"))  # noqa: PLW0108


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message. It has these fields in every version."""

    job: str = of(text(100))
    nonce: str = of(_nonce)
    version: int = of(number, default=VERSION)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Rank 0's answer, the first message that is authenticated."""

    challenge: str = of(_nonce)


@dataclass(frozen=True, slots=True)
class Refused:
    """This connection ends."""

    why: str = of(line)
    # Whether it ends for the version of the protocol: then the job ends, too
    incompatible: bool = of(flag, default=False)


@dataclass(frozen=True, slots=True)
class Key:
    """A place where ranks wait for each other."""

    # Of the call, for example "main_first()"; "init()" is where all get ready
    name: str = of(_key_name)
    node: int | None = of(optional(number), default=None)  # whose ranks these are; None: all
    count: int = of(_count, default=1)  # how often they have made this call

    @property
    def place(self) -> tuple[str, int | None]:
        """What is the same for all counts."""
        return self.name, self.node

    @property
    def is_for_all(self) -> bool:
        """Whether all ranks wait for all others; else for a leader."""
        return self.name in (BARRIER, READY)

    @property
    def text(self) -> str:
        """`"local_main_first() on node 1"`."""
        if self.node is None:
            return self.name
        return f"{self.name} on node {self.node}"


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot start, on every rank that receives this; with a key: the key has failed."""

    problem: Problem = of(_problem)
    key: Key | None = of(optional(nested(Key)), default=None)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The report of one rank; or of the agent of a node, with the numbers of nodes.

    None: not known. Times are in seconds since the epoch; 0.0: not known.
    """

    rank: int = of(number)
    launcher: str = of(line)
    host: str = of(line)
    # Host, boot, network: equal for ranks on one host, or in one container with its network
    node: str = of(line)
    pid: int = of(number)
    # Random, the same on all its connections: two containers may both have process 1
    process: str = of(line)
    world_size: int = of(number)
    local_rank: int | None = of(optional(number), default=None)
    local_world_size: int | None = of(optional(number), default=None)
    node_rank: int | None = of(optional(number), default=None)
    num_nodes: int | None = of(optional(number), default=None)
    # Names and values, which should be the same on all ranks
    facts: tuple[tuple[str, str], ...] = of(_facts, default=())
    # Id of the accelerator that this rank will use
    device: str | None = of(optional(line), default=None)
    problem: Problem | None = of(optional(_problem), default=None)  # for which it cannot take part
    clock: float = of(time_or_duration, default=0.0)  # when this was sent
    # Seconds that it will wait for the others from then on
    patience: float = of(time_or_duration, default=86400.0)
    started: float = of(time_or_duration, default=0.0)  # when its process began
    detected: float = of(time_or_duration, default=0.0)  # when it had detected all this
    # How many ranks the agent starts, for its node; 0: this is a rank itself
    ranks: int = of(integer(0, MOST_RANKS_A_NODE, "number of ranks of one node"), default=0)
    # Of the job, that comes next as far as it knows; 0 also for an agent that is new
    round: int = of(_round, default=0)
    max_restarts: int = of(_round, default=0)  # what it was started with
    heartbeat_timeout: float = of(heartbeat_timeout, default=15.0)  # seconds, likewise
    # To which its launcher has bound it: "0-3,8"; empty: to none
    cpus: str = of(cpu_list, default="")
    # What tells the file to which its agent prints from others; empty: a stream that ranks share
    log: str = of(text(100), default="")


@dataclass(frozen=True, slots=True)
class Members:
    """The whole job, with the fields of `Membership`."""

    hosts: tuple[str, ...] = of(several(line))
    # First and number of each run of ranks
    nodes: tuple[tuple[tuple[int, int], ...], ...] = of(several(several(_run)))
    master_addr: str | None = of(optional(line))
    by_node: bool = of(flag, default=False)
    round: int = of(_round, default=0)
    max_restarts: int = of(_round, default=0)
    heartbeat_timeout: float = of(heartbeat_timeout, default=15.0)
    resume_port: int = of(port, default=0, compare=False)
    shared: tuple[tuple[str, str], ...] = of(shared_variables, default=())


@dataclass(frozen=True, slots=True)
class Resume:
    """An agent has lost its connection, and continues over this one."""

    agent: int = of(number)  # its first rank
    process: str = of(line)  # as in its `WorkerInfo`
    round: int = of(_round)
    received: int = of(integer(most=1 << 62))  # messages of rank 0's agent, in this round


@dataclass(frozen=True, slots=True)
class Resumed:
    """Rank 0's answer, before the messages that the other agent has not received."""

    received: int = of(integer(most=1 << 62))  # messages of the other agent


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank is ready to start its framework, or not."""

    # Id of its accelerator, if the framework knows it
    device: str | None = of(optional(line), default=None)
    # For all others, which get it with Go
    offer: str | None = of(optional(_offer), default=None)
    problem: Problem | None = of(optional(_problem), default=None)  # for which it is not ready
    framework: str = of(line, default="")  # has to be the same on all ranks; empty: any
    count: int = of(_count, default=1)  # how often it has got ready
    limit: float = of(time_or_duration, default=86400.0)  # seconds that it waits for the others

    @property
    def key(self) -> Key:
        """The key at which it waits."""
        return Key(READY, None, self.count)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank offers."""

    rank: int = of(number)
    offer: str = of(_offer)


@dataclass(frozen=True, slots=True)
class Go:
    """All ranks are ready."""

    key: ClassVar[None] = None  # it ends the wait at any key

    offers: tuple[Offer, ...] = of(several(nested(Offer)), default=())
    # Whether they are to stop at their first read of `ctx.preempted`
    stops: bool = of(flag, default=False)


@dataclass(frozen=True, slots=True)
class Arrive:
    """A rank has arrived at a key."""

    key: Key = of(nested(Key))
    limit: float = of(time_or_duration)  # seconds for which it waits
    # Whether it is the leader, for which the others wait, and has left its block
    leads: bool = of(flag, default=False)
    # Why its block failed; None: it did not
    failure: str | None = of(optional(text(LONGEST_FAILURE)), default=None)


@dataclass(frozen=True, slots=True)
class Release:
    """The rank may continue."""

    key: Key = of(nested(Key))


Answer = Go | Release | Failed  # to a script that waits at a key


@dataclass(frozen=True, slots=True)
class Leave:
    """The script of a rank has closed its context, and uses no more keys."""


@dataclass(frozen=True, slots=True)
class AskStacks:
    """A user on this host asks rank 0's agent where all ranks are."""

    pid: int = of(number, default=0)  # a process of the job


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """The answer: lines of text."""

    lines: tuple[str, ...] = of(several(text(_LONGEST_LINE), _MOST_LINES))


@dataclass(frozen=True, slots=True)
class RequestStop:
    """A rank is asked to stop, and all with it, at the same read of `ctx.preempted`."""

    why: str = of(line)  # for example "SIGUSR1"
    lasts: bool = of(flag, default=True)  # whether the stop also holds for the next context


@dataclass(frozen=True, slots=True)
class Detach:
    """This connection is not used any more, and that is not a failure."""

    # Whether the reason is that rank 0 has ended well, or a defect of this agent
    ended: bool = of(flag, default=False)
    gave_up: bool = of(flag, default=False)


def as_error(problem: Problem, whose: str) -> DistbootError:
    """The error that another process sent.

    `whose` names that process; empty: it is not named.
    """
    code, message, hint = problem
    if code not in CODES:  # of a newer distboot
        code = "rank-failed"
    message = escape_lines(message)
    if whose:
        message = f"{whose}: {message}"
    return DistbootError(
        code,
        message=message,
        hint=escape_lines(hint),
    )


def escape_lines(text: str) -> str:
    """Without control characters, except for the ends of lines."""
    lines = text.split("\n")
    return "\n".join(map(escape_control, lines))


def as_problem(error: DistbootError) -> Problem:
    """An error as it is sent, without the secret."""
    message = without_secret(error.message)
    hint = without_secret(error.hint)
    return error.code, message[:LONGEST_TEXT], hint[:LONGEST_TEXT]
