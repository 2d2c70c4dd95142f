"""What rank 0's agent writes about its job: the log of events, the summary, the report, bad hosts."""

from __future__ import annotations

import threading
from functools import partial

from ..base.errors import DistbootError
from ..base.text import first_line, short_repr
from ..base.threads import result_within
from ..job import effects as of_job
from ..rendezvous.events import EventLog
from ..rendezvous.membership import Membership
from .shell import Shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .connections import Appliers


# Seconds for a file system that may not answer, while the loop waits
_LINE_LIMIT = 1.0
_REPORT_LIMIT = 10.0
_WRITER = "distboot-writer"
_writing = threading.Lock()


class JobRecord:
    """What is written about one round of a job."""

    def __init__(self, shell: Shell, membership: Membership, log: EventLog) -> None:
        self._shell = shell
        self._facts = shell.facts
        self._membership = membership
        self._log = log
        self._has_stalled = False  # the file system of the file of bad hosts
        self.has_summary = False
        self.appliers: Appliers = {
            of_job.Record: self._record,
            of_job.Heard: self.hear,
            of_job.Blame: self._blame,
        }

    def _record(self, effect: of_job.Record, _: float) -> None:
        self._log.add(effect.event, effect.rank, **effect.details)

    def hear(self, effect: of_job.Heard, _: float) -> None:
        """For the journal, if there is one."""
        if self._facts.settings.report is None:
            return
        from ..job import journal  # here, as most jobs have none

        details = journal.heard(effect.message)
        if details is not None:
            self._log.note(journal.HEARD, effect.rank, **details)

    def _blame(self, effect: of_job.Blame, _: float) -> None:
        """Add a host to the file of bad hosts."""
        path = self._facts.settings.bad_hosts
        if path is None or self._has_stalled:
            return
        try:
            from .bad_hosts import append  # here, as few jobs have such a file

            write = partial(
                append,
                path,
                effect.host,
                effect.why,
            )
            result_within(_LINE_LIMIT, _WRITER, write, f"{path} does not answer")
        except (OSError, ValueError, DistbootError) as error:
            self._has_stalled = isinstance(error, TimeoutError)
            why = first_line(error)
            self._shell.say(f"warning: the file of bad hosts was not written: {why}")

    def summarize(self) -> None:
        """Print one line on how the job ended, and write the report if one is wanted; once."""
        if self.has_summary:
            return
        self.has_summary = True
        try:
            self._summarize()
        except OSError as error:  # no file left, also for its modules
            self._shell.say(f"warning: the summary was not printed: {first_line(error)}")

    def _summarize(self) -> None:
        # Here, as an agent needs it at its end only
        from ..report.content import Doubts, job_report
        from ..report.files import try_to_write
        from ..report.job_state import of_kinds
        from ..report.spent import NO_ROUND, RoundTime, goodput_line
        from ..report.summary import summary_line

        settings = self._facts.settings
        restarts = self._shell.restarts
        exit_code = self._exit_code_of_job()
        # The same time, so that a report from the journal says the same
        now = self._log.note("ended", exit_code=exit_code)
        doubts = Doubts(settings.apart, settings.unused)
        known = (self._log, self._membership, doubts, now)
        round_ = RoundTime(self._log, self._membership.world_size)
        earlier = []
        before = NO_ROUND
        if restarts is not None:
            for failed in of_kinds(self._log, "root_cause"):
                restarts.failed_at(failed.time)
            earlier = restarts.rounds
            before = restarts.spent or before
            restarts.spent = before.with_round(round_, now)
        keeper = None  # of the lines, until the next round begins, or does not
        if self._facts.is_followed:
            keeper = restarts
            exit_code = None  # if no round follows, after all, what prevents it decides
        summary = summary_line(*known, exit_code, rounds=earlier)
        goodput = goodput_line(before.with_round(round_, now))
        lines = list(filter(None, (summary, goodput)))
        if keeper is None:
            for line in lines:
                self._shell.say(line)
        else:
            keeper.unsaid = lines
        if settings.report is None or self._log[0].event != "rendezvous_started":
            return
        content = partial(job_report, *known, earlier, before=before)
        write = partial(_in_order, try_to_write, settings.report, content)
        problem = _within_report_limit(write, settings.report)
        if problem is not None:
            self._shell.say(problem)

    def _exit_code_of_job(self) -> int | None:
        """The exit code for the launcher; None where no failure and no signal has ended the job."""
        cause = self._facts.cause
        if cause is None:
            return None
        has_ended_well = False
        for rank in (*cause.ranks, *self._facts.members):
            end = self._facts.members[rank].end
            if end is None:
                continue
            found = cause.exit_code_for(end) or end.status
            if found:
                return found
            has_ended_well = True
        if has_ended_well and not cause.is_failure:  # a signal that all have handled
            return 0
        return cause.exit_code


def _in_order(write: Callable[..., str | None], *arguments: object) -> str | None:
    """Write a report after that of an earlier round, which may still be at it."""
    with _writing:
        return write(*arguments)


def _within_report_limit(write: Callable[[], str | None], path: str) -> str | None:
    """Write the report; return what was wrong with that."""
    limit = f"{_REPORT_LIMIT:.0f} s"
    late = f"warning: the report was not written in {limit}: {short_repr(path)}"
    try:
        return result_within(_REPORT_LIMIT, _WRITER, write, late)
    except TimeoutError as error:
        return str(error)
    except DistbootError:  # this user may start no more threads
        return write()
