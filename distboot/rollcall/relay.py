"""The relay of a node in the roll call: to the ranks of its node it is rank 0, and to rank 0 it is all of them."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from ..detached import let_go_of_output
from ..errors import DistbootError
from ..record import as_problem
from ..roster import Roster
from .broadcast import send_to_all
from .caller import Caller
from .connections import received
from .greeting import OtherVersionError, session_with
from .handed import Handed
from .node import is_ours
from .relayed import MOST_FROM_A_LOCAL_RANK, batches, fitting, record_from
from .wire import VERSION, Announcement, Frames, Membership, Session, WireError, canonical, frame, fresh

_A_SECOND = 40_000  # ranks, whose relays come within it: the kernel keeps 4,096 that rank 0 has not accepted yet
_WINDOW = 0.02  # seconds in which what the ranks of a node say goes to rank 0 together
_ANSWER_LIMIT = 10.0  # seconds for them to take an answer
_ALONE = 10.0  # seconds without any of them after which there is nothing to do
_BEYOND = 30.0  # seconds beyond the join timeout, at which rank 0 has said all


class _Trunk(Caller):
    """The connection to rank 0, which has welcomed us."""

    via: tuple[object, ...] | None = None  # where rank 0 was reached: for the ranks, who have not been there

    def _welcomed(self, end: float) -> None:  # noqa: ARG002 - as Caller has it
        self.via = (self.host, self.port, self.resolves, self.address_of_rank_0(), self.own_address())

    def handed(self) -> Handed:
        """The connection, which is the caller's now."""
        connection, self._connection = self._connection, None
        assert connection is not None
        return Handed((0,), connection, self._session)

    def next_message(self) -> dict[str, object]:
        """What rank 0 says next, once there is something to read."""
        return self._next(time.monotonic() + _ANSWER_LIMIT)

    def opened(self, message: dict[str, object], *kinds: str) -> tuple[str, object]:
        return self._session.opened(message, *kinds)

    def send(self, kind: str, items: Sequence[str]) -> None:
        assert self._connection is not None
        self._connection.settimeout(_ANSWER_LIMIT)
        for batch in batches(self._session.sealed, kind, items):
            self._connection.sendall(batch)

    def fileno(self) -> int:
        """For selectors."""
        return -1 if self._connection is None else self._connection.fileno()


