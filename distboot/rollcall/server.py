"""Rank 0's side of the roll call: it listens, enters whoever belongs to the job, and answers all of them at once."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..errors import DistbootError, quoted, tell
from ..record import Record, as_problem
from ..report.history import History
from ..roster import Roster, ranks_said, roster_of
from .broadcast import send_to_all
from .connections import Connections, OutOfFilesError, Peer
from .files import allow_files, files_allowed
from .findings import findings, refuse_several_frameworks
from .greeting import OtherVersionError, session_with
from .handed import Handed
from .node import connections_of
from .readiness import Readiness
from .ready import Ready, offers_message
from .register import Register
from .relayed import record_from, records_from, said_from
from .seen import Seen
from .wire import ONE_DISTBOOT, VERSION, Announcement, Membership, Session, WireError, canonical, frame

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
        self._readiness: Readiness | None = None  # once it is over
        self._say: Callable[[str], None] = partial(tell, "rank 0")
        self._connections = Connections(listener, own.world_size, self._take, self._lost, self._say)
        self._at: dict[int, Peer] = {}  # where each rank is to be reached
        self._sessions: dict[int, Session] = {}  # what its messages are sealed with, also those to its relay
        self._relays: set[Peer] = set()
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
            most = self._connections.room
            least = most - self._own.world_size + connections_of(self._own)
            self.open_files = allow_files(most, least, self._say)
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
        self._readiness = Readiness(roster, self._register)
        self._met = time.monotonic()
        return roster

    def confirm(self, own: Ready, join_timeout: float) -> dict[int, str]:
        """Wait until every rank is ready to start the framework, and tell them all to go: what they offer, by rank.

        `join_timeout` seconds begin when the roster was sent, so that what rank 0 itself needs counts; but what has
        come meanwhile is read in any case.

        Raises:
            DistbootError: what any of them cannot be ready for, `rank-failed` or `missing-rank`; all of them get it.
        """
        readiness = self._readiness
        assert readiness is not None
        self._end = max(self._met + join_timeout, time.monotonic() + _LINGER)
        self._seen.are_to_be_ready = True
        try:
            readiness.enter(self._own.rank, own)
            self._wait(lambda: readiness.is_complete, readiness.progress, readiness.late)
        except DistbootError as error:
            self._fail(error)
            raise
        self._answer("go", offers_message(readiness.offers))
        return readiness.offers

    def history(self) -> History:
        """What was seen so far, for the report of the job."""
        return self._seen.history(self._register, self._readiness, self.findings)

    def sessions(self) -> dict[int, Session]:
        """What the messages of each other rank are sealed with."""
        return {rank: self._sessions[rank] for rank in self._at}

    def hand_over(self) -> list[Handed]:
        """The connections, which are the caller's now."""
        handed = []
        for peer in dict.fromkeys(peer for _, peer in sorted(self._at.items())):
            self._connections.give_away(peer)
            assert peer.session is not None
            handed.append(Handed(tuple(sorted(peer.ranks)), peer.socket, peer.session, peer in self._relays))
        return handed

    def close(self) -> None:
        """End all connections; the listener stays open."""
        self._connections.close()

    def _reached(self) -> str | None:
        """The address of this host under which the ranks of other nodes reached it; None when there are none."""
        records = self._register.records
        elsewhere = {peer for rank, peer in self._at.items() if records[rank].node != self._own.node}
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
        elif peer in self._relays and "of" in message:
            for rank, kind, content in said_from(peer.session.opened(message, "of")[1]):
                self._take_of(peer, rank, kind, content)
        elif peer in self._relays or not peer.ranks:
            self._take_records(peer, peer.session, message)
        elif self._readiness is None:
            raise WireError("reports twice on one connection")
        else:
            (rank,) = peer.ranks
            self._readiness.enter(rank, Ready.from_message(peer.session.opened(message, "ready")[1]))

    def _take_hello(self, peer: Peer, message: dict[str, object]) -> None:
        try:
            peer.session = session_with(message, self._membership, "rank 0", peer.challenge)
        except OtherVersionError as error:
            self._connections.send(peer, frame({"incompatible": f"the peer {error}"}))
            raise DistbootError("version-mismatch", f"the peer at {peer.at} {error}", ONE_DISTBOOT) from None
        peer.welcomed = time.time()
        self._connections.send(peer, frame({"distboot": VERSION, "challenge": peer.challenge}))

    def _take_records(self, peer: Peer, session: Session, message: dict[str, object]) -> None:
        """The record of one rank, or those that a relay has got."""
        kinds = ("records",) if peer in self._relays else ("record", "records")
        kind, content = session.opened(message, *kinds)
        if kind == "records":
            self._relays.add(peer)
            records = records_from(content, self._membership.secret)
        else:
            records = [(record_from(content), session)]
        if self._failure is not None:
            self._connections.send(peer, session.sealed("error", self._failure))
            self._told += len(records)
            return
        for record, its_session in records:
            self._take_record(peer, record, its_session)

    def _take_record(self, peer: Peer, record: Record, session: Session) -> None:
        if self._readiness is not None:
            first = self._register.records.get(record.rank, record)
            there = f"rank {record.rank} is there already, as process {first.pid} on {quoted(first.host)}"
            raise WireError(f"comes after the roll call, and {there}")
        self._connections.admit(peer)
        self._misfit = peer
        self._register.enter(record)
        self._misfit = None
        earlier = self._at.get(record.rank)
        self._at[record.rank], self._sessions[record.rank] = peer, session
        peer.ranks.add(record.rank)
        if earlier not in (None, peer):  # the same process, over a new connection
            earlier.ranks.discard(record.rank)
            if not earlier.ranks:
                self._connections.drop(earlier)
        self._seen.joined(record, peer.welcomed)
        end = time.monotonic() + record.patience
        if end < self._end:  # whoever is out of patience first is told who is missing, and so is everybody else
            if end < self._end - 1.0:
                self._limit = f"within the join timeout of rank {record.rank}, which was over first"
            self._end = end

    def _take_of(self, peer: Peer, rank: int, kind: str, content: object) -> None:
        """What a rank has said to the relay of its node, or that it has gone."""
        if rank not in peer.ranks:
            return  # it is there over another connection by now
        if kind == "gone":
            peer.ranks.discard(rank)
            if not peer.ranks:
                self._connections.dismiss(peer)
            self._leave([rank])
        elif kind == "ready" and self._readiness is not None:
            self._readiness.enter(rank, Ready.from_message(content))
        else:
            raise WireError(f"sends a broken {kind}")

    def _lost(self, peer: Peer) -> None:
        self._relays.discard(peer)
        if peer.ranks:
            self._leave(sorted(peer.ranks))

    def _leave(self, ranks: Sequence[int]) -> None:
        """These ranks, or the relay that speaks for them, have ended their connection."""
        for rank in ranks:
            self._at.pop(rank, None)
            if self._readiness is None:
                self._register.leave(rank)
        if self._readiness is None:
            return
        record = self._register.records[ranks[0]]
        who = f"process {record.pid} on" if len(ranks) == 1 else "all of"
        raise DistbootError(
            "rank-failed",
            f"{ranks_said(ranks)} ({who} {quoted(record.host)}) joined, and ended before the framework could start",
            "look at the output of that rank" if len(ranks) == 1 else "look at that host, and at the output there",
        )

    def _fail(self, error: DistbootError) -> None:
        """Tell all that are there, and for a moment also those that come a little later."""
        self._answer("error", as_problem(error))
        if self._readiness is not None:
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
        answer = Announcement(kind, canonical(content))
        told = {*self._at.values(), *([self._misfit] if self._misfit else [])}
        outgoing = {peer.socket: partial(answer.sealed, peer.session) for peer in told if peer.session is not None}
        send_to_all(outgoing, _ANSWER_LIMIT)
