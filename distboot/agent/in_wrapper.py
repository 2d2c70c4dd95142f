"""The agent in the wrapper: a thread beside its loop on signals, which watches the children."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from ..errors import DistbootError
from ..process import start_without_signals
from ..rendezvous.job_info import JobInfo
from ..rendezvous.messages import Arrive, Failed, Ready, as_error
from ..report import COMMAND, EventLog
from ..settings import SupervisionSettings
from .agent import Agent
from .crash_hooks import out_of_the_way
from .exit_status import ExitStatus
from .failure_coordinator import FailureCoordinator
from .local import VARIABLE
from .loop import StopRequest
from .messages import Phases, Register
from .monitored_process import HookReader, MonitoredProcess, Process

_ASKS_TO_STOP = signal.SIGTERM  # others may mean something else to the child
_MARGIN = 5.0  # seconds beyond a limit for the thread to say that it is over


class ChildProcess(MonitoredProcess):
    """A child of the wrapper.

    Attributes:
        ending: the signal with which it was made to end; None if it was not.
    """

    ending: int | None = None

    def stop(self, order: StopRequest) -> None:
        """Ask it to end, unless it has ended or was asked already."""
        self.ending = int(signal.SIGTERM)
        super().stop(order)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.ending = int(signal.SIGKILL)
        super().kill()


class WrapperAgent:
    """The agent of the ranks whose processes `supervisor.run` starts.

    Args:
        job: all ranks have met.
        settings: of failure detection.
        secret: of the job; may be empty.

    Attributes:
        ranks: its own.
        files: the file descriptor that the child of each rank has to inherit.
        only_serves_rank_0: whether all other ranks do, and end with it.
        is_done: whether nothing is left to do; `run` may end.
    """

    def __init__(self, job: JobInfo, settings: SupervisionSettings, secret: str) -> None:
        self.is_done = False
        self.only_serves_rank_0 = False
        self._job, self._settings, self._secret = job, settings, secret
        assert job.joined is not None
        self.agent = Agent(job.joined, settings, held=True)
        self.ranks = self.agent.ranks
        self._role = self.agent.role
        self._events: queue.SimpleQueue[Callable[[float], object]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._words: dict[int, int] = {}
        self.files: dict[int, int] = {}
        for rank in self.ranks:
            self._words[rank], file = os.pipe()
            self.files[rank] = out_of_the_way(file)
            os.set_blocking(self.files[rank], False)  # whatever we do, the child can end
        self._children: dict[int, ChildProcess] = {}
        self._done: Callable[[], None] = lambda: None
        self.agent.loop.add_reader(self._woken, self._take_events)
        self._door = self.agent.open() if hasattr(signal, "pidfd_send_signal") else None

        def work() -> None:
            try:
                self.agent.loop.run()
            finally:
                self.agent.close()
                self.is_done = True
                self._has_ended.set()
                self._done()

        self._has_ended = threading.Event()
        start_without_signals("distboot-agent", work)  # they are for the main thread

    def environ(self, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment for a child, so that its script finds us, and Python in it leaves its last words to us."""
        found = {**environ, VARIABLE: "" if self._door is None else self._door.variable(rank)}
        if self._settings.detects:
            found["DISTBOOT_CRASH_HOOKS"] = f"{self.files[rank]}:{os.fstat(self.files[rank]).st_ino}"
        return found

    def ending(self, rank: int) -> int | None:
        """The signal with which a child was made to end because of the job; None if it was not."""
        child = self._children.get(rank)
        return None if child is None else child.ending

    def start(self, pids: Mapping[int, int], done: Callable[[], None]) -> None:
        """The children of the ranks run; `done` is called, in another thread, when `is_done` comes true."""
        for file in self.files.values():
            os.close(file)
        self._done = done
        self._job.mark(COMMAND)
        self._job.is_watched = self._settings.detects
        self.tell(lambda now: self._begin(pids, now))

    def asked(self, number: int) -> None:
        """The wrapper got a signal from outside, and passed it on."""
        if number == _ASKS_TO_STOP:
            self.tell(self._stopping)

    def ended(self, rank: int, code: int) -> None:
        """A child has ended: exit code, or minus the signal."""
        end = ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code)
        self.tell(lambda now: self._children[rank].ended(end, now))

    def hurry(self) -> None:
        """The wrapper was asked to end, after the children have."""
        self.tell(lambda _: self._role.hurry())

    def final(self, codes: Mapping[int, int]) -> int:
        """The exit code of the wrapper, for those of its children, in the order in which they have ended."""
        codes = {rank: self._final(rank, code) for rank, code in codes.items()}
        first = () if self._role.root_cause is None else self._role.root_cause.ranks
        return next(filter(None, (codes.get(rank) for rank in (*first, *codes))), 0)

    def _final(self, rank: int, code: int) -> int:
        """Who was stopped for a failure has no success."""
        child = self._children.get(rank)
        if child is None:  # the loop has ended before it had begun
            return code
        if child.done and code in (128 + signal.SIGTERM, 128 + signal.SIGKILL):
            return 0
        cause = self._role.root_cause
        was_stopped = child.stopped_by_us or child.external_signal is not None
        return 128 + signal.SIGTERM if code == 0 and was_stopped and cause and cause.is_failure else code

    def leave_job(self) -> None:
        """End, as the wrapper becomes the command; that is no failure of this rank."""
        self.tell(lambda _: self._role.leave())
        self._has_ended.wait(_MARGIN)

    def __enter__(self) -> WrapperAgent:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # nothing was started
            self.tell(lambda _: self._role.hurry())
            self._has_ended.wait(_MARGIN)

    def tell(self, event: Callable[[float], object]) -> None:
        """Let the thread call this with the time."""
        self._events.put(event)
        with suppress(OSError):
            os.write(self._wake, b"\0")

    def _stopping(self, now: float) -> None:
        for child in self._children.values():
            child.stopping(now)

    def _begin(self, pids: Mapping[int, int], now: float) -> None:
        loop, bound = self.agent.loop, self._settings.bound
        if isinstance(self._role, FailureCoordinator):
            self._role.is_served = self.only_serves_rank_0
        for rank, pid in pids.items():
            words = self._words[rank]
            reader = HookReader(words, self._secret)
            child = ChildProcess(rank, Process(pid), reader, words, loop=loop, role=self._role, bound=bound)
            self._children[rank] = loop.watched[rank] = child
            self._role.take(rank, Register(pid), now)
            self._role.take(rank, Phases(dict(self._job.steps)), now)

    def _take_events(self, now: float) -> None:
        os.read(self._woken, 4096)
        with suppress(queue.Empty):
            while True:
                self._events.get_nowait()(now)


