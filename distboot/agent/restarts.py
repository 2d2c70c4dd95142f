"""The rounds of a job that is started again without its launcher, as one wrapper knows them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..base.dataclass import replace
from ..base.process import has_loaded_mpi
from ..base.settings import RestartSettings
from ..base.table import first_that_holds
from ..base.text import digits, log_line, ranks_said
from ..job.exit_status import ExitStatus
from ..job.restarts import RestartPolicy, failed_round, lost_rounds
from ..job.root_cause import BY_HANG_STOP, HELD_UP, Circumstances, RootCause
from ..rendezvous.events import job_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.membership import EarlierAgent
    from ..report.spent import Spent

COUNT = "DISTBOOT_RESTART_COUNT"
_OF_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"  # where scripts and libraries look for it
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OF_MPI = ("PMI_", "PMIX_")  # Hydra and Slurm; Open MPI, and Slurm with PMIx


class Restarts:
    """What the wrapper knows of all rounds of its job."""

    def __init__(
        self,
        settings: RestartSettings,
        environ: Mapping[str, str],
        *,
        who: str | None,  # in what is printed between two rounds
        of_launcher: bool,  # whether the ranks are launchers
    ) -> None:
        self.round = 0  # that runs, or comes next
        # On rank 0, those that have failed, as the report has them
        self.rounds: list[dict[str, Any]] = []
        # On rank 0, what the time of the rounds was spent on that have ended; None: there is none
        self.spent: Spent | None = None
        self.cause: RootCause | None = None  # of the round that has ended
        self.earlier: tuple[EarlierAgent, ...] = ()  # of the round that has ended
        # On rank 0, lines on how that round ended: to print if no other one begins
        self.unsaid: Sequence[str] = ()
        # Whether this agent prints for its log why a round has ended
        self.prints = False
        self.harmless: set[int] = set()  # signals that do not end a script, nor the wrapper
        self.stop_signal = 0  # that has arrived between two rounds
        # By signal, what happened before it stopped the job
        self._handlers_before: dict[int, Any] = {}
        self.has_left = False  # whether this process has left the others for it
        self._is_meeting = False  # whether the ranks meet again
        self._who = who
        self._policy = RestartPolicy(settings, of_launcher=of_launcher)
        self._start = time.monotonic()  # of the round
        self._met_at = job_time()
        self._announcement: str | None = None  # of another round
        # Whether MPI_Init of a rank connects to the launcher, which accepts each process once
        self._is_below_mpi = any(name.startswith(_OF_MPI) for name in environ)
        self._has_mpi = False

    def check_for_mpi(self, pid: int) -> None:
        """Check whether a rank, or a process that it started, has loaded MPI."""
        if self._is_below_mpi and not self._has_mpi:
            self._has_mpi = has_loaded_mpi(pid)

    def ignore_between_rounds(self, signals: set[int]) -> None:
        """Signals do not end a script: let them not end the wrapper between two rounds, either."""
        for number in signals - self.harmless:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._warn_of_signal)
        self.harmless |= signals

    def _warn_of_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        text = f"warning: {name} arrived while no rank was running, and had no effect"
        log_line(self._who, text)

    def handle_stop_signals(self, signals: Iterable[int]) -> None:
        """From now on one that arrives between two rounds stops the job, and not this process alone."""
        for number in set(signals) - self.harmless - self._handlers_before.keys():
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers_before[number] = signal.signal(number, self._stop)

    def restore_handlers(self) -> None:
        """No other round follows: such a signal does what it did before."""
        for number, handler in self._handlers_before.items():
            if signal.getsignal(number) == self._stop:
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: object) -> None:
        self.stop_signal = self.stop_signal or number
        if self._is_meeting:
            self.stop_if_signaled()

    def stop_if_signaled(self) -> None:
        """The ranks meet again: from now on, and now, such a signal raises `SystemExit`, once."""
        self._is_meeting = not self.has_left
        if self._is_meeting and self.stop_signal:
            self.note_met()
            self.has_left = True
            raise SystemExit(128 + self.stop_signal)

    def note_met(self) -> None:
        """The ranks have met, or this process has left them: a signal is for the ranks."""
        self._is_meeting = False

    def take_stop_signal(self) -> int:
        """The signal that has arrived since, for the ranks; 0: none has."""
        number = self.stop_signal
        self.stop_signal = 0
        return number

    def begin(self, round_: int, most: int, *, met_at: float, is_rank_0: bool = True) -> None:
        """All agents have met for a round, which rank 0's agent numbers; it allows `most`.

        `met_at`: when, by `job_time`.
        """
        if is_rank_0 and round_ > self.round:  # in place of rank 0's agent of an earlier round
            lost = lost_rounds(round_)
            self.rounds.append(lost)
            text = f"restart {round_} of {most}: {lost['text']}"
            log_line(self._who, text, event="restart", round=round_)
        self.round = round_
        self.cause = None
        self.unsaid = ()
        self.prints = is_rank_0
        self._policy.begin(round_, most)
        self._start = time.monotonic()
        self._met_at = met_at

    def decided(
        self,
        cause: RootCause,
        end: ExitStatus | None,
        now: float,
        circumstances: Circumstances,
        pids: list[int],
    ) -> tuple[RootCause, str | None]:
        """On rank 0: the root cause with the decision, and what to print of it, once.

        Args:
            cause: of this round.
            end: how its rank has ended, or fails, as far as is known.
            now: by `time.monotonic`.
            circumstances: what else counts.
            pids: of our own ranks.
        """
        for pid in pids:
            self.check_for_mpi(pid)
        decision = self._policy.decide(
            cause,
            end,
            now,
            circumstances,
            has_mpi=self._has_mpi,
        )
        if decision.is_first:
            failed = failed_round(
                self.round,
                cause.ranks,
                cause.headline,
                start=self._met_at,
                seconds=round(now - self._start, 3),
            )
            self.rounds.append(failed)
        return replace(cause, restarts=decision.restarts), decision.text

    def failed_at(self, when: float) -> None:
        """The round ends that failed then, by `job_time`: the journal has the same time."""
        self.rounds[-1]["seconds"] = round(when - self._met_at, 3)

    def ended(self, cause: RootCause, agents: tuple[EarlierAgent, ...] = ()) -> None:
        """A round has ended, and another one follows, which `announce` prints."""
        seconds = time.monotonic() - self._start
        failed = self.round
        self.round += 1
        self.cause = cause
        self.earlier = agents
        if self.prints:
            who = "a rank"
            if cause.ranks:
                who = ranks_said(cause.ranks)
            why = f"round {failed} ended after {seconds:.1f} s, as {who} {_how(cause)}"
            self._announcement = f"restart {self.round} of {self._policy.most}: {why}"
        with suppress(OSError, KeyError):
            # Of the last failure; torchrun is to read that of the job's end
            os.unlink(os.environ[_ERROR_FILE])

    def announce(self) -> None:
        """Print in each log that another round follows, and why, the first time."""
        text = self._announcement
        self._announcement = None
        if text is not None:
            log_line(self._who, text, event="restart", round=self.round)

    def say_unsaid(self) -> None:
        """Print on rank 0 how the last round ended, as no other one begins."""
        for line in self.unsaid:
            log_line(self._who, line)
        self.unsaid = ()

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables for the script."""
        found = {COUNT: str(self.round)}
        if self._policy.most:
            before = digits(environ.get(_OF_TORCHRUN, "")) or 0
            found[_OF_TORCHRUN] = str(self.round + before)
        return found


def _how(cause: RootCause) -> str:
    """What its ranks did to the round: `"failed"`, `"held it up"`."""
    return first_that_holds(
        (HELD_UP in cause.headline, "held it up"),
        (BY_HANG_STOP in cause.headline, "hung"),  # each waits for another one
        (True, "failed"),
    )
