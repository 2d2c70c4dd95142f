"""How everything here is measured: in turn with what it is compared with, in the same clean environment.

Interleaving lets whatever else the machine does fall on all sides alike. What cannot be measured becomes a reason.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from captured import without_launchers  # of the tests, which `run.py` puts on the path

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
PATH = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
TIME_LIMIT = 300  # seconds, for one command


class UnmeasuredError(Exception):
    """Why something cannot be measured here, in a few words."""


@dataclass(frozen=True)
class Effort:
    """How much time may be spent."""

    quick: bool = False

    def rounds(self, full: int) -> int:
        """The number of rounds, of so many in a full run."""
        return min(full, 2) if self.quick else full


@dataclass(frozen=True)
class Series:
    """What one side took, in the order of the rounds; or why there is nothing."""

    values: tuple[float, ...] = ()
    why: str = ""

    @property
    def median(self) -> float:
        """NaN when nothing was measured."""
        return statistics.median(self.values) if self.values else float("nan")

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The first, the median and the third; of three values the least and the most."""
        if len(self.values) < 2:
            return self.median, self.median, self.median
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, self.median, high

    def less(self, base: Series) -> Series:
        """What this took more than the median of another."""
        why = self.why or base.why
        return Series(() if why else tuple(value - base.median for value in self.values), why)

    def said(self, unit: str = "s", digits: int = 2, *, sign: bool = False) -> str:
        """Median and quartiles, as the tables show them; "ms" and "µs" are made from seconds."""
        if not self.values:
            return f"not measured: {self.why}"
        scale, plus = {"ms": 1e3, "µs": 1e6}.get(unit, 1), "+" if sign else ""
        low, middle, high = (f"{value * scale:{plus},.{digits}f}" for value in self.quartiles)
        return f"{middle} {unit}" + (f" ({low} to {high})" if len(self.values) > 1 else "")


@dataclass(frozen=True)
class Contender:
    """One side of a comparison.

    Attributes:
        name: as the table says it.
        measure: one measurement; raises `UnmeasuredError` where it cannot be had.
        times: how many of them a round has.
    """

    name: str
    measure: Callable[[], float]
    times: int = 1


def interleaved(
    contenders: Sequence[Contender], rounds: int, *, warm: bool = True
) -> dict[str, Series]:
    """What each took, in rounds of random order; the one before counts for nothing. A failing one is dropped: why."""
    values: dict[str, list[float]] = {each.name: [] for each in contenders}
    why: dict[str, str] = {}
    for number in range(-1 if warm else 0, rounds):
        for each in random.sample(contenders, len(contenders)):
            if each.name in why:
                continue
            try:
                times = range(each.times if number >= 0 else 1)
                values[each.name] += [
                    value for value in (each.measure() for _ in times) if number >= 0
                ]
            except UnmeasuredError as error:
                why[each.name] = str(error)
            except Exception as error:  # noqa: BLE001 - one side that breaks is a row that says so
                traceback.print_exc()
                why[each.name] = last_line(f"{type(error).__name__}: {error}")
    return {
        name: Series(() if name in why else tuple(values[name]), why.get(name, ""))
        for name in values
    }


def clean_environ(**more: str) -> dict[str, str]:
    """This environment without a launcher's variables, one thread a process, and as MPI needs it as root."""
    environ = without_launchers(os.environ) | {
        "PYTHONPATH": str(ROOT),
        "PATH": PATH,
        "OMP_NUM_THREADS": "1",
    }
    # An installed package has its bytecode; the first round writes ours
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if os.getuid() == 0:
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environ | more


def program(name: str) -> str:
    """The path of a program; it is one of what is compared, and need not be there."""
    found = which(name, path=PATH)
    if found is None:
        raise UnmeasuredError(f"no {name}")
    return found


def output_of(command: Sequence[str], more: Mapping[str, str] = {}, cwd: str | None = None) -> str:
    """What a command writes that must succeed."""
    try:
        done = subprocess.run(
            [program(command[0]), *command[1:]], env=clean_environ(**more), cwd=cwd, timeout=TIME_LIMIT,
            check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnmeasuredError(f"not done after {TIME_LIMIT} s") from None
    if done.returncode:
        raise UnmeasuredError(f"exit code {done.returncode}: {last_line(done.stdout)}")
    return done.stdout


def seconds_of(command: Sequence[str]) -> float:
    """Wall time of a command that must succeed."""
    start = time.perf_counter()
    output_of(command)
    return time.perf_counter() - start


def last_line(text: str) -> str:
    """What a failed program says last that has a letter, fit for a cell of a table."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"[A-Za-z]", line)]
    return (lines[-1] if lines else "said nothing")[:120].replace("|", "¦").replace(str(ROOT), "…")
