"""Rank 0's side of the roll call: it listens, enters whoever belongs to the job, and answers all of them at once."""

from __future__ import annotations

import selectors
import socket
import sys
import time

from ..errors import DistbootError, on_this_host, printable
from ..roster import Record, Roster, roster_of
from .register import Register
from .wire import (
    MOST_FROM_A_RANK,
    VERSION,
    Frames,
    Membership,
    WireError,
    authentication,
    canonical,
    frame,
    framed,
    fresh,
    is_authentic,
)

_REPORT_LIMIT = 10.0  # seconds that a peer has to report
_ANSWER_LIMIT = 10.0  # seconds that all of them together have to take the answer
_PROGRESS = 5.0  # seconds between two lines
_SPARE = 64  # connections beyond those of the ranks, for strangers


class _Peer:
    """One connection that has not reported, or that waits for the answer."""

    __slots__ = ("at", "born", "challenge", "frames", "nonce", "out", "rank", "socket")

    def __init__(self, connection: socket.socket, at: str) -> None:
        self.socket = connection
        self.at = at
        self.born = time.monotonic()
        self.frames = Frames(MOST_FROM_A_RANK)
        self.out: memoryview | None = None
        self.nonce: str | None = None
        self.challenge = fresh()
        self.rank: int | None = None


class Desk:
    """The roll call as rank 0 holds it.

    Args:
        listener: a listening socket, which stays open.
        own: rank 0's own record.
        membership: what tells the ranks of this job from everybody else.
    """

    def __init__(self, listener: socket.socket, own: Record, membership: Membership) -> None:
        self._listener = listener
        self._membership = membership
        self._register = Register(own.world_size)
        self._register.enter(own)
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()

    def hold(self, join_timeout: float) -> tuple[Roster, dict[int, socket.socket]]:
        """Wait for all ranks and answer them: the roster, and the connection of each rank.

        Raises:
            DistbootError: `missing-rank`, `duplicate-rank` or `roster-mismatch`; every rank that is there gets it, too.
        """
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            self._wait(join_timeout)
            records = [self._register.records[rank] for rank in range(self._register.world_size)]
            roster = roster_of(records)
            self._answer("roster", roster.as_message())
        except DistbootError as error:
            self._answer("error", [error.code, error.message, error.hint])
            self._close_all()
            raise
        finally:
            self._selector.close()
        return roster, {peer.rank: peer.socket for peer in self._peers.values() if peer.rank is not None}

    def _wait(self, join_timeout: float) -> None:
        start = time.monotonic()
        end, said = start + join_timeout, start + 1.0  # what is there within a second needs no line
        checked = start
        while not self._register.is_complete:
            now = time.monotonic()
            if now >= end:
                missing = self._register.missing_said()
                joined = f"{len(self._register.records)} of {self._register.world_size} ranks joined"
                raise DistbootError(
                    "missing-rank",
                    f"{joined} within {join_timeout:g} s, missing {missing}",
                    "look at the output of the missing ranks: they ended early, never started, or cannot reach rank 0",
                )
            if now >= said:
                said = now + _PROGRESS
                self._say(f"{self._register.progress()}; waiting for {end - now:.0f} s more")
            if now >= checked:
                checked = now + 0.5
                self._drop_late(now)
            for key, _ in self._selector.select(min(end - now, said - now, 0.5)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(self._peers[key.fileobj])  # type: ignore[index]

    def _accept(self) -> None:
        try:
            connection, at = self._listener.accept()
        except OSError:  # it has gone already, or there are no more file descriptors: those that are open go on
            return
        if len(self._peers) >= self._register.world_size + _SPARE:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[connection] = _Peer(connection, f"{at[0]}:{at[1]}")
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        try:
            for message in peer.frames.feed(data):
                self._take(peer, message)
        except WireError as error:
            self._refuse(peer, str(error))

    def _take(self, peer: _Peer, message: dict[str, object]) -> None:
        if peer.rank is not None:
            raise WireError("reports twice on one connection")
        if peer.nonce is None:
            if message.get("distboot") != VERSION:
                raise WireError(f"speaks version {message.get('distboot')!r} of the protocol, and rank 0 {VERSION}")
            if message.get("job") != self._membership.job:
                raise WireError("belongs to another job")
            peer.nonce = str(message.get("nonce"))
            self._send(peer, {"distboot": VERSION, "challenge": peer.challenge})
            return
        said = message.get("record")
        expected = authentication(self._membership.secret, peer.challenge, peer.nonce, "report", canonical(said))
        if not is_authentic(message.get("mac", ""), expected):
            raise WireError("does not know DISTBOOT_SECRET")
        try:
            record = Record.from_message(said)
        except (TypeError, ValueError) as error:
            raise WireError(f"sends a broken record: {error}") from None
        peer.rank = record.rank  # also if it does not fit: then it is told so
        self._register.enter(record)

    def _send(self, peer: _Peer, message: dict[str, object]) -> None:
        """Send what fits into an empty socket buffer; whoever leaves no room for it is dropped."""
        try:
            peer.socket.send(frame(message))
        except OSError:
            self._drop(peer)

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._say(f"refused a connection from {peer.at}: the peer {printable(why)}; the job goes on")
        self._send(peer, {"refused": f"the peer {why}"})
        self._drop(peer)

    def _drop_late(self, now: float) -> None:
        for peer in [peer for peer in self._peers.values() if peer.rank is None and now - peer.born > _REPORT_LIMIT]:
            self._refuse(peer, f"did not report within {_REPORT_LIMIT:g} s")

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.socket, None) is None:
            return
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank is not None:
            self._register.leave(peer.rank)

    def _answer(self, kind: str, content: object) -> None:
        """Tell every rank that is there, all at the same time, so that a slow one holds up nobody else."""
        self._selector.unregister(self._listener)  # who comes now has not reported, and gets no answer
        for peer in list(self._peers.values()):
            if peer.rank is None:
                self._drop(peer)
                continue
            self._selector.modify(peer.socket, selectors.EVENT_WRITE)
        text, shared = canonical(content), None
        if not self._membership.secret:
            shared = framed(f'{{"{kind}":{text},"mac":""}}')
        end = time.monotonic() + _ANSWER_LIMIT
        waiting = {peer.socket for peer in self._peers.values()}
        while waiting and time.monotonic() < end:
            for key, _ in self._selector.select(0.5):
                peer = self._peers[key.fileobj]  # type: ignore[index]
                if peer.out is None:  # only now: thousands of copies of the roster would fill the memory
                    peer.out = memoryview(shared or self._authentic(peer, kind, text))
                if self._write(peer):
                    waiting.discard(peer.socket)

    def _authentic(self, peer: _Peer, kind: str, text: str) -> bytes:
        mac = authentication(self._membership.secret, peer.challenge, str(peer.nonce), kind, text)
        return framed(f'{{"{kind}":{text},"mac":"{mac}"}}')

    def _write(self, peer: _Peer) -> bool:
        """Whether the peer has taken all of its answer, or will never do so."""
        assert peer.out is not None
        try:
            peer.out = peer.out[peer.socket.send(peer.out) :]
        except BlockingIOError:
            return False
        except OSError:
            peer.out = peer.out[:0]  # it has gone; the lifeline, or the framework, will say so
        if peer.out:
            return False
        self._selector.unregister(peer.socket)
        peer.out = None
        return True

    def _close_all(self) -> None:
        for peer in self._peers.values():
            peer.socket.close()

    def _say(self, text: str) -> None:
        print(f"distboot: {on_this_host('rank 0')}{text}", file=sys.stderr, flush=True)
