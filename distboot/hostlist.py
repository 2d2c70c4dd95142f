"""Slurm's compact lists: host names (`rack[1-2]n[03-04,7]`) and repeated counts (`4(x2),3`). Strict, without scontrol.

Every failure is a ValueError whose text names the cause.
Source: "Hostlist expressions" in slurm(1) and SLURM_TASKS_PER_NODE in srun(1), Slurm 22.05.
"""

from __future__ import annotations

import itertools
import re

from .errors import quoted

# More hosts or nodes than any machine has; a bound so that a garbled list cannot eat the memory.
_MOST = 1_000_000

_ITEM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+", re.ASCII)
_PIECE = re.compile(r"\[([0-9,-]+)\]|([A-Za-z0-9_.-]+)", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """The host names of a hostlist, in its order: `"n[09-11]"` -> `["n09", "n10", "n11"]`.

    Raises:
        ValueError: the text is no hostlist.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text):
        if not _ITEM.fullmatch(item):
            raise ValueError(f"is not a hostlist: cannot read {quoted(item)}")
        pieces = [_numbers(inside) if inside else [plain] for inside, plain in _PIECE.findall(item)]
        _bounded(len(hosts), *(len(piece) for piece in pieces))
        hosts.extend(map("".join, itertools.product(*pieces)))
    return hosts


def expand_counts(text: str) -> list[int]:
    """One count a node, in node order: `"4(x2),3"` -> `[4, 4, 3]`.

    Raises:
        ValueError: the text is no list of counts.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if not match:
            raise ValueError(f"is not a list of counts like '4(x2),3': cannot read {quoted(item)}")
        times = int(match[2] or 1)
        _bounded(len(counts), times)
        counts.extend([int(match[1])] * times)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    return [*items, text[start:]]


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if not match:
            raise ValueError(f"is not a hostlist: cannot read the range {quoted(item)}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(f"is not a hostlist: the range {quoted(item)} runs backwards")
        _bounded(len(numbers), high - low + 1)
        numbers.extend(f"{number:0{len(match[1])}}" for number in range(low, high + 1))
    return numbers


def _bounded(already: int, *factors: int) -> None:
    total = 1
    for factor in factors:
        total *= factor
    if already + total > _MOST:
        raise ValueError(f"names more than {_MOST} nodes")
