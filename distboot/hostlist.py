"""Lists of hosts: Slurm's compact ones (`rack[1-2]n[03-04,7]`, counts `4(x2),3`), and SageMaker's, which are JSON.

Strict, and without scontrol.
What `scontrol show hostnames` rejects is rejected, and so is what it reads in spite of a mistake (`n[1-3`, `a,,b`).
Every failure is a ValueError whose text names the cause.
Source: "Hostlist expressions" in slurm(1), SLURM_TASKS_PER_NODE in srun(1), and scontrol 22.05.
"""

from __future__ import annotations

import itertools
import re

from .errors import quoted

# More hosts or nodes than any machine has; a bound so that a garbled list cannot eat the memory.
_MOST = 1_000_000
_LONGEST_RANGE = 65536  # Slurm's own bound for one range
_LONGEST_JSON = 1_000_000  # characters

_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", re.ASCII)
_BRACKETS = re.compile(r"\[([0-9,-]+)\]", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """The host names of a hostlist, in its order: `"n[09-11]"` -> `["n09", "n10", "n11"]`.

    Raises:
        ValueError: the text is no hostlist.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text):
        if "[" in item:
            # Plain text at the even places, the inside of a bracket at the odd ones. Nothing follows the last bracket.
            parts = _BRACKETS.split(item)
            if parts[-1] or not all(not plain or _NAME.fullmatch(plain) for plain in (parts[0], *parts[2::2])):
                raise ValueError(f"is not a hostlist: cannot read {quoted(item)}")
            *prefix, plain, numbers = _pieces(parts, len(hosts))
            # Slurm's own order: the last bracket runs fastest, then the first, then the second.
            heads = ["".join(reversed(head)) + plain[0] for head in itertools.product(*reversed(prefix))]
            hosts.extend([head + number for head in heads for number in numbers])
        elif _NAME.fullmatch(item):
            hosts.append(item)
        else:
            raise ValueError(f"is not a hostlist: cannot read {quoted(item)}")
    _bounded(len(hosts))
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
        _bounded(len(counts) + times)
        counts.extend([int(match[1])] * times)
    return counts


def json_hosts(text: str) -> list[str]:
    """The host names in a JSON list: `'["algo-1","algo-2"]'` -> `["algo-1", "algo-2"]`.

    Raises:
        ValueError: the text is no JSON list of different host names.
    """
    import json  # only here, so that other launchers do not pay for it

    try:
        hosts = json.loads(text) if len(text) <= _LONGEST_JSON else None
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise ValueError("is not a JSON list of host names")
    if len(set(hosts)) != len(hosts):
        raise ValueError("names a host twice")
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise ValueError(f"is not a JSON list of host names: cannot read {quoted(host)}")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    pieces = text.split(",")
    if "[" not in text:
        return pieces
    items: list[list[str]] = []
    inside = False
    for piece in pieces:
        if inside:
            items[-1].append(piece)
        else:
            items.append([piece])
        opened, closed = piece.rfind("["), piece.rfind("]")
        inside = inside if opened == closed else opened > closed
    return list(map(",".join, items))


def _pieces(parts: list[str], already: int) -> list[list[str]]:
    """What each part of an item stands for, no more of them than there may be together."""
    pieces: list[list[str]] = []
    together = 1
    for index, part in enumerate(parts[:-1]):
        pieces.append(_numbers(part) if index % 2 else [part])
        together *= len(pieces[-1])
        _bounded(already + together)
    return pieces


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        if item.isdigit():
            numbers.append(item)
            continue
        match = _RANGE.fullmatch(item)
        if not match:
            raise ValueError(f"is not a hostlist: cannot read the range {quoted(item)}")
        low, high, width = int(match[1]), int(match[2]), len(match[1])
        if high < low:
            raise ValueError(f"is not a hostlist: the range {quoted(item)} runs backwards")
        if high - low >= _LONGEST_RANGE:
            raise ValueError(f"is not a hostlist: the range {quoted(item)} has more than {_LONGEST_RANGE} numbers")
        _bounded(len(numbers) + high - low + 1)
        padded = f"%0{width}d"
        numbers.extend([padded % number for number in range(low, high + 1)])
    return numbers


def _bounded(count: int) -> None:
    if count > _MOST:
        raise ValueError(f"names more than {_MOST} nodes")
