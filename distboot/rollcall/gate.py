"""The ranks of a job meet again, as often as they like: barriers and doors, which need no framework.

Rank 0 keeps the gate, at the socket where the ranks have met before, or at another one of its own. Every other rank
connects to it once, and each message is sealed as in the roll call, with the challenge and the nonce that it had there:

    rank   -> rank 0   {"gate": [digest of the job, rank]}
    rank   -> rank 0   {"here": door}             it waits there for all others
    rank   -> rank 0   {"through": door}          it is the first of its node, and lets the others there pass
    rank   -> rank 0   {"failed": [door, why]}    the same, but it has failed there, and the others are not to go in
    rank   -> rank 0   {"late": [door, seconds]}  it has waited there for so long, and does not any longer
    rank 0 -> rank     {"pass": door}
    rank 0 -> rank     {"failed": [door, why]}
    rank 0 -> rank     {"error": [code, message, hint]}

A door is what the ranks do there, on which node (null: all of them), and how often they have done so: ["main_first()",
null, 1]. Nothing of this runs in the background: rank 0 reads when it comes to the gate itself, and what it has said
stays in the connection until the other rank asks for it, even if rank 0 has ended by then.
"""

from __future__ import annotations

import os
import socket
from collections import Counter

from ..errors import DistbootError, said_by
from .doors import Door
from .gatekeeper import Gatekeeper
from .meeting import Meeting
from .visitor import Visitor


class Gate:
    """Where the ranks of a job wait for each other.

    Args:
        meeting: of all ranks, which have met; or of a single one.
        listener: rank 0's listening socket, which is the gate's from now on; default: the one where they have met.
        port: its port, on all ranks.
    """

    def __init__(self, meeting: Meeting, listener: socket.socket | None = None, port: int | None = None) -> None:
        placement, roster, membership = meeting.placement, meeting.roster, meeting.membership
        self._alone, self._who = placement.world_size == 1, placement.who
        self._times: Counter[tuple[str, int | None]] = Counter()
        self._process = os.getpid()
        self._side: Gatekeeper | Visitor | None = None
        if port is None:
            file = meeting.take_listener()
            listener = None if file is None else socket.socket(fileno=file)
        if self._alone:
            if listener is not None:
                listener.close()
        elif roster is not None and membership is not None and meeting.link is not None:
            sessions = meeting.link.sessions()
            if listener is not None:
                self._side = Gatekeeper(listener, sessions, membership.job, roster.nodes)
            elif meeting.store_address is not None:
                host, met_at = meeting.store_address
                self._side = Visitor((host, port or met_at), sessions[0], membership.job, placement)
        os.register_at_fork(after_in_child=self.close)  # the port ends with rank 0, not with its last data loader

    def barrier(self, limit: float) -> None:
        """Wait until all ranks are here, which may come later than each other by `limit` seconds.

        Raises:
            DistbootError: `missing-rank`, they were not, and who is missing.
        """
        with said_by(self._who):
            side, door = self._at("barrier()", None)
            if side is not None:
                side.meet(door, limit)

    def wait_for(
        self, what: str, limit: float, *, opens: bool, node: int | None = None, failure: str | None = None
    ) -> None:
        """Wait at a door, or open it for those that wait there, or will.

        Args:
            what: what the ranks do there, for example "main_first()".
            limit: seconds.
            opens: whether this rank is the one that opens it.
            node: the node whose ranks this is about; None: all ranks, and rank 0 opens.
            failure: why the one that opens it has failed, and the others are not to go in; None: it has not.

        Raises:
            DistbootError: `missing-rank`, the door was not opened in time, or somebody has not waited so long;
                `rank-failed`, the one that was to open it has failed.
        """
        with said_by(self._who):
            side, door = self._at(what, node)
            if side is not None and opens:
                side.open(door, limit, failure)
            elif side is not None:
                side.wait(door, limit)

    def close(self) -> None:
        """Let others have the port, and the other ranks know that this one is gone."""
        if self._side is not None:
            self._side.close()

    def _at(self, what: str, node: int | None) -> tuple[Gatekeeper | Visitor | None, Door]:
        if os.getpid() != self._process:
            raise DistbootError(
                "already-joined",
                f"{what} in a process that the rank forked: the rank is process {self._process}",
                "leave it to that one",
            )
        self._times[what, node] += 1
        door = Door(what, node, self._times[what, node])
        if self._side is None and not self._alone:
            raise DistbootError(
                "roll-call-needed", f"{door.said} needs the roll call, and it is off", "unset DISTBOOT_ROLL_CALL"
            )
        return self._side, door
