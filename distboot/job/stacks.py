"""Python stacks as text: where one process is, whether it waits for others, and equal ones grouped.

A frame is a text, `"load_batch (/job/data.py:41)"`, and a stack a tuple of them, the innermost
first. `agent/stack_reader` reads the stacks of a process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..base.text import escape_control, ranks_said
from ..rendezvous.protocol import of, several, text
from ..script.exceptions import is_of_distboot

# What is left once an uncaught exception has unwound the stack: our own hooks
_AT_ITS_END = "at the end of its script"
MOST_FRAMES = 48
_OUTERMOST = 16  # of them, where there are more
LONGEST_FRAME = 400  # characters
MOST_THREADS = 4  # besides the main one
# Bytes of one stack as JSON: with all threads, and what else is sent, less than the 64 kB of one message
_LONGEST_STACK = 9_000
_LONGEST_LINE, _LONGEST_LINES = (
    4_000,
    40_000,
)  # bytes as JSON: of one line, and of all that are sent
_REMEMBERED = 256  # stacks: those of thousands of ranks are alike
_MOST_GROUPS = 20  # of ranks, in the log
_MOST_CALLS = 6  # of the user's own code, in a line

_FRAME = re.compile(r"(.*) \((.*):(\d+)\)", re.DOTALL)
_DUMPED = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_RAISED = re.compile(r'  File "(.*)", line (\d+), in (.*)')  # of a traceback
_TRACEBACK = "Traceback (most recent call last):"
# Where each thread begins in what faulthandler writes; and how one begins that is not the current one.
THREADS = re.compile(r"^(?=Thread 0x|Current thread 0x)", re.MULTILINE)
ANOTHER = "Thread"
# What is not the user's own code: packages, the standard library, what has no file, and this package.
_FOREIGN = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python3\.\d+t?/|^<frozen |"
    r"/distboot/(agent|base|cli|detection|frameworks|host|job|rendezvous|report|script)/"
    r"|/distboot/(startup|tools)/"
    r"|/distboot/(context|initialize)\.py"
)
# Functions between the user's code and what it has called.
_WRAPPERS = (
    "wrapper",
    "inner",
    "inner_func",
    "_fn",
    "decorate_context",
    "_wrapped_call_impl",
    "_call_impl",
    "__call__",
)
# Where a process waits for others: torch, Horovod, what mpi4py is called with, JAX, TensorFlow, and our own keys.
_WAITS = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives|rendezvous|rpc/)|/horovod/|^mpi4py$|/jax/experimental/multihost_utils|/jax/_src/array"
    r"|/tensorflow/python/eager/execute|/distboot/(context|agent/session)\.py"
)
_stack = several(text(LONGEST_FRAME), MOST_FRAMES)
_OF_NO_INTEREST = re.compile(r"/tqdm/|distboot/script/progress\.py")


@dataclass(frozen=True, slots=True)
class Stacks:
    """Where a process is. `state` is what the kernel says of it: where it has no stack to show, or cannot go on."""

    main: tuple[str, ...] = of(_stack, default=())
    others: tuple[tuple[str, ...], ...] = of(several(_stack, MOST_THREADS), default=())
    state: str = of(text(200), default="")


def frame(function: str, file: str, line: int) -> str:
    """The text for a frame."""
    return f"{function[:100]} ({file[-LONGEST_FRAME + 120 :]}:{line})"


def from_dump(dump: str) -> Stacks | None:
    """What faulthandler has written of all threads; None: it is not there, or not whole."""
    threads = []
    for thread in THREADS.split(dump)[1:]:
        # The current one has taken the signal, which the kernel gives to the main thread.
        found = map(_DUMPED.match, thread.splitlines())
        threads.append(
            (
                not thread.startswith(ANOTHER),
                [frame(one[3], one[1], int(one[2])) for one in found if one],
            )
        )
    return _of_threads(threads)


def from_traceback(excerpt: str) -> Stacks | None:
    """Where an exception was raised, by the end of its traceback; None: that has no frames."""
    found = []
    for line in excerpt.rpartition(_TRACEBACK)[2].splitlines():
        raised = _RAISED.match(line)
        if raised is not None:
            found.append(frame(raised[3], raised[1], int(raised[2])))
    return _of_threads([(bool(found), found[::-1])])


def _of_threads(threads: Iterable[tuple[bool, list[str]]]) -> Stacks | None:
    """Those of the threads that matter, a deep one without its middle; None: there is no main one."""
    main, others = None, []
    for is_main, stack in threads:
        if len(stack) > MOST_FRAMES:
            del stack[MOST_FRAMES - _OUTERMOST : -_OUTERMOST]
        while len(json.dumps(stack)) > _LONGEST_STACK:
            del stack[len(stack) // 2]
        if is_main:
            main = tuple(stack)
        elif _matters(stack):
            others.append(tuple(stack))
    return None if main is None else Stacks(main, tuple(others[:MOST_THREADS]))


@lru_cache(_REMEMBERED)
def where(stacks: Stacks) -> str:
    """`"in all_reduce (train.py:84)"`: what the user's own code has called, or its own function; and where that is."""
    if not stacks.main:
        return escape_control(stacks.state)
    called, frames = _called(stacks.main)
    shown = frames or _without_distboot(stacks.main)
    if not shown:
        return escape_control(stacks.state or _AT_ITS_END)
    function, file, line = parts(shown[0])
    place = f"in {called or function} ({file.rpartition('/')[2]}:{line})"
    return escape_control(f"{place}, {stacks.state}" if stacks.state else place)


