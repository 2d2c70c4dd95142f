"""Python stacks as text: where a process is, whether it waits for others, equal stacks grouped.

A frame is a text, `"load_batch (/job/data.py:41)"`, and a stack a tuple of frames, the innermost
first. `agent/stack_reader` reads the stacks of a process, and of the worker for which it waits.

The place of a process is the innermost frame of the user's own code, and what that has called: the
function of the frame before it, without wrappers such as decorators. Packages, the standard library
and distboot are not the user's own code.

Stacks travel in messages of at most 64 kB. So a deep stack is sent without its middle, and lines
are cut short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from ..base.dataclass import dataclass
from ..base.patterns import pattern
from ..base.text import escape_control, ranks_said
from ..rendezvous.protocol import of, several, text
from ..script.exceptions import is_of_distboot

# After an uncaught exception has unwound the stack, only distboot's hooks are left.
AT_ITS_END = "at the end of its script"
MOST_FRAMES = 48
_OUTERMOST = 16  # of them, if there are more
LONGEST_FRAME = 400  # characters
_LONGEST_STACK = 9_000  # bytes of one stack as JSON: the message has several, and more
_LONGEST_LINE = 4_000  # bytes of one line as JSON
_LONGEST_LINES = 40_000  # bytes of all lines that are sent
_REMEMBERED = 256  # stacks: those of thousands of ranks are alike
_MOST_GROUPS = 20  # of ranks, in the log
_MOST_CALLS = 6  # of the user's own code, in a line

_FRAME = pattern(r"(.*) \((.*):(\d+)\)", re.DOTALL)
_DUMPED = pattern(r'  File "(.*)", line (\d+) in (.*)')  # by faulthandler
_RAISED = pattern(r'  File "(.*)", line (\d+), in (.*)')  # in a traceback
ONE_THREAD = "Stack (most recent call first):"  # how faulthandler begins that of one thread
_TRACEBACK = "Traceback (most recent call last):"
_FOREIGN = pattern(
    r"/(site|dist)-packages/|/lib(64)?/python3\.\d+t?/|^<frozen |"
    r"/distboot/(agent|base|cli|detection|frameworks|host|job|rendezvous|report|script)/"
    r"|/distboot/(startup|tools)/"
    r"|/distboot/(context|initialize)\.py"
    r"|^mpi4py$"
)
# Frames between the user's code and what it has called
_WRAPPERS = pattern(
    r"(wrapper|inner|inner_func|_fn|decorate_context|_wrapped_call_impl|_call_impl|__call__) \("
    r"|\S+ \(.*/tqdm/"
    # Of TensorFlow and Keras around each of their methods; and around a compiled function
    r"|error_handler \(.*/traceback_utils\.py|\S+ \(.*/tensorflow/python/eager/"
)
_DEBUGGERS = pattern(r"/(bdb|pdb)\.py:|/pydevd|/debugpy/")
# Where a process waits for others
_WAITS = pattern(
    r"/torch/distributed/(distributed_c10d|_functional_collectives|rendezvous|rpc/)"
    r"|/horovod/"
    r"|\(mpi4py:"
    r"|/jax/experimental/multihost_utils|/jax/_src/array"
    r"|/tensorflow/python/eager/execute"
    r"|/distboot/(context|agent/session)\.py"
)
# Where it waits in a collective operation that torch counts; not in one of two ranks
OPERATION = pattern(
    r"^((all_)?(reduce|gather|to_all)\w*|barrier|broadcast\w*|scatter\w*|reduce_scatter\w*) "
    r"\(.*/torch/distributed/(distributed_c10d|_functional_collectives)"
)
_stack = several(text(LONGEST_FRAME), MOST_FRAMES)


@dataclass(frozen=True, slots=True)
class Stacks:
    """Where a process is.

    `state` is what the kernel reports of it, if it has no stack to show or cannot continue.
    """

    main: tuple[str, ...] = of(_stack, default=())
    state: str = of(text(200), default="")
    # For which worker the main thread waits: "its worker in read_slowly (data.py:41)"
    worker: str = of(text(LONGEST_FRAME), default="")


def frame(function: str, file: str, line: int) -> str:
    """The text for a frame."""
    return f"{function[:100]} ({file[-LONGEST_FRAME + 120 :]}:{line})"


def parts(one: str) -> tuple[str, str, str]:
    """Function, file and line of a frame."""
    found = _FRAME.fullmatch(one)
    if found is None:
        return one, "", ""
    return found[1], found[2], found[3]


def _file_of(one: str) -> str:
    _, file, _ = parts(one)
    return file


def is_users_own(one: str) -> bool:
    """Whether a frame is of the user's own code."""
    file = _file_of(one)
    return not _FOREIGN.search(file)


