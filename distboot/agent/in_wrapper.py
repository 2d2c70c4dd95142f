"""The agent in the wrapper: a thread beside its loop on signals, which watches the children."""

from __future__ import annotations

import os
import queue
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ..base.settings import SupervisionSettings
from ..base.threads import start_without_signals
from ..job.exit_status import ExitStatus, shown
from ..job.messages import Phases, Register
from ..rendezvous.events import COMMAND
from ..rendezvous.membership import EarlierAgent
from ..script.crash_hooks import VARIABLE as VARIABLE_OF_HOOKS
from ..script.crash_hooks import out_of_the_way
from .agent import Agent
from .failure_coordinator import FailureCoordinator
from .link import VARIABLE, AgentLink
from .monitored_process import HookReader, MonitoredProcess, Process
from .session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..job.root_cause import RootCause
    from .launcher_process import LauncherProcess
    from .restarts import Restarts

_END_LIMIT = 5.0  # seconds for the thread to say that it is over


class WrapperAgent:
    """The agent of the ranks whose processes `supervisor.run` starts."""

    def __init__(
        self,
        job: Session,
        settings: SupervisionSettings,
        restarts: Restarts | None,
        launcher: LauncherProcess | None = None,
    ) -> None:
        self.is_done = False  # whether nothing is left to do; `supervisor.run` may end
        self.only_serves_rank_0 = False  # whether all other ranks do, and end with it
        self._is_asked = False
        self._restarts = restarts
        self._job, self._settings = job, settings
        assert job.joined is not None
        self._secret = job.joined.plan.secret
        self._agent = Agent(job.joined, settings, held=True)
        self._role, self.ranks, self.may_restart = (
            self._agent.role,
            self._agent.ranks,
            self._agent.role.may_restart,
        )
        assert job.membership is not None
        if restarts is not None:
            is_rank_0 = isinstance(self._role, FailureCoordinator)
            restarts.begin(job.membership.round, job.membership.max_restarts, is_rank_0=is_rank_0)
            self._role.restarts = restarts if job.membership.max_restarts else None
        self._events: queue.SimpleQueue[Callable[[float], object]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._reports: dict[int, int] = {}  # the ends of the same pipes from which we read
        self.files: dict[int, int] = {}  # which the child of each rank has to inherit
        for rank in self.ranks:
            self._reports[rank], file = os.pipe()
            self.files[rank] = out_of_the_way(file)
            os.set_blocking(self.files[rank], False)  # whatever we do, the child can end
        self._children: dict[int, MonitoredProcess] = {}
        self._done: Callable[[], None] = lambda: None
        self._agent.loop.add_reader(self._woken, self._take_events)
        if launcher is not None:
            self._agent.watch_launcher(launcher)
        if hasattr(signal, "pidfd_send_signal"):
            self._agent.open()
        # They are for the main thread
        self._thread = start_without_signals("distboot-agent", self._work)

    def link(self, rank: int) -> AgentLink:
        """What this process waits with as a rank of its own."""
        ours, its = socket.socketpair()
        self._call(lambda _: self._agent.serve(its, rank))
        return AgentLink(ours)

    def environ(self, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment for a child, so that its script finds us, and its Python reports to us why it fails."""
        found = {**environ, VARIABLE: self._agent.variable(rank)}
        if self._settings.detects:
            found[VARIABLE_OF_HOOKS] = f"{self.files[rank]}:{os.fstat(self.files[rank]).st_ino}"
        return found

    def ending(self, rank: int) -> int | None:
        """The signal with which a child was made to end because of the job; None if it was not."""
        return self._children[rank].ending if rank in self._children else None

    def start(self, pids: Mapping[int, int], done: Callable[[], None]) -> None:
        """The children of the ranks run; `done` is called, in another thread, when `is_done` comes true."""
        for file in self.files.values():
            os.close(file)
        self._done = done
        self._job.mark(COMMAND)
        self._job.is_watched = self._settings.detects
        self._call(lambda now: self._begin(pids, now))

    @property
    def next_round(self) -> RootCause | None:
        """Why the round has ended, once it has, if another one follows."""
        cause = self._role.root_cause
        follows = cause is not None and cause.restarts and not self._leaves
        return cause if follows else None

    @property
    def _leaves(self) -> bool:
        """Whether this agent takes no part in another round."""
        return self._is_asked or self._role.is_orphaned

    def asked(self, number: int) -> None:
        """A signal asks the wrapper to end: SIGTERM, another one that ended a child, or that found none."""
        self._is_asked = True
        if number == signal.SIGTERM:
            self._call(self._stopping)

    def holds_term(self, rank: int) -> bool:
        """Whether `ctx.preempted` tells the script of a rank to stop, so that it is not to get SIGTERM now."""
        is_read = self._role.stops.is_read(rank)
        if self.is_done or is_read is False:
            return False
        child = self._children[rank]
        self._call(child.tell_to_stop)
        return True

    def outlived(self, signals: set[int]) -> None:
        """A child has ended later, and of something else, than of signals that came."""
        if self._restarts is not None:
            self._restarts.outlived(signals)

    def is_harmless(self, number: int) -> bool:
        """Whether a signal does not end a script of this job, as it has shown."""
        return self._restarts is not None and number in self._restarts.harmless

    def shows_stacks(self) -> bool:
        """SIGQUIT came: whether it is ours, and we say where all ranks are."""
        if self._settings.quit_shows:
            self._call(lambda now: self._role.ask_stacks(self._show_stacks, now))
        return self._settings.quit_shows

    def ended(self, rank: int, code: int) -> None:
        """A child has ended: exit code, or minus the signal."""
        self._call(lambda now: self._children[rank].ended(ExitStatus.of_child(code), now))

    def hurry(self) -> None:
        """The wrapper was asked to end, although the other ranks have not."""
        self._call(lambda _: self._role.hurry())

    def final(self, codes: Mapping[int, int]) -> int:
        """The exit code of the wrapper, for those of its children, in the order in which they have ended."""
        cause, found = self._role.root_cause, dict(codes)
        for rank in codes:
            end = self._role.members[rank].end
            if end is not None:  # else the loop has ended before
                found[rank] = (0 if cause is None else cause.exit_code_for(end)) or end.status or 0
        first = () if cause is None else cause.ranks
        if cause is not None and cause.restarts and self._leaves:
            # The job has failed, and goes on without this agent's ranks
            return next(filter(None, (found.get(rank) for rank in first)), cause.exit_code)
        return next(filter(None, (found.get(rank) for rank in (*first, *found))), 0)

    def agents(self) -> tuple[EarlierAgent, ...]:
        """All agents of this round, for the next one."""
        membership, lost_at = self._job.membership, self._role.lost_at
        assert membership is not None
        node_of = membership.node_of()
        return tuple(
            EarlierAgent(
                number,
                membership.hosts[node_of[ranks[0]]],
                max(lost_at.get(rank, 0.0) for rank in ranks),
            )
            for number, ranks in enumerate(membership.agents)
        )

    def leave_job(self) -> None:
        """End, as the wrapper becomes the command; that is no failure of this rank."""
        self._call(lambda _: self._role.leave())
        self._thread.join(_END_LIMIT)

    def __enter__(self) -> WrapperAgent:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # nothing was started
            self.hurry()
            self._thread.join(_END_LIMIT)
        if self.is_done:
            for file in (self._woken, self._wake, *self._reports.values()):
                os.close(file)
            for child in self._children.values():
                child.process.close()

    def _work(self) -> None:
        try:
            self._agent.loop.run()
        finally:
            self._agent.close()
            self.is_done = True
            self._done()

    def _call(self, event: Callable[[float], object]) -> None:
        """Let the thread call this with the time."""
        self._events.put(event)
        with suppress(OSError):
            os.write(self._wake, b"\0")

    def _take_events(self, now: float) -> None:
        os.read(self._woken, 4096)
        while not self._events.empty():
            self._events.get()(now)

    def _show_stacks(self, lines: Sequence[str]) -> None:
        self._role.say("where all ranks are:" + shown("\n".join(lines)), event="stacks")

    def _stopping(self, now: float) -> None:
        for child in self._children.values():
            child.stopping(now, of_wrapper=True)

    def _begin(self, pids: Mapping[int, int], now: float) -> None:
        if isinstance(self._role, FailureCoordinator):
            self._role.is_served = self.only_serves_rank_0
        for rank, pid in pids.items():
            hooks = HookReader(self._reports[rank], self._secret)
            self._children[rank] = MonitoredProcess(rank, Process(pid), hooks, self._agent)
            self._role.take(rank, Register(pid), now)
            self._role.take(rank, Phases(dict(self._job.steps)), now)