@lru_cache(_REMEMBERED)
def waits(stacks: Stacks) -> bool:
    """Whether the main thread waits for other processes, in what the user's own code has called, and can go on."""
    inner = stacks.main[: len(stacks.main) - len(_called(stacks.main)[1])]
    return not stacks.state and any(_WAITS.search(parts(one)[1]) for one in inner)


def may_compute(stacks: Stacks | None) -> bool:
    """Whether it waits, as far as `waits` tells, in what also computes: a function that TensorFlow has compiled."""
    return stacks is not None and "/tensorflow/" in parts(stacks.main[0])[1]


def fold(places: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Equal places once, with their ranks; those of fewest ranks first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(places):
        found.setdefault(places[rank], []).append(rank)
    return sorted(
        ((ranks, one) for one, ranks in found.items()), key=lambda each: (len(each[0]), each[0])
    )


def lines(places: Mapping[int, Stacks], first: Collection[int] = ()) -> list[str]:
    """A line for each place: `"ranks 0-2: all_reduce < train (train.py:84) < <module> (train.py:99)"`.

    Those of the ranks in `first` come first, and then those of fewest ranks.
    """
    groups = fold({rank: _described(stacks) for rank, stacks in places.items()})
    groups.sort(key=lambda group: not any(rank in first for rank in group[0]))
    shown = [
        line
        for ranks, text in groups[:_MOST_GROUPS]
        for line in f"{ranks_said(ranks)}: {text}".splitlines()
    ]
    left = sum(len(ranks) for ranks, _ in groups[_MOST_GROUPS:])
    return _fitting([*shown, *([f"{left} more ranks, at other places"] if left else [])])


def _fitting(shown: Sequence[str]) -> list[str]:
    """As many of these lines as one message can have, long ones cut short."""
    found: list[str] = []
    room = _LONGEST_LINES
    for each in shown:
        line = each
        while len(json.dumps(line)) > _LONGEST_LINE:
            line = f"{line[: len(line) * 3 // 4]}…"
        room -= len(json.dumps(line)) + 1
        if room < 0:
            return [*found, f"{len(shown) - len(found)} more lines"]
        found.append(line)
    return found


@lru_cache(_REMEMBERED)
def _described(stacks: Stacks) -> str:
    """What is called, and a line more for each other thread."""
    place = ", ".join(filter(None, (_calls(stacks.main), escape_control(stacks.state))))
    return "\n  another thread: ".join([place, *map(_calls, stacks.others)])


def _calls(stack: Sequence[str]) -> str:
    called, frames = _called(stack)
    own = [one for one in frames if not _FOREIGN.search(parts(one)[1])]
    if not own:
        own = _without_distboot(stack[:_MOST_CALLS])
    if stack and not own:
        return _AT_ITS_END
    names = [
        f"{function} ({file.rpartition('/')[2]}:{line})" for function, file, line in map(parts, own)
    ]
    more = ["…"] if len(names) > _MOST_CALLS else []
    return escape_control(" < ".join([*([called] if called else []), *names[:_MOST_CALLS], *more]))


def _called(stack: Sequence[str]) -> tuple[str, Sequence[str]]:
    """What the innermost frame of the user's own code has called, if anything; and the stack from that frame on."""
    called = ""
    for number, one in enumerate(stack):
        function, file, _ = parts(one)
        if not _FOREIGN.search(file) and file != "mpi4py":
            return called, stack[number:]
        called = called if function in _WRAPPERS else function
    return "", ()


def _without_distboot(stack: Sequence[str]) -> list[str]:
    """A stack without the frames of this package, which are no place of the user's."""
    found = []
    for one in stack:
        _, file, _ = parts(one)
        if not is_of_distboot(file):
            found.append(one)
    return found


def _matters(stack: Sequence[str]) -> bool:
    files = [parts(one)[1] for one in stack]
    is_of_python = all("/lib/python3" in file and "-packages/" not in file for file in files)
    return not is_of_python and not any(map(_OF_NO_INTEREST.search, files))


def parts(one: str) -> tuple[str, str, str]:
    """Function, file and line of a frame."""
    found = _FRAME.fullmatch(one)
    return (found[1], found[2], found[3]) if found else (one, "", "")
