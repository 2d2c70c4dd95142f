"""The ranks of a job meet again, as often as they like: a barrier that needs no framework, and names who is missing."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from ..errors import DistbootError
from ..handoff import digest
from .client import Client
from .meeting import Meeting
from .server import Server
from .wire import Membership


class Gate:
    """Where the ranks meet again: at the socket of rank 0 where they have met before, which is the gate's now.

    Args:
        meeting: of all ranks, which have met; or of a single one.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._single = meeting.placement.world_size == 1
        self._address, self._membership, self._own = meeting.store_address, meeting.membership, meeting.own
        file = meeting.take_listener()
        self._listener = None if file is None else socket.socket(fileno=file)
        self._times = 0
        os.register_at_fork(after_in_child=self.close)  # the port ends with rank 0, not with its last data loader

    def wait(self, what: str, limit: float, *, first: bool = False) -> None:
        """Wait until all ranks are here.

        Args:
            what: what they do here, as a line says it, for example "barrier()".
            limit: seconds; the ranks may come later than each other by so much.
            first: whether the others wait for something that rank 0 does before.

        Raises:
            DistbootError: `missing-rank`, they were not, and who is missing.
        """
        self._times += 1
        if self._single:
            return
        if self._address is None or self._membership is None or self._own is None:
            raise DistbootError(
                "roll-call-needed", f"{what} needs the roll call, and it is off", "unset DISTBOOT_ROLL_CALL"
            )
        membership = Membership(digest(f"{self._membership.job}:{self._times}"), self._membership.secret)
        # Accelerators and versions were compared when they met first.
        own = replace(self._own, device=None, facts=())
        try:
            if self._listener is not None:
                server = Server(self._listener, own, membership)
                server.hold(limit, warn=False)
                server.close()
            else:
                client = Client([self._address[0]], [self._address[1]], own, membership)
                reason = "rank 0 is not through yet" if first else "rank 0 is not there yet"
                # Nobody accepts a connection while rank 0 is busy, so there should be few of them.
                client.report(limit, quiet=bool(own.local_rank), waiting_for=f"{what}: {reason}", patience=limit)
                client.close()
        except DistbootError as error:
            raise DistbootError(error.code, f"{what}: {error.message}", error.hint).of(f"rank {own.rank}") from None

    def close(self) -> None:
        """Let others have the port."""
        if self._listener is not None:
            self._listener.close()
