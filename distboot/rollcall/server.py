"""Rank 0's side of the roll call: it listens, enters whoever belongs to the job, and answers all of them at once."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..errors import DistbootError, quoted, tell
from ..record import Record, as_error, as_problem
from ..report.history import History
from ..roster import Roster, roster_of, with_nodes
from .broadcast import send_to_all
from .connections import Connections, OutOfFilesError, Peer
from .files import allow_files, files_allowed
from .findings import findings, refuse_several_frameworks
from .ready import Ready, offers_message
from .register import Register
from .seen import Seen
from .wire import ONE_DISTBOOT, VERSION, Membership, Session, WireError, canonical, frame

_ANSWER_LIMIT = 10.0  # seconds that all of them together have to take the answer
_PROGRESS = 5.0  # seconds between two lines
_LINGER = 0.5  # seconds for ranks that come a little later than a failure to hear of it


class Server:
    """The roll call as rank 0 holds it.

    Args:
        listener: a listening socket, which stays open.
        own: rank 0's own record.
        membership: what tells the ranks of this job from everybody else.

    Attributes:
        findings: what the ranks should have alike and have not.
        doubt: why ranks may be missing, to be said with them; empty if nothing is known.
        remedy: what to do when ranks are missing.
        open_files: the soft limit of open files before it was raised for all connections; None: it was not.
    """

    def __init__(self, listener: socket.socket, own: Record, membership: Membership) -> None:
        self.findings: list[str] = []
        self.doubt = ""
        self.remedy = "look at the output of the missing ranks: they ended early, never started, or cannot reach rank 0"
        self.open_files: int | None = None
        self._own = own
        self._membership = membership
        self._register = Register(own.world_size)
        self._roster: Roster | None = None  # once the roll call is over
        self._unready: set[int] = set()  # once it is over: those that are not ready to start the framework
        self._offers: dict[int, str] = {}  # of those that are
        self._connections = Connections(listener, own.world_size, self._take, self._lost, self._say)
        self._at: dict[int, Peer] = {}  # where each rank is to be reached
        self._misfit: Peer | None = None  # whose record ended the roll call
        self._seen = Seen(own)
        self._met = 0.0  # when the roster was sent
        self._failure: str | None = None  # once it has failed: why, as all ranks are told
        self._told = 0
        self._end = 0.0
        self._limit = ""  # what ended the waiting for ranks, as the error says it

    def hold(self, join_timeout: float, *, warn: bool = True) -> Roster:
        """Wait for all ranks and answer them with the roster; `warn` of what they should have alike and have not.

        Raises:
            DistbootError: `missing-rank`, or what is wrong with the job; every rank that is there gets it, too.
        """
        self._end, self._limit = time.monotonic() + join_timeout, f"within {join_timeout:g} s"
        try:
            self.open_files = allow_files(self._connections.room, self._say)
            self._register.enter(self._own)
            self._wait(lambda: self._register.is_complete, self._joined, self._missing)
            records = [self._register.records[rank] for rank in range(self._register.world_size)]
            roster = replace(roster_of(records), master_addr=self._reached())
            refuse_several_frameworks(records, roster)
            self.findings = findings(records, roster, self._seen.skews())
            for finding in self.findings if warn else ():
                self._say(f"warning: {finding}")
        except DistbootError as error:
            self._fail(error)
            raise
        self._seen.met()
        self._connections.drop_strangers()  # they come too late for it
        self._answer("roster", roster.as_message())
        self._roster, self._unready = roster, set(range(self._register.world_size))
        self._register.forget_accelerators()
        self._met = time.monotonic()
        return roster

    def confirm(self, own: Ready, join_timeout: float) -> dict[int, str]:
        """Wait until every rank is ready to start the framework, and tell them all to go: what they offer, by rank.

        `join_timeout` seconds begin when the roster was sent, so that what rank 0 itself needs counts; but what has
        come meanwhile is read in any case.

        Raises:
            DistbootError: what any of them cannot be ready for, `rank-failed` or `missing-rank`; all of them get it.
        """
        self._end = max(self._met + join_timeout, time.monotonic() + _LINGER)
        self._seen.are_to_be_ready = True
        try:
            self._enter_ready(self._own.rank, own)
            self._wait(lambda: not self._unready, self._waiting, self._not_ready)
        except DistbootError as error:
            self._fail(error)
            raise
        self._answer("go", offers_message(self._offers))
        return self._offers

    def history(self) -> History:
        """What was seen so far, for the report of the job."""
        return self._seen.history(self._register, self._roster, self._unready, self.findings)

    def sessions(self) -> dict[int, Session]:
        """What the messages of each other rank are sealed with."""
        return {rank: peer.session for rank, peer in self._at.items() if peer.session}

    def hand_over(self) -> dict[int, tuple[socket.socket, Session]]:
        """The connections, which are the caller's now, by the rank at the other end."""
        for peer in self._at.values():
            self._connections.give_away(peer)
        return {rank: (peer.socket, peer.session) for rank, peer in sorted(self._at.items()) if peer.session}

    def close(self) -> None:
        """End all connections; the listener stays open."""
        self._connections.close()

    def _reached(self) -> str | None:
        """The address of this host under which the ranks of other nodes reached it; None when there are none."""
        elsewhere = [peer for rank, peer in self._at.items() if self._register.records[rank].node != self._own.node]
        addresses = Counter(peer.own_address() for peer in elsewhere)
        return addresses.most_common(1)[0][0] if addresses else None

    def _joined(self) -> str:
        return f"{self._register.progress()}{self._register.left_said()}{self.doubt}"

    def _missing(self) -> DistbootError:
        joined = f"{len(self._register.records)} of {self._register.world_size} ranks joined"
        why = f"{self._register.left_said()}{self.doubt}{self._connections.refusals()}"
        return DistbootError(
            "missing-rank",
            f"{joined} {self._limit}, missing {self._register.missing_said()}{why}",
            self.remedy,
        )

    def _waiting(self) -> str:
        return f"all ranks are there; waiting for {self._unready_said()} to be ready"

    def _unready_said(self) -> str:
        assert self._roster is not None
        return f"rank {with_nodes(sorted(self._unready), self._roster.node_of())}"

    def _not_ready(self) -> DistbootError:
        return DistbootError(
            "missing-rank",
            f"all ranks joined, and then did not get ready in time: {self._unready_said()}",
            "look at their output: the import of the framework hangs or is slow there, or their host has gone",
        )

    def _wait(self, over: Callable[[], bool], progress: Callable[[], str], late: Callable[[], DistbootError]) -> None:
        said = time.monotonic() + 1.0  # what is there within a second needs no line
        while not over():
            now = time.monotonic()
            if now >= self._end:
                raise late()
            if now >= said:
                said = now + _PROGRESS
                self._say(f"{progress()}; waiting for {self._end - now:.0f} s more")
            try:
                self._connections.turn(min(self._end, said) - now)
            except OutOfFilesError:
                if self._failure is None:
                    raise self._too_few_files() from None
                self._connections.accept_no_more()  # all that are there hear of the failure

    def _too_few_files(self) -> DistbootError:
        return DistbootError(
            "too-few-files",
            f"rank 0 may open {files_allowed()} files, too few for the connections of "
            f"{self._register.world_size} ranks; {len(self._register.records)} of them had joined",
            "raise the limit for rank 0 (ulimit -n, LimitNOFILE=, or docker run --ulimit nofile=…)",
        )

    def _take(self, peer: Peer, message: dict[str, object]) -> None:
        if peer.session is None:
            self._take_hello(peer, message)
        elif peer.rank is None:
            self._take_record(peer, message)
        elif self._roster is None:
            raise WireError("reports twice on one connection")
        else:
            _, content = peer.session.opened(message, "ready")
            self._enter_ready(peer.rank, Ready.from_message(content))

    def _take_hello(self, peer: Peer, message: dict[str, object]) -> None:
        if message.get("job") != self._membership.job:
            raise WireError("belongs to another job")
        if message.get("distboot") != VERSION:
            self._refuse_version(peer, quoted(message.get("distboot")))
        nonce = message.get("nonce")
        if not isinstance(nonce, str) or len(nonce) != len(peer.challenge):
            raise WireError("sends no nonce")
        peer.session = Session(self._membership.secret, "rank 0", peer.challenge, nonce)
        peer.welcomed = time.time()
        self._connections.send(peer, frame({"distboot": VERSION, "challenge": peer.challenge}))

    def _refuse_version(self, peer: Peer, version: str) -> None:
        said = f"speaks version {version} of the protocol, and rank 0 {VERSION}"
        if self._membership.secret:  # then it is nobody's word
            raise WireError(said)
        self._connections.send(peer, frame({"incompatible": f"the peer {said}"}))
        raise DistbootError("version-mismatch", f"the peer at {peer.at} {said}", ONE_DISTBOOT)

    def _take_record(self, peer: Peer, message: dict[str, object]) -> None:
        assert peer.session is not None
        _, content = peer.session.opened(message, "record")
        try:
            record = Record.from_message(content)
        except (TypeError, ValueError) as error:
            raise WireError(f"sends a broken record: {error}") from None
        if self._failure is not None:
            self._connections.send(peer, peer.session.sealed("error", self._failure))
            self._told += 1
            return
        if self._roster is not None:
            first = self._register.records.get(record.rank, record)
            there = f"rank {record.rank} is there already, as process {first.pid} on {quoted(first.host)}"
            raise WireError(f"comes after the roll call, and {there}")
        self._connections.admit(peer)
        self._misfit = peer
        self._register.enter(record)
        self._misfit, peer.rank = None, record.rank
        earlier = self._at.get(record.rank)
        self._at[record.rank] = peer
        if earlier is not None:  # the same process, over a new connection
            earlier.rank = None
            self._connections.drop(earlier)
        self._seen.joined(record, peer.welcomed)
        end = time.monotonic() + record.patience
        if end < self._end:  # whoever is out of patience first is told who is missing, and so is everybody else
            if end < self._end - 1.0:
                self._limit = f"within the join timeout of rank {record.rank}, which was over first"
            self._end = end

    def _enter_ready(self, rank: int, ready: Ready) -> None:
        record = self._register.records[rank]
        if ready.problem is not None:
            raise as_error(ready.problem, f"rank {rank} on {quoted(record.host)}")
        self._register.claim(rank, ready.device, record)
        self._unready.discard(rank)
        if ready.offer is not None:
            self._offers[rank] = ready.offer

    def _lost(self, peer: Peer) -> None:
        if peer.rank is None:
            return
        self._at.pop(peer.rank, None)
        if self._roster is None:
            self._register.leave(peer.rank)
            return
        record = self._register.records[peer.rank]
        raise DistbootError(
            "rank-failed",
            f"rank {peer.rank} (process {record.pid} on {quoted(record.host)}) joined, and ended before the framework "
            "could start",
            "look at the output of that rank",
        )

    def _fail(self, error: DistbootError) -> None:
        """Tell all that are there, and for a moment also those that come a little later."""
        self._answer("error", as_problem(error))
        if self._roster is not None:
            self.close()
            return
        self._failure = canonical(as_problem(error))
        self._told = len(self._at)
        self._end = min(self._end, time.monotonic() + _LINGER)
        with suppress(DistbootError):
            self._wait(lambda: self._told >= self._register.world_size - 1, str, lambda: error)
        self.close()

    def _answer(self, kind: str, content: object) -> None:
        """Tell every rank that is there."""
        text = canonical(content)
        shared = None if self._membership.secret else Session().sealed(kind, text)

        def sealed(peer: Peer) -> bytes:
            assert peer.session is not None
            return shared or peer.session.sealed(kind, text)

        told = [*self._at.values(), *([self._misfit] if self._misfit else [])]
        send_to_all({peer.socket: partial(sealed, peer) for peer in told}, _ANSWER_LIMIT)

    def _say(self, text: str) -> None:
        tell("rank 0", text)