class _Local:
    """A rank of this node, and its connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.frames = Frames(MOST_FROM_A_LOCAL_RANK)
        self.challenge = fresh()
        self.session: Session | None = None  # once it has said hello
        self.is_welcome = False
        self.rank: int | None = None  # once it has reported
        self.is_reported = False  # whether rank 0 has heard of it


class Relay:
    """The relay until all ranks of the job have met.

    Args:
        listener: where the ranks of this node connect; closed when the roll call is over.
        hosts: where rank 0 may be.
        ports: where it may listen.
        starter: the rank that has started it, in whose output its lines are.
        membership: what tells the ranks of this job from everybody else.
        source: what says that rank 0 is there.
        join_timeout: seconds for rank 0 to be reached.
        world_size: of the job.
    """

    def __init__(
        self,
        listener: socket.socket,
        hosts: Sequence[str],
        ports: Sequence[int],
        starter: int,
        membership: Membership,
        *,
        source: str,
        join_timeout: float,
        world_size: int,
    ) -> None:
        self._listener, self._membership, self._join_timeout = listener, membership, join_timeout
        self._world_size = world_size
        self._starter = starter
        self._trunk = _Trunk(hosts, ports, f"rank {starter}", membership, world_size=world_size, source=source)
        self._locals: dict[socket.socket, _Local] = {}
        self._records: list[str] = []  # that rank 0 has not got yet
        self._said: list[str] = []
        self._due = 0.0  # when it is to get them
        self._is_up = False  # whether rank 0 was reached
        self._unreached: DistbootError | None = None  # why not
        self._since, self._is_new = time.monotonic(), True  # since when; and until the first rank is there
        self._selector = selectors.DefaultSelector()
        self._reached, self._wake = os.pipe()

    def meet(self) -> tuple[Roster, Handed, list[Handed]] | None:
        """Speak for the ranks of this node until the roster is there.

        Returns:
            The roster, the connection to rank 0 and those to the ranks, which are the caller's now; None if the ranks
            have not met, as they know.
        """
        threading.Thread(target=self._reach, daemon=True).start()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._reached, selectors.EVENT_READ)
        end = self._since + self._join_timeout + _BEYOND
        with self._selector:
            while (now := time.monotonic()) < end and (self._locals or (self._is_new and now < self._since + _ALONE)):
                wait = min(end, self._due) if self._due else min(end, now + 1.0)
                for key, _ in self._selector.select(max(wait - now, 0.0)):
                    if key.fileobj is self._trunk:
                        return self._answered()
                    self._take(key.fileobj)
                if self._due and time.monotonic() >= self._due and not self._pass_on():
                    self._refuse_all("lost the connection to rank 0")
                    return None
        if self._due:
            self._pass_on()  # that all of them have gone
        self._refuse_all("has waited for rank 0 in vain")
        return None

    def _reach(self) -> None:
        """In a thread, as a call blocks."""
        time.sleep(os.urandom(1)[0] / 255 * self._world_size / _A_SECOND)
        try:
            self._trunk.call(self._join_timeout, first_limit=max(1.0, 2 * self._world_size / _A_SECOND))
        except DistbootError as error:
            self._unreached = error
        finally:
            os.write(self._wake, b"\0")

    def _take(self, file: object) -> None:
        if file == self._reached:
            self._selector.unregister(self._reached)
            self._is_up = True
            if self._unreached is None:
                self._selector.register(self._trunk, selectors.EVENT_READ)
            else:
                self._accept_no_more()
            for local in list(self._locals.values()):
                if local.session is not None:
                    self._welcome(local)
        elif file is self._listener:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files, say
                self._accept_no_more()
                return
            if not is_ours(connection):
                connection.close()
                return
            connection.setblocking(False)
            self._locals[connection], self._is_new = _Local(connection), False
            self._selector.register(connection, selectors.EVENT_READ)
        elif isinstance(file, socket.socket) and file in self._locals:
            self._read(self._locals[file])

    def _accept_no_more(self) -> None:
        """Whoever comes later starts a relay of its own, or goes to rank 0 itself."""
        with suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def _read(self, local: _Local) -> None:
        data = received(local.socket)
        if data is None:
            return
        if not data:
            self._drop(local)
            return
        try:
            for message in local.frames.feed(data):
                self._hear(local, message)
        except (WireError, OtherVersionError, RecursionError) as error:
            self._send(local, frame({"refused": f"the peer {error}"}))
            self._drop(local)

    def _hear(self, local: _Local, message: dict[str, object]) -> None:
        if local.session is None:
            local.session = session_with(message, self._membership, "the relay of this node", local.challenge)
            if self._is_up:
                self._welcome(local)
            return
        if local.rank is not None or not local.is_welcome:
            raise WireError("speaks out of turn")
        _, content = local.session.opened(message, "record")
        local.rank = record_from(content).rank  # what rank 0 would not take must not end what it hears of the others
        if self._unreached is None:
            self._records.append(fitting([content, local.session.challenge, local.session.nonce]))
            self._due = self._due or time.monotonic() + _WINDOW

    def _welcome(self, local: _Local) -> None:
        local.is_welcome = True
        self._send(local, frame({"distboot": VERSION, "challenge": local.challenge, "via": self._trunk.via}))
        if self._unreached is not None and local.session is not None:
            self._send(local, local.session.sealed("unreached", canonical(as_problem(self._unreached))))

    def _pass_on(self) -> bool:
        """Whether rank 0 has got what it had not."""
        records, said, self._records, self._said, self._due = self._records, self._said, [], [], 0.0
        for local in self._locals.values():
            local.is_reported = local.rank is not None
        try:
            self._trunk.send("records", records)
            self._trunk.send("of", said)
        except OSError:
            return False
        return True

    def _answered(self) -> tuple[Roster, Handed, list[Handed]] | None:
        """What rank 0 says to all."""
        try:
            message = self._trunk.next_message()
            kind, content = self._trunk.opened(message, "roster", "error")
            roster = Roster.from_message(content, self._world_size) if kind == "roster" else None
        except (WireError, OSError, TypeError, ValueError, RecursionError) as error:
            self._refuse_all(f"lost rank 0, which {error}")
            return None
        there = [
            Handed((local.rank,), local.socket, local.session)
            for local in self._locals.values()
            if local.rank is not None and local.session is not None and local.is_reported
        ]
        answer = Announcement(kind, canonical(content))
        outgoing = {each.connection: partial(answer.sealed, each.session) for each in there}
        send_to_all(outgoing, _ANSWER_LIMIT)
        self._accept_no_more()  # whoever comes later hears from rank 0 that it is late
        for connection in self._locals:
            if connection not in outgoing or roster is None:
                connection.close()
        return None if roster is None else (roster, self._trunk.handed(), there)

    def _refuse_all(self, why: str) -> None:
        for local in list(self._locals.values()):
            self._send(local, frame({"refused": f"the relay of this node {why}"}))
            local.socket.close()

    def _drop(self, local: _Local) -> None:
        self._selector.unregister(local.socket)
        del self._locals[local.socket]
        local.socket.close()
        if local.rank == self._starter:
            let_go_of_output()
        if local.rank is not None and self._unreached is None:
            self._said.append(fitting([local.rank, "gone", ""]))
            self._due = self._due or time.monotonic() + _WINDOW

    def _send(self, local: _Local, data: bytes) -> None:
        with suppress(OSError):
            local.socket.send(data)