def _is_not_of_distboot(one: str) -> bool:
    file = _file_of(one)
    return not is_of_distboot(file)


# From what Python has written


def from_dump(dump: str) -> Stacks | None:
    """The last stack in what faulthandler has written; None: it has not begun to write one."""
    _, beginning, last = dump.rpartition(ONE_THREAD)
    if not beginning:
        return None
    frames = _frames(_DUMPED, last)
    stack = _shortened(frames)
    return Stacks(tuple(stack))


def from_traceback(excerpt: str) -> Stacks | None:
    """The stack that raised an exception, from the end of its traceback; None: it has no frames."""
    _, _, last = excerpt.rpartition(_TRACEBACK)
    found = _frames(_RAISED, last)
    if not found:
        return None
    found.reverse()
    stack = _shortened(found)
    return Stacks(tuple(stack))


def _frames(pattern: re.Pattern[str], text: str) -> list[str]:
    found = []
    for row in text.splitlines():
        match = pattern.match(row)
        if match is not None:
            file, line, function = match.groups()
            found.append(frame(function, file, int(line)))
    return found


def _shortened(stack: list[str]) -> list[str]:
    """A stack without its middle, if it is deep."""
    if len(stack) > MOST_FRAMES:
        stack = stack[: MOST_FRAMES - _OUTERMOST] + stack[-_OUTERMOST:]
    while len(json.dumps(stack)) > _LONGEST_STACK:
        middle = len(stack) // 2
        stack = stack[:middle] + stack[middle + 1 :]
    return stack


# Where a process is


@lru_cache(_REMEMBERED)
def where(stacks: Stacks) -> str:
    """`"in all_reduce (train.py:84)"`: what the user's own code has called, and the line of that.

    The function itself, if it has called nothing.
    """
    called, frames = _called(stacks.main)
    shown = [*frames, *filter(_is_not_of_distboot, stacks.main)]
    if not shown:
        state = escape_control(stacks.state)
        return state or AT_ITS_END
    place = _place(shown[0], called)
    if has_called(stacks, _DEBUGGERS):
        _, _, line = place.rpartition(" (")
        place = f"at a breakpoint ({line}"
    return _joined(stacks, place)


def _joined(stacks: Stacks, place: str) -> str:
    """The place of the main thread, and why it does not go on, as far as that is known."""
    known = filter(None, (place, stacks.worker, stacks.state))
    text = ", ".join(known)
    return escape_control(text)


def waits(stacks: Stacks) -> bool:
    """Whether the user's own code has called what waits for other processes, and can go on."""
    if stacks.state:
        return False
    return has_called(stacks, _WAITS)


@lru_cache(_REMEMBERED)
def has_called(stacks: Stacks, frames: re.Pattern[str]) -> bool:
    """Whether the user's own code has called one of these frames."""
    _, own = _called(stacks.main)
    called = stacks.main[: len(stacks.main) - len(own)]
    return any(map(frames.search, called))


def may_compute(stacks: Stacks | None) -> bool:
    """Whether a process that waits, by `waits`, may also compute.

    A function that TensorFlow has compiled does both.
    """
    if stacks is None:
        return False
    innermost = "".join(stacks.main[:1])
    return "/tensorflow/" in _file_of(innermost)