class WrapperLink:
    """A `Link` for what the wrapper itself has to wait for, as one of its ranks."""

    def __init__(self, agent: WrapperAgent, job: JobInfo, rank: int) -> None:
        self._agent, self._job, self._rank = agent, job, rank

    def get_ready(self, message: Ready) -> dict[int, str]:
        """Wait until all ranks are ready: what they offer, by rank."""
        answer = self._ask(message, message.limit)
        return {each.rank: each.offer for each in answer.offers}

    def arrive(self, message: Arrive) -> None:
        """Wait at a key, or lead there."""
        self._ask(message, message.limit)

    def listener(self, port: int) -> socket.socket | None:  # noqa: ARG002 - as Link has it
        """Rank 0's listening socket, where this very process is the script."""
        assert self._job.joined is not None
        return self._job.joined.take_listener()

    def keep(self) -> None:
        """The listening socket is the script's."""

    def log(self) -> EventLog | None:
        """What rank 0 has learned of the job; None on all other ranks."""
        return self._job.log

    def leave(self) -> None:
        """The wrapper stays."""

    def _ask(self, message: Arrive | Ready, limit: float) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._agent.tell(lambda now: self._agent.agent.ask(self._rank, message, answers, now))
        try:
            answer = answers.get(timeout=limit + _MARGIN)
        except queue.Empty:
            raise DistbootError(
                "join-timeout", f"rank 0 has not answered within {limit:g} s", "look at its output"
            ) from None
        if isinstance(answer, Failed):
            raise as_error(answer.problem, "")
        return answer
