"""The agent in the wrapper: a thread beside its loop on signals, which watches the children.

The main thread calls the methods here; what they change belongs to the agent's thread, which they
wake up (`_calls`). What they read there is set once.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter

from ..base.process import Process
from ..base.settings import SupervisionSettings
from ..base.threads import start_without_signals
from ..job.exit_status import ExitStatus, shown
from ..job.messages import Phases, Register, Terminating
from ..rendezvous.events import COMMAND
from ..rendezvous.membership import EarlierAgent
from ..script.crash_hooks import VARIABLE as VARIABLE_OF_HOOKS
from .agent import Agent
from .calls import Calls
from .hook_reader import HookReader
from .link import VARIABLE, AgentLink
from .monitored_process import MonitoredProcess
from .rank_process import RankProcess
from .rank_start import RankStart
from .script_failure import LOOK, PRINTING
from .session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..job.root_cause import RootCause
    from .launcher_process import LauncherProcess
    from .restarts import Restarts

_END_LIMIT = 5.0  # seconds for the thread to say that it is over
_external_signal = attrgetter("stopping.external_signal")
_TELLING = 1.0  # seconds for all ranks to hear that no round follows


class ThreadAgent:
    """The agent as a thread of this process.

    In the wrapper, for the ranks whose processes `supervisor.run` starts; or in `init` where the
    sidecar did not start.
    """

    def __init__(
        self,
        job: Session,
        settings: SupervisionSettings,
        restarts: Restarts | None,
        launcher: LauncherProcess | None = None,
    ) -> None:
        assert job.joined is not None
        self.is_done = False  # whether nothing is left to do; `supervisor.run` may end
        self.only_serves_rank_0 = False  # whether all other ranks do, and end with it
        self._is_asked = False  # to end, by a signal
        self._job = job
        self._settings = settings
        self.stop_signals = settings.stop_signals  # that ask the job to stop, besides SIGTERM
        self._restarts = restarts
        plan = job.joined.plan
        self._secret = plan.secret
        self._agent = Agent(job.joined, settings, held=True)
        self._shell = self._agent.shell
        self.ranks = self._agent.ranks
        if restarts is not None:
            self._begin_round(restarts)
        self._calls = Calls()
        self.starts = {rank: RankStart(plan.own.cpus) for rank in self.ranks}
        self._children: dict[int, MonitoredProcess] = {}
        self._done: Callable[[], None] = lambda: None
        self._agent.loop.add_reader(self._calls.fileno(), self._calls.take)
        if launcher is not None:
            self._agent.watch_launcher(launcher)
        if hasattr(signal, "pidfd_send_signal"):
            self._agent.scripts.open()
        self._agent.check_node(os.getpid(), is_rank=False)
        # Signals are for the main thread
        self._thread = start_without_signals("distboot-agent", self._work)

    def _begin_round(self, restarts: Restarts) -> None:
        membership = self._job.membership
        assert membership is not None
        restarts.begin(
            membership.round,
            membership.max_restarts,
            is_rank_0=0 in self.ranks,
            met_at=self._agent.met_at,
        )
        if membership.max_restarts:
            self._shell.restarts = restarts
            self._shell.facts.restarts = restarts

    @property
    def may_restart(self) -> bool:
        """Whether another round may follow this one."""
        return self._shell.facts.may_restart

    def link(self, rank: int) -> AgentLink:
        """The link to this agent for this process, as a rank of its own."""
        ours, its = socket.socketpair()
        self._calls.put(lambda _: self._agent.scripts.serve(its, rank))
        return AgentLink(ours)

    def environ(self, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of a child: how it finds this agent, and reports why it fails."""
        found = dict(environ)
        found[VARIABLE] = self._agent.scripts.variable(rank)
        if self._settings.detects:
            found[VARIABLE_OF_HOOKS] = self.starts[rank].variable()
        return found

    def ending(self, rank: int) -> int | None:
        """The signal with which the job made a child end; None if it did not."""
        child = self._children.get(rank)
        if child is None:
            return None
        return child.stopping.ending

    def start(
        self, pids: Mapping[int, int], done: Callable[[], None], *, shares_keys: bool
    ) -> None:
        """The children of the ranks run; another thread calls `done` once `is_done` is true.

        `shares_keys`: the keys of this process's terminal reach them, too.
        """
        for start in self.starts.values():
            start.close_hooks()
        self._done = done
        self._job.mark(COMMAND)
        self._job.is_watched = self._settings.detects
        self._calls.put(lambda now: self._begin(pids, now, shares_keys=shares_keys))

    @property
    def next_round(self) -> RootCause | None:
        """Why the round has ended, once it has, if another one follows."""
        if self._leaves or not self._shell.facts.is_followed:
            return None
        return self._shell.root_cause

    @property
    def _leaves(self) -> bool:
        """Whether this agent takes no part in another round."""
        return self._is_asked or self._shell.facts.is_orphaned

    def asked(self, number: int) -> None:
        """A signal asks the wrapper to end: SIGTERM, or one that ended a child or found none."""
        self._is_asked = True
        self._calls.put(partial(self._stopping, number))

    def arrived(self, numbers: set[int]) -> None:
        """A signal has arrived; scripts get it, too, and may catch SIGINT and end in their own way.

        It is not in `numbers` if they ignore it.
        """
        if signal.SIGINT not in numbers:
            return
        grace = self._shell.facts.settings.grace
        self._shell.own.answers_interrupt_until = time.monotonic() + grace

    def holds_term(self, rank: int) -> bool:
        """Whether `ctx.preempted` tells the script of a rank to stop, in place of SIGTERM."""
        if self.is_done or self._shell.stops.is_read(rank) is False:
            return False
        child = self._children[rank]
        self._calls.put(child.stopping.tell_to_stop)
        return True

    def outlived(self, signals: set[int]) -> None:
        """A child has ended, and not because of these signals, which had arrived before."""
        if self._restarts is not None:
            self._restarts.ignore_between_rounds(signals)

    def is_harmless(self, number: int) -> bool:
        """Whether a script of this job has outlived this signal."""
        if self._restarts is None:
            return False
        return number in self._restarts.harmless

    def shows_stacks(self, number: int) -> bool:
        """A signal has arrived; returns whether it makes this agent show where all ranks are."""
        is_question = number == signal.SIGQUIT and self._settings.quit_shows
        if not is_question:
            return False
        self._calls.put(lambda now: self._shell.ask_stacks(self._show_stacks, now))
        return True

    def ended(self, rank: int, code: int) -> None:
        """A child has ended: exit code, or minus the signal."""
        end = ExitStatus.of_child(code)
        due = time.monotonic() + PRINTING
        self._calls.put(partial(self._ended, rank, end, due))

    def _ended(self, rank: int, end: ExitStatus, due: float, now: float) -> None:
        """Report its end once its output has been passed on, or `due` has come."""
        child = self._children[rank]
        if child.failure.has_passed_on() or now >= due:
            child.ended(end, now)
            return
        again = partial(self._ended, rank, end, due)
        self._agent.loop.call_at(now + LOOK, lambda: again(time.monotonic()))

    def hurry(self) -> None:
        """The wrapper was asked to end, although the other ranks have not."""
        self._calls.put(self._hurry)

    def _hurry(self, now: float) -> None:
        if self.may_restart:
            self._agent.loop.call_at(now + _TELLING, self._end_without_others)
        else:
            self._shell.hurry()

    def _end_without_others(self) -> None:
        cause = self._shell.root_cause
        # Once they were told to stop, all end by themselves
        if cause is None or cause.is_failure:
            self._shell.hurry()

    def final(self, codes: Mapping[int, int]) -> int:
        """The exit code of the wrapper, for those of its children, in the order of their ends."""
        cause = self._shell.root_cause
        found = {rank: self._final_code(rank, code) for rank, code in codes.items()}
        first: Sequence[int] = ()
        if cause is not None:
            first = cause.ranks
        failed_first = next(filter(found.get, first), None)
        if failed_first is not None:
            return found[failed_first]
        if self._shell.facts.is_followed and self._leaves:
            assert cause is not None
            return cause.exit_code  # the job has failed, and goes on without this agent's ranks
        return next(filter(None, found.values()), 0)

    def _final_code(self, rank: int, code: int) -> int:
        """The exit code that counts for a rank whose child has ended with `code`."""
        end = self._shell.facts.members[rank].end
        if end is None:  # the loop has ended before
            return code
        cause = self._shell.root_cause
        instead = 0
        if cause is not None:
            instead = cause.exit_code_for(end)
        return instead or end.status or 0

    def agents(self) -> tuple[EarlierAgent, ...]:
        """All agents of this round, for the next one."""
        membership = self._job.membership
        assert membership is not None
        node_of = membership.node_of()
        found = []
        for number, ranks in enumerate(membership.agents):
            node = node_of[ranks[0]]
            lost_at = max(map(self._lost_at, ranks))
            agent = EarlierAgent(
                number,
                membership.hosts[node],
                lost_at,
            )
            found.append(agent)
        return tuple(found)

    def _lost_at(self, rank: int) -> float:
        """0: as far as this agent knows, it was not lost."""
        member = self._shell.facts.members.get(rank)
        if member is None:
            return 0.0
        return member.lost_at

    def leave_job(self) -> None:
        """End without a failure of this rank: the wrapper becomes the command."""
        self._calls.put(lambda _: self._shell.leave())
        self._thread.join(_END_LIMIT)

    def __enter__(self) -> ThreadAgent:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # nothing was started
            self.hurry()
            self._thread.join(_END_LIMIT)
        if self.is_done:
            self._calls.close()
            for start in self.starts.values():
                start.close_hooks()  # if its process never ran
                os.close(start.reports)
            for child in self._children.values():
                child.of.close()

    def _work(self) -> None:
        try:
            self._agent.loop.run()
            cause = self._shell.root_cause
            if cause is not None and not cause.restarts:
                time.sleep(self._agent.seconds_to_stay)
        finally:
            self._agent.close()
            self.is_done = True
            self._done()

    def _show_stacks(self, lines: Sequence[str]) -> None:
        text = shown("\n".join(lines))
        self._shell.say(f"where all ranks are:{text}", event="stacks")

    def _stopping(self, number: int, now: float) -> None:
        """Tell all ranks that a signal asks this wrapper to stop."""
        if number == signal.SIGTERM:
            for child in self._children.values():
                child.terminating(now, of_wrapper=True)
        is_told = any(map(_external_signal, self._children.values()))
        if self.may_restart and not is_told:  # another round may follow, or does
            self._shell.take(self.ranks[0], Terminating(number, of_wrapper=True), now)

    def _begin(self, pids: Mapping[int, int], now: float, *, shares_keys: bool) -> None:
        self._shell.own.shares_keys = shares_keys
        if 0 in self.ranks:
            self._shell.facts.is_served = self.only_serves_rank_0
        for rank, pid in pids.items():
            of = RankProcess(
                rank,
                Process(pid),
                self._shell,
                self._agent.loop,
            )
            start = self.starts[rank]
            hooks = HookReader(start.reports, self._secret)
            child = MonitoredProcess(of, hooks)
            self._children[rank] = child
            child.failure.has_passed_on = start.has_passed_on
            self._shell.take(rank, Register(pid, cpus=start.cpus), now)
            phases = Phases(dict(self._job.steps))
            self._shell.take(rank, phases, now)