def partings(stacks: Mapping[int, Stacks | None]) -> dict[int, str]:
    """By rank, the first frame that is not the same in all stacks, the outermost frame first.

    `" in backward (tensor.py:84)"`; empty: they are the same, or none is known.
    """
    paths = [one.main[::-1] for one in filter(None, stacks.values())]
    levels = zip(*paths, strict=False)
    differing = filter(lambda frames: len(set(frames)) > 1, levels)
    parted = next(differing, ())
    places = map(_place, parted)
    in_a_line = map(" {}".format, places)
    return dict(zip(stacks, in_a_line, strict=False))


def _place(one: str, called: str = "") -> str:
    """`"in load_batch (data.py:41)"`: the function of a frame, or what it has called, and its line."""
    function, file, line = parts(one)
    function = called or function
    name = _name_of(file)
    return escape_control(f"in {function} ({name}:{line})")


def _called(stack: Sequence[str]) -> tuple[str, Sequence[str]]:
    """What the innermost frame of the user's own code has called, and the stack from there on."""
    called = ""
    for number, one in enumerate(stack):
        if is_users_own(one):
            return called, stack[number:]
        if _WRAPPERS.match(one) is None:
            called, _, _ = parts(one)
    return "", ()


def _name_of(file: str) -> str:
    return file.rpartition("/")[2]


# For the log


def fold(places: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Equal places once, with their ranks; the place of the fewest ranks first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(places):
        found.setdefault(places[rank], []).append(rank)
    groups = list(zip(found.values(), found, strict=True))
    groups.sort(key=lambda group: (len(group[0]), group[0]))
    return groups


def lines(
    places: Mapping[int, Stacks | None],  # by rank; None: not known
    first: Collection[int] = (),  # ranks whose places come first; then those of the fewest ranks
) -> list[str]:
    """`["ranks 0-2: all_reduce < train (train.py:84) < <module> (train.py:99)"]`, for each place."""
    known = {}
    for rank, stacks in places.items():
        if stacks is not None:
            known[rank] = _described(stacks)
    groups = fold(known)
    groups.sort(key=lambda group: set(group[0]).isdisjoint(first))
    shown: list[str] = []
    left_out = len(known)
    for ranks, place in groups[:_MOST_GROUPS]:
        left_out -= len(ranks)
        shown.append(f"{ranks_said(ranks)}: {place}")
    if left_out:
        shown.append(f"{left_out} more ranks, at other places")
    return _fitting(shown)


def _fitting(shown: Sequence[str]) -> list[str]:
    """As many of these lines as one message can have, long ones cut short."""
    found: list[str] = []
    room = _LONGEST_LINES
    for line in map(_cut, shown):
        room -= len(json.dumps(line)) + 1
        if room < 0:
            left_out = len(shown) - len(found)
            found.append(f"{left_out} more lines")
            break
        found.append(line)
    return found


def _cut(line: str) -> str:
    while len(json.dumps(line)) > _LONGEST_LINE:
        kept = len(line) * 3 // 4
        line = f"{line[:kept]}…"
    return line


@lru_cache(_REMEMBERED)
def _described(stacks: Stacks) -> str:
    """What is called, and why it does not go on."""
    return _joined(stacks, _calls(stacks.main))


def _calls(stack: Sequence[str]) -> str:
    """`"all_reduce < train (train.py:84) < <module> (train.py:99)"`."""
    if not stack:
        return ""
    called, frames = _called(stack)
    own = list(filter(is_users_own, frames))
    if not own:
        own = list(filter(_is_not_of_distboot, stack[:_MOST_CALLS]))
    if not own:
        return AT_ITS_END
    names = [called]
    for function, file, line in map(parts, own[:_MOST_CALLS]):
        name = _name_of(file)
        names.append(f"{function} ({name}:{line})")
    if len(own) > _MOST_CALLS:
        names.append("…")
    calls = " < ".join(filter(None, names))
    return escape_control(calls)
