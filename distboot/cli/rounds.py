"""The rounds of a job whose agents meet: the first one, and those after restarts.

In each round the agents meet, the ranks of this agent get their environments, and run to their end.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import NamedTuple

from .. import frameworks
from ..agent import supervisor
from ..agent.child import Command
from ..agent.wrapper_signals import WAITED_FOR
from ..base.commands import become
from ..base.errors import DistbootError, with_too_few_files
from ..base.internal_variables import RANK
from ..base.process import FROM_OUTSIDE
from ..base.text import written_cpus
from ..base.threads import at_once
from ..detection import export
from ..detection.detect import detect
from ..detection.inherited import merged
from ..detection.launchers.tf_config import has_servers
from ..detection.order import LAUNCHERS
from ..detection.placement import NUMBERS, WRAPPER, Placement
from ..startup.start_report import StartReport
from .launch import Launch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ..agent.event_files import EventFiles
    from ..agent.launcher_process import LauncherProcess
    from ..agent.link_messages import StartEnded
    from ..agent.logs import Logs
    from ..agent.restarts import Restarts
    from ..agent.session import Session
    from ..agent.wrapper_agent import ThreadAgent
    from ..base.settings import SupervisionSettings
    from ..host.binding import Cpus
    from ..rendezvous.events import Event


_LEAVING = 5.0  # seconds to tell rank 0, and so all others, that this process stops


class Rounds(NamedTuple):
    """What is the same in all rounds."""

    launch: Launch
    placement: Placement
    settings: SupervisionSettings
    restarts: Restarts
    ranks: int  # that are started here; 0: the one that this is
    launcher: LauncherProcess | None  # above this process

    def run_all(self, problem: DistbootError | None, logs: Logs | None) -> int:
        """The exit code of the last round; all other agents receive the problem of this one."""
        report = StartReport(self.settings.report, self.placement)
        unwritable = report.disable_if_unwritable()
        files = None
        if unwritable is None:
            files = self._event_files()
            report = self._start_report(files)
        problem = problem or unwritable
        with ExitStack() as stack:
            if files is not None:
                stack.callback(files.close)  # here, as the wrapper ends without atexit
            code = self._run(report, problem, logs, files)
            restarts = self.restarts
            while restarts.cause is not None:
                logs = None
                if not self.ranks:
                    placement = self.placement
                    logs = self.launch.logs(placement.rank, placement.who, restarts.round)
                report = self._start_report(files)
                code = self._run_again(report, logs, files)
            restarts.restore_handlers()
        return code

    def _run_again(self, report: StartReport, logs: Logs | None, files: EventFiles | None) -> int:
        """Another round; if a signal stops this process while the ranks meet, all others stop, too."""
        restarts = self.restarts
        try:
            return self._run(report, None, logs, files)
        except (DistbootError, SystemExit):
            restarts.say_unsaid()
            if restarts.has_left:
                self._tell_stop(restarts.stop_signal, report, files)
            raise  # also in process 1, which no signal ends

    def _tell_stop(self, number: int, report: StartReport, files: EventFiles | None) -> None:
        """Tell the others, and end by the signal."""
        name = signal.Signals(number).name
        stopped = DistbootError("stopped", f"{name} arrived while the ranks met again")
        with suppress(DistbootError):
            self._run(report, stopped, None, files)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _event_files(self) -> EventFiles | None:
        """The files of all rounds, which rank 0's agent writes where they are wanted."""
        if self.placement.rank != 0 or not self.settings.keeps_events:
            return None
        from ..agent.event_files import EventFiles  # here, as most jobs have none

        return EventFiles(self.settings, self.placement.who)

    def _start_report(self, files: EventFiles | None) -> StartReport:
        """The report of the start of one round."""

        def write(session: Session, ended: StartEnded) -> None:
            assert session.joined is not None
            if files is not None:
                files.start_ended(
                    session.joined,
                    ended,
                    rounds=self.restarts.rounds,
                    before=self.restarts.spent,
                )

        return StartReport(self.settings.report, self.placement, write)

    def _run(
        self,
        report: StartReport,
        problem: DistbootError | None,
        logs: Logs | None,
        files: EventFiles | None,
    ) -> int:
        """From the moment in which all agents meet to the end of the ranks: the exit code."""
        from ..agent.wrapper_agent import ThreadAgent

        restarts = self.restarts
        with (
            report.despite_signals(is_printed=self.placement.rank == 0),
            self._meeting(report, problem, files) as session,
            report.until_watched(session),
            with_too_few_files(),
            ThreadAgent(session, self.settings, restarts, self.launcher) as watch,
        ):
            code = self._run_ranks(session, watch, report, logs)
            cause = watch.next_round
        if cause is None:
            restarts.say_unsaid()
        else:
            restarts.ended(cause, watch.agents())
        return code

    def _meeting(
        self,
        report: StartReport,
        problem: DistbootError | None,
        files: EventFiles | None,
    ) -> AbstractContextManager[Session]:
        """All agents meet, and learn of the problem of this one."""
        from ..agent.joining import ignore, join_here

        options = self.launch.options
        restarts = self.restarts
        # In another round, agents may still be ending their ranks of the round before.
        ending = 0.0
        delay = 0.0
        if restarts.round:
            ending = options.grace
            delay = options.restarts.delay
        join_timeout = options.join_timeout + ending + delay
        if problem is not None and restarts.round:
            join_timeout = _LEAVING
        record: Callable[[Event], object] = ignore
        if files is not None:
            record = files.record
        return join_here(
            self.placement,
            self.launch.environ,
            join_timeout,
            failed=report.ended,
            wanted=self._while_meeting,
            met=restarts.note_met,
            framework=options.framework,
            problem=problem,
            ranks=self.ranks,
            round=restarts.round,
            max_restarts=options.restarts.most,
            earlier=restarts.earlier,
            ending=ending,
            delay=delay,
            record=record,
        )

    def _run_ranks(
        self,
        session: Session,
        watch: ThreadAgent,
        report: StartReport,
        logs: Logs | None,
    ) -> int:
        """Start the ranks of this agent, once all have met, and wait for their end: the exit code."""
        assert session.joined is not None
        if self.restarts.round:
            gc.unfreeze()
            gc.collect()  # the agent of the round before
        # What the meeting has made stays for the round: the collector of cycles need not look at it
        # again and again
        gc.freeze()
        options = self.launch.options
        bound = self._bound(session, watch.ranks)
        environs = at_once(partial(self._environ_for_rank, session, watch, bound), watch.ranks)
        session.joined.close_listener()
        most_files = session.joined.open_files
        if options.exec:
            watch.leave_job()
            become(
                self.launch.words(environs[0]),
                environs[0],
                open_files=most_files,
                cpus=bound[watch.ranks[0]],
            )
        if not self.settings.detects:
            report.ended(session, None)
        read_by = LAUNCHERS[self.placement.launcher].read_by
        if "tensorflow" in (options.framework, *read_by):
            watch.only_serves_rank_0 = has_servers(environs[0])
        if options.restarts.most:
            self.restarts.handle_stop_signals(self._stopping_signals())
        return supervisor.run(
            self._commands(watch, environs, bound, logs),
            grace=options.grace,
            open_files=most_files,
            watch=watch,
            pending_signal=self.restarts.take_stop_signal(),
        )

    def _stopping_signals(self) -> set[int]:
        """The signals that stop a job, also between two rounds."""
        # Those that the wrapper does not wait for never reach the ranks
        found: set[int] = {*FROM_OUTSIDE, *WAITED_FOR.intersection(self.settings.stop_signals)}
        if self.settings.quit_shows:
            found.discard(signal.SIGQUIT)
        return found

    def _while_meeting(self) -> None:
        """Do not wait for other ranks once the launcher has ended."""
        self.restarts.announce()
        if self.restarts.round:
            self.restarts.stop_if_signaled()
        if self.launcher is not None:
            self.launcher.refuse_if_gone()

    def _bound(self, session: Session, ranks: Sequence[int]) -> dict[int, Cpus]:
        """The CPUs to which each rank of this agent is to be bound; empty: as this process is."""
        if self.ranks:
            return dict(zip(ranks, self.launch.bound_here(self.ranks), strict=True))
        return {ranks[0]: self.launch.bound(session.placement)}

    def _commands(
        self,
        watch: ThreadAgent,
        environs: Sequence[Mapping[str, str]],
        bound: Mapping[int, Cpus],
        logs: Logs | None,
    ) -> list[Command]:
        commands = []
        for rank, environ in zip(watch.ranks, environs, strict=True):
            if self.ranks:
                logs = self.launch.logs(rank, f"rank {rank}", self.restarts.round)
            start = watch.starts[rank]
            if logs is not None:
                # A line of ours is not to come between
                start.has_passed_on = logs.has_passed_on
            environ_of_rank = watch.environ(rank, environ)
            command = Command(
                self.launch.words(environ_of_rank),
                environ_of_rank,
                rank,
                start.hooks,
                logs,
                bound[rank],
            )
            if bound[rank]:
                start.cpus = written_cpus(bound[rank])
            commands.append(command)
        return commands

    def _environ_for_rank(
        self, session: Session, watch: ThreadAgent, bound: Mapping[int, Cpus], rank: int
    ) -> dict[str, str]:
        from ..host import network  # here, so that a process that is alone does not pay for it

        base = dict(self.launch.environ)
        if self.ranks:
            session, base = _session_and_environ_for_rank(session, rank, base)
        base |= session.shared_variables(base)
        placement = session.placement
        is_torchruns = LAUNCHERS[placement.launcher].serves_master_port
        counts = self.restarts.variables(base)
        with closing(watch.link(placement.rank)) as session.link:
            others = frameworks.exports(self.launch.options.framework, session, base)
        if not is_torchruns:  # else one of them would show that torchrun has started the script
            others |= counts
        exports = self.launch.exports(placement, base, others=others, met=True, bound=bound[rank])
        exports |= counts
        may_restart = self.launch.options.restarts.most > 0
        if may_restart:
            # These are the restarts: a wrapper in the command would multiply their number
            exports["DISTBOOT_MAX_RESTARTS"] = None
        if is_torchruns and may_restart:
            # The store of torchrun's agent has the keys of the first round: the script needs a new
            # one.
            assert session.store_address is not None
            exports["TORCHELASTIC_USE_AGENT_STORE"] = None
            exports["MASTER_PORT"] = str(session.store_address[1])
        exports |= network.variables(session.interface, base)
        return merged(exports, base)


def _session_and_environ_for_rank(
    session: Session, rank: int, base: Mapping[str, str]
) -> tuple[Session, dict[str, str]]:
    """The session of a rank of this node, after the nodes have met, and the environment for it."""
    assert session.membership is not None
    numbers = {
        "rank": rank,
        "world_size": session.membership.world_size,
        **session.membership.place(rank),
    }
    environ = export.base_environ(base)
    for name, field in zip(RANK, NUMBERS, strict=True):
        environ[name] = str(numbers[field])
    address = {
        "MASTER_ADDR": str(session.placement.master_addr),
        "MASTER_PORT": str(session.placement.master_port),
    }
    placement = detect({**environ, **address}, launcher=WRAPPER)
    return session.of_rank(placement), environ
