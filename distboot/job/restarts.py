"""Whether a failed round of a job is followed by another one. Pure.

A round lasts from the moment in which all agents meet to the end of all ranks. Rank 0's agent
decides when a rank fails, and sends the decision with the root cause; an agent that has lost rank
0's decides for itself. Then all agents end what is left of their ranks, meet again, and start the
command again. `agent/restarts` does all that.

No round follows a failure that another start does not change: the job was asked to stop, the error
is one of usage, or the same place in the code failed before within the window of time. A failure on
a node that has failed the check before the round does not count there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ..base.errors import CODES
from ..base.patterns import pattern
from ..base.process import signal_of_code
from ..base.settings import RestartSettings
from ..base.table import first_that_holds
from ..base.text import counted, ranges
from .exit_status import ExitStatus
from .root_cause import Circumstances, RootCause

# Exit codes that another start does not change
_STAYS = {
    2: "a usage error",
    78: "a broken environment",
    126: "a command that cannot be run",
    127: "no such command",
}
STOPPED = "the job was asked to stop"
_MPI = "the script uses MPI, whose launcher lets each of its processes call MPI_Init once"
_OPTION = "--max-restarts or DISTBOOT_MAX_RESTARTS"
_CODE = pattern(r"error\[([a-z-]+)\]")


def failed_round(
    number: int,
    ranks: Sequence[int],  # that failed first
    text: str,
    *,
    start: float | None,  # seconds since the epoch
    seconds: float | None,
) -> dict[str, object]:
    """A round that failed, as the report has it; None: it is not known."""
    return {
        "round": number,
        "ranks": list(ranks),
        "text": text,
        "start": start,
        "seconds": seconds,
    }


def lost_rounds(next_round: int) -> dict[str, object]:
    """The rounds before one in which another agent than theirs is rank 0's, as the report has them."""
    unit = "round"
    if next_round > 1:
        unit = "rounds"
    rounds = f"{unit} {ranges(range(next_round))}"
    text = f"rank 0's agent was lost, and its replacement has no record of {rounds}"
    return failed_round(next_round - 1, [0], text, start=None, seconds=None)


class Decision(NamedTuple):
    """Whether another round follows a failure."""

    restarts: bool
    text: str | None  # why none does, to be printed once
    is_first: bool  # of this round


class RestartPolicy:
    """Decides once in each round of a job; a stop that is asked for later calls the next one off."""

    def __init__(self, settings: RestartSettings, *, of_launcher: bool) -> None:
        self.most = settings.most  # restarts of the job
        self._window = settings.window  # seconds
        # Whether the ranks are launchers, which fail at one place for whatever reason
        self._of_launcher = of_launcher
        self._last_at: dict[str, float] = {}  # the last failure at each place in the code
        self._round = 0
        # Why no round follows this one; empty: one does; None: not decided
        self._refusal: str | None = None

    def begin(self, round_: int, most: int) -> None:
        """A round begins, of a job that rank 0 allows `most` restarts."""
        self._round = round_
        self.most = most
        self._refusal = None

    def decide(
        self,
        cause: RootCause,
        end: ExitStatus | None,  # how the rank of the cause has ended, as far as is known
        now: float,
        circumstances: Circumstances,
        *,
        has_mpi: bool,  # whether a rank uses MPI
    ) -> Decision:
        before = self._refusal
        is_first = before is None
        if is_first:
            self._refusal = self._refusal_of(
                cause,
                end or ExitStatus(),
                now,
                circumstances,
                has_mpi=has_mpi,
            )
        elif circumstances.is_asked and not self._refusal:  # since then
            self._refusal = STOPPED
        text = None
        is_said = cause.is_failure or not is_first
        if self._refusal and is_said and self._refusal != before:
            text = f"no restart: {self._refusal}"
        return Decision(not self._refusal, text, is_first)

    def _refusal_of(
        self,
        cause: RootCause,
        end: ExitStatus,
        now: float,
        circumstances: Circumstances,
        *,
        has_mpi: bool,
    ) -> str:
        """Why no round follows; empty: one does."""
        place = ""
        is_stopped = circumstances.is_asked or not cause.is_failure
        may_be_bug = not (self._of_launcher or circumstances.is_unfit)
        if may_be_bug:
            place = _place_of(cause.failed, end)
        ago = inf
        if place:
            ago = now - self._last_at.get(place, -inf)
            self._last_at[place] = now
        second = f"second failure {place} within {ago:.0f} s"
        code, what = _exit_code_of(end)
        limit = f"{counted(self.most, 'restart')} ({_OPTION})"
        return first_that_holds(
            (is_stopped, STOPPED),
            (has_mpi, _MPI),
            (code in _STAYS, f"{what} ({_STAYS.get(code)}) would happen again"),
            (ago <= self._window, f"{second}: treated as a bug"),
            (self._round >= self.most, f"the limit of {limit} is reached"),
            (circumstances.is_orphaned, "the launcher of rank 0 is gone"),
            (True, ""),
        )


def _exit_code_of(end: ExitStatus) -> tuple[int, str]:
    """The exit code of a script, or of the error of distboot with which it fails; and its text."""
    error = _CODE.search(end.traceback)
    if error is not None and error[1] in CODES:
        code, _ = CODES[error[1]]
        return code, error[0]
    return end.code or 0, f"exit code {end.code}"


def _place_of(rank: int, end: ExitStatus) -> str:
    """How a rank has failed by itself, where that shows a bug: `"at load (data.py:41)"`.

    Of an exit code alone, the same rank has to end with it again. Empty: it shows none.
    """
    if end.is_secondary or end.cause:
        return ""
    if end.place:
        return f"at {end.place}"
    is_of_signal = signal_of_code(end.code) is not None
    text = ""
    if end.code and not is_of_signal:
        text = f"of rank {rank} with exit code {end.code}"
    return text
