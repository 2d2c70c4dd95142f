"""Restarts without the launcher: whether a failed round of the job is followed by another one, and what has been.

A round is everything from the moment in which all agents meet to the end of all ranks. Rank 0's agent decides when a
rank fails, and says so with the root cause; an agent that has lost rank 0's decides for itself. Then all of them end
what is left of their ranks, meet once more, and start the command again.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..base.errors import CODES
from ..base.settings import RestartSettings
from ..base.text import (
    digits,
    log_line,
    ranges,
    ranks_said,
)
from .exit_status import ExitStatus
from .root_cause import RootCause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.membership import EarlierAgent

COUNT = "DISTBOOT_RESTART_COUNT"
_OF_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"  # where scripts and libraries look for it
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# What starting again does not change.
_STAYS = {
    2: "a usage error",
    78: "a broken environment",
    126: "a command that cannot be run",
    127: "no such command",
}
_OF_MPI = ("PMI_", "PMIX_")  # Hydra and Slurm; Open MPI, and Slurm with PMIx
# Open MPI and Intel; MPICH, as Debian has it; libmpi_gnu_112.so.12 and the like of Cray; libmpi_abi.so of MPI 5.
MPI_LIBRARY = re.compile(r"/libmpi(ch)?(_\w+)?\.so")
_CODE = re.compile(r"error\[([a-z-]+)\]")


class Restarts:
    """What the wrapper knows of all rounds of its job."""

    def __init__(
        self,
        settings: RestartSettings,
        environ: Mapping[str, str],
        *,
        who: str | None = None,  # in what is printed between two rounds
        of_launcher: bool = False,
    ) -> None:
        self.settings, self.round = settings, 0  # that runs, or comes next
        self._who = who
        # Whether a rank that calls MPI_Init speaks to the launcher, which takes that of each process once.
        self._is_below_mpi = any(name.startswith(_OF_MPI) for name in environ)
        self._has_mpi = False
        # Whether ours are launchers, which fail at one place for whatever reason
        self._of_launcher = of_launcher
        # On rank 0, those that have failed, as the report has them
        self.rounds: list[dict[str, Any]] = []
        self._failures: list[tuple[str, float]] = []  # where in the code, and when
        self._most, self._began, self._started = settings.most, time.monotonic(), time.time()
        # Why the job does not go on; empty: it does; None: not decided
        self._decision: str | None = None
        self.cause: RootCause | None = None  # of the round that has ended
        self.earlier: tuple[EarlierAgent, ...] = ()  # of the round that has ended
        self.harmless: set[int] = set()  # signals that do not end a script, nor the wrapper

    def look(self, pid: int) -> None:
        """See whether a rank has loaded MPI, it or what it has started; once a second, and when it is decided."""
        pids = [pid] if self._is_below_mpi else []
        while pids and not self._has_mpi:
            pid = pids.pop()
            with (
                suppress(OSError),
                open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file,
            ):
                self._has_mpi = any(map(MPI_LIBRARY.search, file))
            with (
                suppress(OSError),
                open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file,
            ):
                pids += map(int, file.read().split())

    def outlived(self, signals: set[int]) -> None:
        """Let signals that do not end a script not end the wrapper between two rounds, either."""
        for number in signals - self.harmless:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._say_no_effect)
        self.harmless |= signals

    def _say_no_effect(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        text = f"warning: {name} arrived while no rank was running, and had no effect"
        log_line(self._who, text)

    def begin(self, round_: int, most: int, *, is_rank_0: bool = True) -> None:
        """All have met for a round; rank 0's agent says which, and how many restarts there may be."""
        if is_rank_0 and round_ > self.round:
            rounds = f"round{'s' if round_ > 1 else ''} {ranges(range(round_))}"
            text = f"rank 0's agent was lost, and its replacement has no record of {rounds}"
            self.rounds.append(
                {"round": round_ - 1, "ranks": [0], "text": text, "start": None, "seconds": None}
            )
            log_line(
                self._who, f"restart {round_} of {most}: {text}", event="restart", round=round_
            )
        self.round, self._most, self._decision, self.cause = round_, most, None, None
        self._began, self._started = time.monotonic(), time.time()

    def decided(
        self,
        cause: RootCause,
        end: ExitStatus | None,
        now: float,
        *,
        is_asked: bool,
        is_orphaned: bool = False,
    ) -> tuple[RootCause, str | None]:
        """On rank 0: the root cause, which says whether the job goes on; and once, what is to be said of it.

        `end` is how its rank has ended, or fails, as far as is known; `is_asked`: the job was asked to stop;
        `is_orphaned`: the launcher's process above rank 0 is gone.
        """
        said = None
        if self._decision is None:
            self._decision = self._why_not(cause, end, now, is_asked=is_asked)
            if is_orphaned and not self._decision:
                self._decision = "the launcher of rank 0 is gone"
            said = f"no restart: {self._decision}" if self._decision and cause.is_failure else None
            line = {"round": self.round, "ranks": list(cause.ranks), "text": cause.headline}
            self.rounds.append(
                {**line, "start": self._started, "seconds": round(now - self._began, 3)}
            )
        return replace(cause, restarts=not self._decision), said

    def _why_not(
        self, cause: RootCause, end: ExitStatus | None, now: float, *, is_asked: bool
    ) -> str:
        place = "" if self._of_launcher else _same_place(end)
        earlier = [
            at
            for where, at in self._failures
            if where == place and now - at <= self.settings.window
        ]
        self._failures.append((place, now))
        code, said = _exit_code_of(end)
        if not cause.is_failure or is_asked:
            return "the job was asked to stop"
        if self._has_mpi:
            return (
                "the script uses MPI, whose launcher lets each of its processes call MPI_Init once"
            )
        if code in _STAYS:
            return f"{said} ({_STAYS[code]}) would happen again"
        if place and earlier:
            ago = f"{now - earlier[-1]:.0f} s"
            return f"it is the second failure {place} within {ago}, which is a bug and not a fault"
        if self.round >= self._most:
            return f"--max-restarts {self._most} allows no more"
        return ""

    def ended(self, cause: RootCause, agents: tuple[EarlierAgent, ...] = ()) -> None:
        """A round has ended, and another one follows: clear what would be wrong there, and say so on rank 0."""
        self.round, self.cause = self.round + 1, cause
        self.earlier = agents
        if self.rounds:
            who = f"{ranks_said(cause.ranks)} failed" if cause.ranks else "a rank failed"
            took = f"round {self.round - 1} ended after {time.monotonic() - self._began:.1f} s"
            said = f"restart {self.round} of {self._most}: {took}, as {who}"
            log_line(self._who, said, event="restart", round=self.round)
        with suppress(OSError, KeyError):
            # Of the last failure; torchrun is to read that of the job's end
            os.unlink(os.environ[_ERROR_FILE])
        time.sleep(self.settings.delay)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the script is to find."""
        found = {COUNT: str(self.round)}
        if self._most:
            before = digits(environ.get(_OF_TORCHRUN, ""))
            found[_OF_TORCHRUN] = str(self.round + (before or 0))
        return found


def _exit_code_of(end: ExitStatus | None) -> tuple[int | None, str]:
    """Of a script, or that of the error of ours with which it fails; and in words."""
    error = None if end is None else _CODE.search(end.traceback)
    if error is not None and error[1] in CODES:
        return CODES[error[1]][0], error[0]
    code = None if end is None else end.code
    return code, f"exit code {code}"


def _same_place(end: ExitStatus | None) -> str:
    """`"at load (data.py:41)"`: how a rank has failed by itself, where that tells a bug; empty: it does not."""
    if end is None or end.is_secondary or end.cause:
        return ""
    is_signal = end.code is not None and 128 < end.code < 128 + signal.NSIG  # as a shell says it
    return (
        f"at {end.place}"
        if end.place
        else f"with exit code {end.code}"
        if end.code and not is_signal
        else ""
    )
