"""What an agent asks of the process of a rank of its own; `monitored_process` is what there is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..job.messages import Locate


class Terminate(NamedTuple):
    """An order to stop the process of a rank."""

    at: float
    # Whether another rank has failed; else an external signal stops the job
    is_failure: bool
    is_done: bool = False  # neither: its work is done, and it has ended well


class OwnProcess(Protocol):
    """The process of a rank. All times are those of `time.monotonic`."""

    # Whether its exit code was reported, and is not yet where its launcher reads it
    is_leaving: bool

    def poll(self, now: float) -> None:
        """Once a second."""

    def skip(self, seconds: float) -> None:
        """Leave out a time in which the whole job was stopped."""

    def pass_key(self, now: float) -> None:
        """Its script begins to wait at a key, or goes on there."""

    def locate(self, question: Locate, now: float) -> None:
        """Report how far it is."""

    def decided(self) -> None:
        """The root cause is known."""

    def stop(self, order: Terminate, now: float) -> None:
        """Execute an order."""

    def pass_on_term(self, now: float) -> None:
        """In each turn: send the SIGTERM that is held back, if its time has come."""
