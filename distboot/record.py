"""What one rank says of itself when the ranks meet."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from . import accelerators
from .errors import CODES, DistbootError, printable
from .facts import facts
from .placement import Placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeGuard

_LONGEST_TEXT = 1000  # characters
_MOST_FACTS = 100
_LARGEST = 1 << 32  # of any number in a record
_TEXTS = ("launcher", "host", "node", "process")
_NUMBERS = ("rank", "pid", "world_size")
_PLACE = ("local_rank", "local_world_size", "node_rank", "num_nodes")
_START_TIME = 19  # of proc_pid_stat(5), counted from the state: in clock ticks since the host has booted
_TIMES = ("clock", "patience", "started", "detected")


Problem = tuple[str, str, str]  # code, message and hint of an error


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank says of itself. None: it does not know.

    Attributes:
        node: host name, boot and network: equal on two ranks when they are on one host, or in one container that has
            a network of its own.
        process: random, and the same on all connections of one process: two containers may both have process 1.
        facts: pairs of name and value that should be the same on all ranks.
        device: id of the accelerator that this rank will use.
        problem: code, message and hint of the error for which it cannot take part.
        clock: seconds since the epoch, when it was sent.
        patience: seconds that the rank will wait for the others from then on.
        started: seconds since the epoch, when its process began; 0.0: it does not know.
        detected: the same, when it knew what it says here; 0.0: it does not know.
    """

    rank: int
    launcher: str
    host: str
    node: str
    pid: int
    process: str
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    facts: tuple[tuple[str, str], ...] = ()
    device: str | None = None
    problem: Problem | None = None
    clock: float = 0.0
    patience: float = 86400.0
    started: float = 0.0
    detected: float = 0.0

    def as_message(self) -> dict[str, object]:
        """The record as plain JSON types."""
        return {**asdict(self), "facts": dict(self.facts)}

    @classmethod
    def from_message(cls, message: object) -> Record:
        """The record in a message of somebody who may be anybody.

        Raises:
            TypeError, ValueError: it is none.
        """
        if not isinstance(message, dict):
            raise TypeError("it is no object")
        for name in _TEXTS:
            _check(_is_text(message.get(name)), name, "text")
        for name in (*_NUMBERS, *_PLACE):
            value = message.get(name)
            optional = value is None and name in _PLACE
            _check(optional or (type(value) is int and 0 <= value < _LARGEST), name, "number")
        for name in _TIMES:
            value = message.get(name)
            _check(isinstance(value, int | float) and 0 <= value < _LARGEST, name, "time")
        table = message.get("facts")
        if not isinstance(table, dict) or len(table) > _MOST_FACTS:
            raise TypeError("its facts are no table")
        _check(all(map(_is_text, (*table, *table.values()))), "facts", "table of texts")
        device, problem = message.get("device"), message.get("problem")
        _check(device is None or _is_text(device), "device", "text")
        _check(problem is None or is_problem(problem), "problem", "error")
        return cls(
            **{**message, "facts": tuple(table.items()), "problem": problem if problem is None else tuple(problem)}
        )


def is_problem(value: object) -> TypeGuard[Problem]:
    """Whether it is code, message and hint of an error, as somebody who may be anybody sent it."""
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_text, value))


def as_error(problem: Problem, whose: str) -> DistbootError:
    """The error that somebody else sent. His distboot may be newer and have a code that ours has not.

    Args:
        problem: as it was sent.
        whose: who has it, or says it; empty: nobody in particular.
    """
    code, message, hint = problem
    message, hint = ("\n".join(map(printable, text.split("\n"))) for text in (message, hint))
    said = f"{whose}: {message}" if whose else message
    return DistbootError(code if code in CODES else "rank-failed", said, hint)


def own_record(
    placement: Placement,
    environ: Mapping[str, str],
    *,
    framework: str = "torch",
    on_cpu: bool = False,
    problem: DistbootError | None = None,
) -> Record:
    """The record of this very process.

    Args:
        placement: of this process.
        environ: its environment.
        framework: what it is about to start.
        on_cpu: whether it is to use no accelerator.
        problem: for what it cannot take part.
    """
    host = socket.gethostname()
    ids = accelerators.visible(environ)
    return Record(
        rank=placement.rank,
        launcher=placement.launcher,
        host=host,
        node=f"{host}/{_boot_id()}/{_network()}",
        pid=os.getpid(),
        process=os.urandom(8).hex(),
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        num_nodes=placement.num_nodes,
        facts=facts(environ, len(ids), framework),
        device=None if on_cpu else accelerators.own(ids, environ, placement.local_rank),
        problem=as_problem(problem),
        started=_own_start(),
        detected=time.time(),
    )


def as_problem(error: DistbootError | None) -> Problem | None:
    """An error as it is sent."""
    return None if error is None else (error.code, error.message[:_LONGEST_TEXT], error.hint[:_LONGEST_TEXT])


def _check(fits: bool, name: str, kind: str) -> None:
    if not fits:
        raise TypeError(f"its {name} is no {kind}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _own_start() -> float:
    """When this process began, in seconds since the epoch; 0.0 where there is no /proc."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[_START_TIME])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return time.time() - age if ticks and age >= 0 else 0.0


def _boot_id() -> str:
    # Tells two hosts of the same name apart. Linux only; elsewhere the name has to do.
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _network() -> str:
    # Tells two containers of the same name on one host apart: each has a network of its own, or they are one node.
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return ""
