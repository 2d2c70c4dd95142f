"""In the process of the script: starts the agent beside it, and ties the end of this process to that."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

from ..rendezvous.job_info import JobInfo
from ..rendezvous.membership import JoinPlan
from ..settings import SupervisionSettings
from ..text import log_line
from . import crash_hooks, exit_hook, spawn_detached
from .local import AgentLink, Begin

_ANSWER_LIMIT = 15  # seconds; rank 0 waits 5 for the others

_current: Sidecar | None = None  # of this process


class Sidecar:
    """The agent of this process.

    Raises:
        OSError: it does not start.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        try:
            self._start()
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def begin(self, plan: JoinPlan, settings: SupervisionSettings) -> None:
        """Let it join; see `AgentLink.joined`."""
        self._settings, self._who = settings, f"rank {plan.own.rank}"
        report = settings.report
        self.link.begin(Begin(plan, os.getpid(), settings.bound, settings.grace, report, settings.detects))

    @property
    def is_current(self) -> bool:
        """Whether it has taken over."""
        return _current is self

    def take_over(self, job: JobInfo) -> None:
        """All ranks are ready: from now on it hears how this process ends."""
        global _current  # noqa: PLW0603 - a process has one
        if _current is not None:
            _current.close()
        _current = self
        if self._settings.detects and sys.platform == "linux":
            try:
                exit_hook.report_exit_code(self._status, self._status)
            except (OSError, AttributeError) as error:
                log_line(self._who, f"warning: this rank's exit code is not known in time: {error}")
            crash_hooks.install(self._words, term=True)
            job.is_watched = True
        tell_steps(job)

    def close(self) -> None:
        """End the agent of a rank that has left the job; or one that is not needed."""
        if hasattr(self, "link"):
            self.link.end()
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _start(self) -> None:
        control, its_control = socket.socketpair()
        # Both ends stay open here: writing to an agent that was killed must not end the script.
        reading, writing = os.pipe()
        self._words = crash_hooks.out_of_the_way(writing)
        os.set_blocking(self._words, False)  # whatever the agent does, the script can end
        reports, status = socket.socketpair()
        # The C library waits there for the answer, but not for an agent that a user has stopped.
        status.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _ANSWER_LIMIT, 0))
        self._status = status.detach()  # a number, as an object of Python's would be missed at the end of the process
        self._files += [reading, self._words, self._status]
        with its_control, reports:
            started = spawn_detached.start("distboot.agent.sidecar", its_control.fileno(), reading, reports.fileno())
        self.link = AgentLink(socket.socket(fileno=crash_hooks.out_of_the_way(control.detach())))
        spawn_detached.wait_until_started(started)


def tell_steps(job: JobInfo) -> None:
    """Tell the agent of this process how its beginning went, so far."""
    # A message `Phases`, without the modules of the agent's messages, which no script needs.
    crash_hooks.emit(crash_hooks.STEPS, json.dumps({"kind": "Phases", "times": job.steps}))
