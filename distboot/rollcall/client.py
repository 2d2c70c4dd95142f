"""The side of every other rank: it reports to rank 0 and gets the roster back, or the reason why there is none."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from ..address import socket_said
from ..errors import DistbootError
from ..record import Record
from ..roster import Roster
from .caller import Caller, told
from .ready import Ready, offers_from
from .wire import Membership, Session, WireError

_GRACE = 0.8  # seconds beyond the join timeout for rank 0 to say who is missing
_RANK_0_LATER = 2.0  # seconds beyond the join timeout, counted from the roster, for rank 0 to say who is not ready


class Client(Caller):
    """A rank other than 0 in the roll call.

    Args:
        hosts: names or addresses of rank 0's host, the likeliest first.
        ports: those that rank 0 may listen at, in the order in which it tries them.
        own: this rank's record.
        membership: what tells the ranks of this job from everybody else.
        source: what says that rank 0 is there, for example "MASTER_ADDR".
    """

    def __init__(
        self, hosts: Sequence[str], ports: Sequence[int], own: Record, membership: Membership, source: str = ""
    ) -> None:
        super().__init__(hosts, ports, f"rank {own.rank}", membership, source)
        self._own = own
        self._roster: Roster | None = None
        self._met = 0.0  # when it came

    def report(self, join_timeout: float, *, quiet: bool = False) -> Roster:
        """Report to rank 0: the roster.

        Args:
            join_timeout: in seconds.
            quiet: whether another rank says what is being waited for.

        Raises:
            DistbootError: what rank 0 says is wrong with the job, or `missing-rank` for rank 0 itself.
        """
        self.call(join_timeout, quiet=quiet)
        assert self._roster is not None
        return self._roster

    def confirm(self, own: Ready, join_timeout: float) -> dict[int, str]:
        """Say that this rank is ready, or why not, and wait until all of them are: what they offer, by rank.

        `join_timeout` seconds begin when the roster came; rank 0 says when they are over.

        Raises:
            DistbootError: why another rank is not ready, or `rank-failed` for rank 0 itself.
        """
        end = self._met + join_timeout + _RANK_0_LATER
        try:
            self._send("ready", own.as_message())
            kind, said = self._session.opened(self._next(end), "go", "error")
            if kind == "go":
                return offers_from(said, self._own.world_size)
            failure = told(said)
        except (WireError, OSError, RecursionError) as error:
            why = "does not answer any more" if isinstance(error, TimeoutError) else str(error)
            failure = DistbootError(
                "rank-failed",
                f"all ranks joined, and then rank 0 at {socket_said(self.host, self.port)} {why}",
                "look at the output of rank 0",
            )
        self.close()
        raise failure

    def sessions(self) -> dict[int, Session]:
        """What the messages of rank 0 are sealed with."""
        return {0: self._session}

    def hand_over(self) -> dict[int, tuple[socket.socket, Session]]:
        """The connection, which is the caller's now, by the rank at its other end."""
        connection, self._connection = self._connection, None
        return {} if connection is None else {0: (connection, self._session)}

    def _welcomed(self, end: float) -> None:
        left = max(end - time.monotonic(), 0.0)
        self._send("record", replace(self._own, clock=time.time(), patience=left).as_message())
        kind, said = self._session.opened(self._next(end + _GRACE), "roster", "error")
        if kind == "error":
            raise told(said)
        try:
            roster = Roster.from_message(said)
            roster.place(self._own.rank)
        except (TypeError, ValueError, StopIteration) as error:
            raise WireError(f"sends a broken roster: {error}") from None
        self._roster, self._met = roster, time.monotonic()
