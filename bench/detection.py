"""What `detect` costs: on a laptop, on every captured process, and on a large hostlist of Slurm.

All captured processes take turns in random order, so that what else the machine does falls on all of them. Each turn is
the median of several calls, and the figure of a process is its least turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from captured import ALL
from measure import Effort, Series
from page import Limit, Section, Table

from distboot import DistbootError, detect
from distboot.detection import inherited
from distboot.detection.parse import expand_hosts

_CALLS = 15  # in a turn
_LAPTOP = {
    "COLORTERM": "truecolor",
    "DISPLAY": ":0",
    "EDITOR": "vim",
    "HOME": "/home/user",
    "LANG": "en_US.UTF-8",
    "LOGNAME": "user",
    "PATH": "/home/user/.venv/bin:/usr/local/bin:/usr/bin:/bin",
    "PWD": "/home/user/train",
    "SHELL": "/bin/bash",
    "SHLVL": "1",
    "SSH_AUTH_SOCK": "/run/user/1000/keyring/ssh",
    "TERM": "xterm-256color",
    "USER": "user",
    "VIRTUAL_ENV": "/home/user/.venv",
    "XDG_RUNTIME_DIR": "/run/user/1000",
}
_HOSTLISTS = (
    "n[000001-050000,050001-100000]",
    "rack[1-100]n[0001-1000]",
    "n[" + ",".join(map(str, range(0, 200_000, 2))) + "]",
    ",".join(f"host-{number}" for number in range(100_000)),
    ",".join(f"r{number}n[1-10]" for number in range(10_000)),
)


def section(effort: Effort) -> Section:
    """All of it."""
    environs = [_LAPTOP, *(process.environ for capture in ALL for process in capture.processes)]
    rounds = effort.rounds(20)
    laptop, *captured = _least_turns(environs, rounds, before=lambda: None)
    first = max(_least_turns(environs[1:], rounds, before=inherited._decode.cache_clear))  # noqa: SLF001
    median = statistics.median(captured)
    slowest = max(captured)
    hostlist = _slowest_hostlist()
    limits = [
        Limit("`detect()` on a laptop", f"{laptop * 1e6:.0f} µs", "≤ 60 µs", laptop <= 60e-6),
        Limit("`detect()` on any capture", f"the slowest {slowest * 1e6:.0f} µs", "≤ 100 µs", slowest <= 1e-4),
        Limit("the slowest capture to the median of all", f"{slowest / median:.2f} ×", "≤ 2.2 ×",
              slowest <= 2.2 * median),
        Limit("a Slurm hostlist of 100,000 hosts", f"the slowest of {len(_HOSTLISTS)} forms {hostlist * 1e3:.0f} ms",
              "≤ 100 ms", hostlist <= 0.1),
    ]  # fmt: skip
    table = Table(
        "`detect`",
        ("what", "time, median (quartiles)"),
        [
            ("a laptop", f"{laptop * 1e6:.0f} µs"),
            (f"{len(captured)} processes of {len(ALL)} captured jobs", Series(tuple(captured)).said("µs", 0)),
            ("the slowest of them", f"{slowest * 1e6:.0f} µs"),
            ("the slowest of their first calls", f"{first * 1e6:.0f} µs"),
        ],
        "A process below another distboot decodes what that one handed on once, in its first call.",
    )  # fmt: skip
    return Section([table], limits)


def _least_turns(
    environs: Sequence[Mapping[str, str]], rounds: int, before: Callable[[], object]
) -> list[float]:
    """The least turn of each of these environments, in their order."""
    least = [float("inf")] * len(environs)
    for _ in range(rounds):
        for place in random.sample(range(len(environs)), len(environs)):
            found = _turn(partial(detect, environs[place]), _CALLS, before)
            least[place] = min(least[place], found)
    return least


def _turn(what: Callable[[], object], calls: int, before: Callable[[], object]) -> float:
    """The median of several calls, refusals included, each after a call of `before`."""
    times = []
    for _ in range(calls):
        before()
        start = time.perf_counter()
        with suppress(DistbootError):
            what()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _slowest_hostlist() -> float:
    assert all(len(expand_hosts(text)) == 100_000 for text in _HOSTLISTS)
    return max(
        min(_turn(partial(expand_hosts, text), 3, lambda: None) for _ in range(3))
        for text in _HOSTLISTS
    )
