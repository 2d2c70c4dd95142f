"""The side of every other rank: it reports to rank 0 and gets the roster back, or the reason why there is none."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from ..address import socket_said
from ..errors import DistbootError, tell
from ..record import Record
from ..roster import Roster
from .caller import Caller, NoAnswerError, told
from .handed import Handed
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
        super().__init__(hosts, ports, f"rank {own.rank}", membership, world_size=own.world_size, source=source)
        self._own = own
        self._roster: Roster | None = None
        self._met = 0.0  # when it came
        self._via: tuple[str, str] | None = None  # rank 0's address and that of this host, as the relay has them

    def report(self, join_timeout: float, *, quiet: bool = False, relay: socket.socket | None = None) -> Roster:
        """Report to rank 0: the roster.

        Args:
            join_timeout: in seconds.
            quiet: whether another rank says what is being waited for.
            relay: a connection to the relay of this node, which speaks with rank 0 for it; default: it speaks itself.

        Raises:
            DistbootError: what rank 0 says is wrong with the job, or `missing-rank` for rank 0 itself.
        """
        start = time.monotonic()
        if relay is None or not self._reports_to(relay, start + join_timeout):
            self.call(join_timeout, quiet=quiet, spent=time.monotonic() - start)
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
            why = f"has gone: {error.strerror}" if isinstance(error, OSError) else str(error)
            why = "does not answer any more" if isinstance(error, TimeoutError) else why
            rank_0 = f"rank 0 at {socket_said(self.host, self.port)}"
            who = rank_0 if self._via is None else f"the relay of this node to {rank_0}"
            hint = f"look at the output of rank 0{'' if self._via is None else ', and of this host'}"
            failure = DistbootError("rank-failed", f"all ranks joined, and then {who} {why}", hint)
        self.close()
        raise failure

    def sessions(self) -> dict[int, Session]:
        """What the messages of rank 0 are sealed with."""
        return {0: self._session}

    def hand_over(self) -> list[Handed]:
        """The connection, which is the caller's now."""
        connection, self._connection = self._connection, None
        return [] if connection is None else [Handed((0,), connection, self._session)]

    def _welcomed(self, end: float) -> None:
        left = max(end - time.monotonic(), 0.0)
        self._send("record", replace(self._own, clock=time.time(), patience=left).as_message())
        kinds = ("roster", "error") if self._via is None else ("roster", "error", "unreached")
        kind, said = self._session.opened(self._next(end + _GRACE), *kinds)
        if kind != "roster":
            raise told(said, "rank 0 says" if kind == "error" else "")
        try:
            roster = Roster.from_message(said, self._own.world_size)
            roster.place(self._own.rank)
        except (TypeError, ValueError, StopIteration) as error:
            raise WireError(f"sends a broken roster: {error}") from None
        self._roster, self._met = roster, time.monotonic()

    def own_address(self) -> str:
        return super().own_address() if self._via is None else self._via[1]

    def address_of_rank_0(self) -> str:
        return super().address_of_rank_0() if self._via is None else self._via[0]

    def _reports_to(self, relay: socket.socket, end: float) -> bool:
        """Whether the relay has done it."""
        self._connection, self._via = relay, ("", "")
        try:
            self._talk(end, end + _GRACE)  # it answers when it has reached rank 0
        except NoAnswerError as failure:
            tell(self._who, f"the relay of this node failed: {failure}; going to rank 0 without it")
            self._via, self._refusal = None, ""
            return False
        return True

    def _greet(self, welcome_end: float) -> dict[str, object]:
        welcome = super()._greet(welcome_end)
        via = welcome.get("via") if self._via is not None else None
        if via is not None:
            if not isinstance(via, list) or [type(each) for each in via] != [str, int, bool, str, str]:
                raise WireError("does not say where rank 0 is")
            self.host, self.port, self.resolves, *addresses = via
            self._via = (addresses[0], addresses[1])
        return welcome
