"""Rank 0's part of the rendezvous: it admits the ranks and answers all of them at once.

One connection goes through these messages:

    peer         rank 0
    Hello      →             the job and the version of the protocol
               ←  Welcome    from here on frames are authenticated
    WorkerInfo →             the rank enters the `JoinTable`
               ←  Members    when all ranks have joined, or
               ←  Failed     when the job cannot start, to all ranks that are connected

Rank 0 does not answer a report by itself, as the answer depends on all of them. Its wait ends when

1. all ranks have joined: it builds the membership, compares the ranks and warns of differences;
2. a rank does not fit (`JoinTable.add` raises): all ranks get that error at once;
3. the first join timeout is over, rank 0's own or that of a rank that is connected: all ranks hear
   which ranks are missing.

In case 2 it goes on for `_LINGER` seconds and tells ranks that are a little late: else each of them
would wait for its own timeout. Peers that are not part of this job, or come after it has started,
are refused with the reason, and the job continues.

After the rendezvous the agent owns the connections (`detach_all`). The coordinator only still
refuses late ranks (`serve`), and passes on agents that have lost their connection (`returns`).
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

from ..base.dataclass import replace
from ..base.errors import DistbootError, in_one_line
from ..base.text import (
    escape_control,
    log_line,
    short_repr,
    without_mapping,
)
from .connection_pool import (
    Connection,
    ConnectionPool,
    DetachedConnection,
    OutOfFilesError,
    allow_files,
    send_to_all,
)
from .events import Clocks, JoinLog, job_time
from .membership import (
    JoinPlan,
    Membership,
    build_membership,
)
from .messages import (
    ONE_DISTBOOT,
    Failed,
    Hello,
    Refused,
    Resume,
    Welcome,
    WorkerInfo,
    as_problem,
)
from .protocol import (
    HEADER,
    VERSION,
    Broadcast,
    Channel,
    Frame,
    ProtocolError,
    decode,
)

_INTERVAL = 0.2  # seconds between two checks whether the job is still wanted
# Seconds for which ranks that come after a failure are told of it: launchers start the ranks of
# several hosts, and a busy host starts its own, within a few seconds
_LINGER = 3.0
_OF_ANOTHER_JOB = "belongs to another job"
# What to do where ranks are missing and connections were refused, by a part of why these were
_REMEDIES = {
    _OF_ANOTHER_JOB: "another job uses this address and port: give each job its own MASTER_PORT",
    "DISTBOOT_SECRET": "give all {}s the same DISTBOOT_SECRET",
}


class _Deadline(NamedTuple):
    """When the wait for all ranks ends, and what ends it, as the error has it."""

    end: float  # monotonic
    said: str


class WhyMissing(NamedTuple):
    """Why ranks may be missing, to follow their names, and what to do about it."""

    said: str
    hint: str


class TakesBack(Protocol):
    """The agent of rank 0, to which an agent returns that has lost its connection."""

    def expect_return(self) -> None:
        """A process greets, which may be such an agent."""

    def take_back(self, peer: Connection, message: Resume) -> None:
        """An agent goes on over a new connection; `ProtocolError`: it cannot."""


class Coordinator:
    """Rank 0 of the rendezvous."""

    returns: TakesBack  # given by the agent, which serves once the ranks have met

    def __init__(
        self,
        listener: socket.socket,  # which stays open
        plan: JoinPlan,
        # Called while it waits; raises to end the wait
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        # Here, as only rank 0 needs them, and before connections may take the last file
        from .join_table import JoinTable

        own = plan.own
        if own.world_size > 1:
            from . import differences  # noqa: F401
        if plan.secret:
            from . import authentication  # noqa: F401

        self.table = JoinTable(own.world_size, by_node=own.ranks > 0, earlier=plan.earlier)
        self.warnings: list[str] = []  # differences between ranks
        self.log = JoinLog(own)
        self.why_missing = WhyMissing("", _hint_for_missing(plan, self.table.unit))
        self._plan = plan
        self._wanted = wanted
        self._say: Callable[..., None] = partial(log_line, f"{self.table.unit} 0")
        self.pool = ConnectionPool(listener, own.world_size, self._handle, self._lost, self._say)
        # The soft limit before it was raised for all connections; None: it was not.
        self.open_files = allow_files(self.pool.room, self._say, own.ranks)
        self._connections: dict[int, Connection] = {}  # by rank
        self._has_met = False
        self._failure: Failed | None = None  # why the job cannot start, as all ranks are told
        self._told: set[int] = set()  # ranks that were sent the failure
        self._own_deadline = _Deadline(0.0, "")
        self._ends: dict[int, float] = {}  # of the join timeout of each rank that is connected
        self._first = self._own_deadline  # of all
        self._may_end_later = False  # as the one that it was is disconnected

    def wait_for_join(self) -> Membership:
        """Wait for all ranks and send them the membership, or the `DistbootError` that this
        raises.
        """
        limit = self._plan.join_timeout
        self._own_deadline = _Deadline(time.monotonic() + limit, f"within {limit:g} s")
        self._first = self._own_deadline
        try:
            self.table.add(self._plan.own)
            self._gather_after_delay()
            membership = self._build()
            if membership.world_size > 1:
                self._compare(membership)
        except DistbootError as error:
            self._abort(error)
            raise
        self.log.add("all_joined", findings=self.warnings)
        for peer in self.pool.unauthenticated:  # too late
            self.pool.drop(peer)
        self._broadcast(membership.as_message())
        self._has_met = True
        return membership

    def _build(self) -> Membership:
        records = self.table.in_order()
        resume_port = 0
        if self._connections:
            resume_port = self.pool.listen_also()
        membership = replace(
            build_membership(records),
            master_addr=self._reached(),
            # This process may have replaced an earlier rank 0: the others know the next round.
            round=max(record.round for record in records),
            max_restarts=self._plan.own.max_restarts,
            heartbeat_timeout=self._plan.own.heartbeat_timeout,
            resume_port=resume_port,
            shared=self._plan.shared,
        )
        if membership.by_node:
            self.table.spread(membership)
            self.log.spread(membership)
        return membership

    def _compare(self, membership: Membership) -> None:
        from .differences import consistency_warnings, refuse_several_frameworks

        records = self.table.in_order()
        refuse_several_frameworks(records, membership)
        self.warnings = consistency_warnings(records, membership, Clocks(self.log).offsets())
        if any(record.cpus for record in records):
            from .shared_cpus import shared_cpus  # here, as most launchers bind no rank

            self.warnings += shared_cpus(records, membership, self._plan.unbind)
        if self._plan.unshared:
            names = ", ".join(map(escape_control, self._plan.unshared))
            self.warnings.append(f"not shared with other ranks, as these may be secrets: {names}")
        if self._plan.again:  # the agent around this one has printed them
            return
        for warning in self.warnings:
            self._say(f"warning: {warning}")

    def serve(self, limit: float = 0.0) -> None:
        """After the rendezvous: tell late ranks why they are too late."""
        try:
            self.pool.poll(limit)
        except OutOfFilesError:
            self.pool.pause(time.monotonic())

    def detach_all(self) -> list[DetachedConnection]:
        """Give the connections of all ranks to the caller."""
        detached = []
        for rank, peer in sorted(self._connections.items()):
            self.pool.detach(peer)
            detached.append((rank, peer.socket, peer.channel))
        return detached

    def close(self) -> None:
        self.pool.close()

    def _reached(self) -> str | None:
        """The own address that most ranks of other nodes have connected to; None without any."""
        addresses: Counter[str] = Counter()
        for rank, peer in self._connections.items():
            if self.table.records[rank].node != self._plan.own.node:
                addresses[without_mapping(peer.socket.getsockname()[0])] += 1
        if not addresses:
            return None
        return addresses.most_common(1)[0][0]

    def _missing(self) -> DistbootError:
        table = self.table
        refusals = self.pool.refusals()
        why = f"{table.describe_departed()}{self.why_missing.said}{refusals}"
        joined = f"{len(table.records)} of {table.world_size}"
        missing = table.describe_missing()
        within = self._first_deadline().said
        text = f"{joined} {table.unit}s joined {within}; missing: {missing}{why}"
        hint = self.why_missing.hint
        if self.pool.remedy:
            hint = f"{self.pool.remedy}; or {hint}"
        for reason, remedy in _REMEDIES.items():
            if reason in refusals:
                hint = f"{remedy.format(table.unit)}; or {hint}"
        return DistbootError("missing-rank", text, hint)

    def _gather_after_delay(self) -> None:
        """Wait for all ranks, and for the end of the delay between two rounds."""
        start = time.monotonic() + self._plan.delay
        while True:
            self._gather()  # again, as a rank may have left meanwhile
            left = start - time.monotonic()
            if left <= 0:
                return
            self._wanted()
            self._poll(min(left, _INTERVAL))

    def _gather(self) -> None:
        """Wait for all ranks, and show now and then which are missing."""
        if self.table.is_complete:
            return
        from .progress import progress  # here, as the other ranks need it not

        shown = progress(self._say)
        try:
            while not self.table.is_complete:
                self._wanted()
                now = time.monotonic()
                end = self._first_deadline().end
                if now >= end:
                    raise self._missing()
                if now >= shown.due:
                    shown.show(len(self.table.records), self._progress(), end - now)
                self._poll(max(min(end, shown.due) - now, 0.0))
        finally:
            shown.close()

    def _poll(self, limit: float) -> None:
        try:
            self.pool.poll(limit)
        except OutOfFilesError as error:
            raise self._too_few_files(error) from None

    def _progress(self) -> str:
        table = self.table
        return f"{table.progress()}{table.describe_departed()}{self.why_missing.said}"

    def _too_few_files(self, error: OutOfFilesError) -> DistbootError:
        table = self.table
        text = (
            f"rank 0 may open {error},"
            f" too few for the connections of {table.world_size} {table.unit}s;"
            f" {len(table.records)} of them had joined"
        )
        hint = (
            "raise the limit for rank 0 (ulimit -n, LimitNOFILE=, or docker run --ulimit nofile=…)"
        )
        return DistbootError("too-few-files", text, hint)

    def _handle(self, peer: Connection, frame: Frame) -> None:
        if not peer.welcomed:
            self._handle_hello(peer, decode(peer.frames.inflated(frame), Hello))
            return
        if peer.rank is not None:
            raise ProtocolError("reports twice on one connection")
        kinds: tuple[type, ...] = (WorkerInfo,)
        if self._has_met:
            kinds = (WorkerInfo, Resume)
        message = peer.channel.verify(frame, peer.frames, *kinds)
        if isinstance(message, Resume):
            self._handle_resume(peer, message)
        elif self._failure is not None:
            self.pool.send(peer, peer.channel.sign(self._failure))
            self._told.add(message.rank)
        else:
            self._handle_report(peer, message)

    def _handle_hello(self, peer: Connection, hello: Hello) -> None:
        if hello.job != self._plan.job:
            raise ProtocolError(_OF_ANOTHER_JOB)
        if hello.version != VERSION:
            self._refuse_version(peer, hello.version)
        peer.channel = Channel(
            self._plan.secret,
            is_rank_0=True,
            challenge=peer.challenge,
            nonce=hello.nonce,
        )
        peer.welcomed = job_time()
        if self._has_met:
            self.returns.expect_return()
        self.pool.send(peer, peer.channel.sign(Welcome(peer.challenge)))

    def _refuse_version(self, peer: Connection, version: int) -> NoReturn:
        text = f"uses version {version} of the protocol; rank 0 uses version {VERSION}"
        # The peer may not belong to this job, or is too late to end it.
        if self._plan.secret or self._has_met or self._failure is not None:
            raise ProtocolError(text)
        self.pool.send(
            peer, peer.channel.sign(Refused(f"the connecting process {text}", incompatible=True))
        )
        raise DistbootError(
            "version-mismatch", f"the connecting process at {peer.at} {text}", ONE_DISTBOOT
        )

    def _handle_report(self, peer: Connection, record: WorkerInfo) -> None:
        rank = record.rank
        self._refuse_second(record)
        try:
            self.table.add(record)
        except DistbootError as error:
            self.pool.send(peer, peer.channel.sign(Failed(as_problem(error))))
            raise
        earlier = self._connections.get(rank)
        self._connections[rank] = peer
        peer.rank = rank
        if earlier is not None:  # the same process, over a new connection
            earlier.rank = None
            self.pool.drop(earlier)
        self.log.joined(record, peer.welcomed)
        self._add_deadline(record)

    def _add_deadline(self, record: WorkerInfo) -> None:
        """Count the join timeout of a rank that has connected."""
        self._drop_deadline(record.rank)
        end = time.monotonic() + record.patience
        self._ends[record.rank] = end
        self._shorten_deadline(record.rank, end)

    def _shorten_deadline(self, rank: int, end: float) -> None:
        said = self._first.said
        if end < self._first.end - 1.0:
            which = f"{self.table.unit} {rank}"
            said = f"within the join timeout of {which}, which was over first"
        self._first = _Deadline(min(end, self._first.end), said)

    def _first_deadline(self) -> _Deadline:
        """Of all join timeouts the first one; found here, as many ranks may leave at one time."""
        if self._may_end_later:
            self._may_end_later = False
            self._first = self._own_deadline
            for rank, end in self._ends.items():
                self._shorten_deadline(rank, end)
        return self._first

    def _drop_deadline(self, rank: int) -> None:
        """The join timeout of a rank that has left, or has connected again, does not count."""
        if self._ends.pop(rank, None) is not None:
            self._may_end_later = True

    def _refuse_second(self, record: WorkerInfo) -> None:
        """Refuse one connection, and not the job, if it is too late or the rank has joined."""
        rank = record.rank
        table = self.table
        first = table.agents.get(rank)
        if first is None:
            if self._has_met:
                unit = table.agent_unit
                raise ProtocolError(f"joined after the roll call, and the job has no {unit} {rank}")
            return
        if self._has_met:
            when = "after the roll call"
        elif first.process != record.process and max(
            self._plan.own.round, first.round, record.round
        ):
            # After a restart: a lost agent, and the one in its place. The job needs one of them.
            when = "a second time"
        else:
            return
        place = f"process {first.pid} on {short_repr(first.host)}"
        raise ProtocolError(f"joined {when}; {table.agent_unit} {rank} is already {place}")

    def _handle_resume(self, peer: Connection, message: Resume) -> None:
        """The agent of a process that has joined continues over a new connection."""
        # In its own round the agent reads all answers, also why it is refused
        peer.channel = replace(peer.channel, round=message.round)
        first = self.table.records.get(message.agent)
        if first is None or first.process != message.process:
            raise ProtocolError(f"is not the process that joined as rank {message.agent}")
        if peer.frames.missing != HEADER:
            raise ProtocolError("sends more before it is answered")
        self.returns.take_back(peer, message)
        self.pool.detach(peer)

    def _lost(self, peer: Connection) -> None:
        if peer.rank is not None:
            del self._connections[peer.rank]
            self.table.remove(peer.rank)
            self._drop_deadline(peer.rank)
            self.log.add("left", peer.rank)

    def _abort(self, error: DistbootError) -> None:
        """Tell all ranks that are connected, and for a moment also those that come later."""
        failure = Failed(as_problem(error))
        self._broadcast(failure)
        self._failure = failure
        self._told = set(self._connections)
        try:
            self._linger()
        except (KeyboardInterrupt, SystemExit):  # the signal would be all that is said
            self._say(in_one_line(error))
            raise
        self.close()

    def _linger(self) -> None:
        """Tell ranks that are a little late that the job cannot start."""
        end = min(self._first_deadline().end, time.monotonic() + _LINGER)
        while len(self._told) < self._plan.own.world_size - 1:
            left = end - time.monotonic()
            if left <= 0:
                break
            self.serve(left)

    def _broadcast(self, message: object) -> None:
        broadcast = Broadcast(message)
        outgoing: dict[socket.socket, Callable[[], bytes]] = {}
        for peer in self._connections.values():
            outgoing[peer.socket] = partial(broadcast.sign, peer.channel)
        send_to_all(outgoing)


def _hint_for_missing(plan: JoinPlan, unit: str) -> str:
    """What to do about missing ranks."""
    if plan.earlier:  # all have joined before, so that the number of nodes is right
        from .earlier import COME_BACK

        return COME_BACK
    hint = (
        f"look at the output of the missing {unit}s: "
        f"they ended early, never started, or cannot reach {unit} 0"
    )
    if plan.doubt:
        return f"{plan.doubt}; or {hint}"
    if plan.size:
        return f"{hint}; or {plan.size} is too large"
    return hint
