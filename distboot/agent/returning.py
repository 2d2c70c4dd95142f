"""How an agent returns to rank 0's over another connection: one attempt at a time, in a thread."""

from __future__ import annotations

import socket
from contextlib import suppress
from math import inf
from typing import NamedTuple

from ..base.dataclass import replace
from ..base.errors import DistbootError
from ..base.threads import start_without_signals
from ..rendezvous.membership import JoinPlan
from ..rendezvous.protocol import Channel
from ..rendezvous.worker import NoAnswerError, UnreachableError, Worker

_ATTEMPT = 2.0  # seconds for one attempt
_PAUSE = 2.0  # seconds between two
_ANSWER = 5.0  # seconds for rank 0's agent to answer over the new connection


class NewConnection(NamedTuple):
    """An authenticated connection, for the caller."""

    socket: socket.socket
    channel: Channel


class Returning:
    """All attempts of one agent."""

    woken: socket.socket  # readable when an attempt is over
    _wake: socket.socket

    def __init__(self) -> None:
        self.is_possible = False  # whether rank 0's agent takes this one back
        self.process = ""  # what tells this process from any other one
        self._plan: JoinPlan | None = None  # with the place where it does
        self._is_running = False
        self._outcomes: list[NewConnection | NoAnswerError] = []
        self.due = inf  # when the next attempt begins

    def aim(self, plan: JoinPlan, host: str, port: int) -> None:
        """At `host` and `port` rank 0's agent takes this one back; `OSError`: no file is left."""
        self.woken, self._wake = socket.socketpair()
        self.woken.setblocking(False)
        self._wake.setblocking(False)
        self.is_possible = True
        self.process = plan.own.process
        self._plan = replace(
            plan,
            hosts=(host,),
            ports=(port,),
        )

    @property
    def is_active(self) -> bool:
        return self._is_running or self.due < inf

    def start(self, now: float) -> None:
        """Try now, and again and again until `stop`."""
        if self.is_possible:
            self.due = now

    def stop(self) -> None:
        self.due = inf

    def poll(self, now: float) -> NewConnection | NoAnswerError | None:
        """Start an attempt if one is due; returns, once, how an attempt has ended."""
        with suppress(BlockingIOError):
            self.woken.recv(64)
        if self._outcomes:
            self._is_running = False
            if self.due < inf:
                self.due = now + _PAUSE
            return self._outcomes.pop()
        if now >= self.due:
            self.due = now + _ATTEMPT + _PAUSE
            self._begin()
        return None

    def await_answer(self, now: float) -> float:
        """A new connection is used: try again if rank 0's agent does not answer by the returned time."""
        self.due = now + _ANSWER
        return self.due

    def close(self) -> None:
        if self.is_possible:
            self.woken.close()
            self._wake.close()
        for outcome in self._outcomes:
            if isinstance(outcome, NewConnection):
                outcome.socket.close()

    def _begin(self) -> None:
        if not self._is_running:
            self._is_running = True
            try:
                start_without_signals("distboot-return", self._attempt)
            except DistbootError as error:  # this user may start no more threads, for now
                self._end_attempt(UnreachableError(error.message))

    def _attempt(self) -> None:
        assert self._plan is not None
        outcome: NewConnection | NoAnswerError
        try:
            worker = Worker(self._plan)
            outcome = NewConnection(*worker.open_again(_ATTEMPT))
        except NoAnswerError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - for example no file, or no memory
            outcome = UnreachableError(str(error))
        self._end_attempt(outcome)

    def _end_attempt(self, outcome: NewConnection | NoAnswerError) -> None:
        self._outcomes.append(outcome)
        with suppress(OSError):
            self._wake.send(b"x")
