"""Rank 0's side of the rendezvous: it admits the ranks, says what differs between them, and answers all at once."""

from __future__ import annotations

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from ..base.errors import DistbootError
from ..base.text import (
    escape_control,
    log_line,
    nodes_said,
    ranks_said,
    short_repr,
    without_mapping,
)
from ..host import FRAMEWORK
from ..host.network import LEAST_PROGRESS, PROGRESS
from .connection_pool import (
    Connection,
    ConnectionPool,
    DetachedConnection,
    OutOfFilesError,
    allow_files,
    send_to_all,
)
from .events import JobState, JoinLog
from .membership import (
    COME_BACK,
    JoinPlan,
    JoinTable,
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

_ANSWER_LIMIT = 10.0  # seconds that all of them together have to take the answer
_LINGER = 0.5  # seconds for ranks that come a little later than a failure to hear of it
# Seconds; more than that, and logs cannot be compared and credentials expire early
_MOST_SKEW = 30.0
_MOST_GROUPS = 4  # odd groups named for one fact


class Coordinator:
    """The rendezvous as rank 0 holds it."""

    def __init__(
        self,
        listener: socket.socket,  # which stays open
        plan: JoinPlan,
        # Called again and again; raises if it is not to wait any more
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        own = plan.own
        self.table = JoinTable(own.world_size, by_node=own.ranks > 0, earlier=plan.earlier)
        self.warnings: list[str] = []  # what the ranks should have alike and have not
        self.log = JoinLog(own)
        self.reachability_hint = ""  # why ranks may be missing, to be said with them
        unit = self.table.unit
        self.hint = (
            f"look at the output of the missing {unit}s: "
            f"they ended early, never started, or cannot reach {unit} 0"
        )
        if plan.earlier:  # all have joined before, so that the number of nodes is right
            self.hint = COME_BACK
        elif plan.doubt:
            self.hint = f"{plan.doubt}; or {self.hint}"
        elif plan.size:
            self.hint += f"; or {plan.size} is too large"
        self._plan, self._own, self._wanted = plan, own, wanted
        self._say: Callable[..., None] = partial(log_line, f"{self.table.unit} 0")
        self.pool = ConnectionPool(listener, own.world_size, self._take, self._lost, self._say)
        # The soft limit before it was raised for all connections; None: it was not.
        self.open_files = allow_files(self.pool.room, self._say, own.ranks)
        self._at: dict[int, Connection] = {}  # by rank
        self._has_met = False
        # Takes back an agent that has lost its connection, once its agent can; may raise `ProtocolError`
        self.resume: Callable[[Connection, Resume], None] = _refuse_resume
        self.greeted: Callable[[], object] = lambda: None  # called when one may be coming
        self._failure: Failed | None = None  # once it has failed: why, as all ranks are told
        self._told = 0
        self._end = 0.0
        self._limit = ""  # what ended the waiting for ranks, as the error says it

    def wait_for_join(self) -> Membership:
        """Wait for all ranks and answer them with the membership, or with the `DistbootError` that this raises."""
        limit = self._plan.join_timeout
        self._end, self._limit = time.monotonic() + limit, f"within {limit:g} s"
        try:
            self.table.add(self._own)
            self._gather()
            records = self.table.in_order()
            # This rank 0 may have come in the place of another one, and the others know which round is next.
            next_round = max(record.round for record in records)
            own = {name: getattr(self._own, name) for name in ("max_restarts", "heartbeat_timeout")}
            own["resume_port"] = self.pool.listen_also() if self._at else 0
            membership = replace(
                build_membership(records), master_addr=self._reached(), round=next_round, **own
            )
            if membership.by_node:
                self.table.spread(membership)
                self.log.spread(membership)
                records = self.table.in_order()
            refuse_several_frameworks(records, membership)
            self.warnings = consistency_warnings(records, membership, JobState(self.log).offsets())
            for warning in () if self._plan.again else self.warnings:
                self._say(f"warning: {warning}")
        except DistbootError as error:
            self._abort(error)
            raise
        self.log.add("all_joined", findings=self.warnings)
        for peer in self.pool.unauthenticated:  # they come too late for it
            self.pool.drop(peer)
        self._broadcast(membership.as_message())
        self._has_met = True
        return membership

    def serve(self, limit: float = 0.0) -> None:
        """Once the ranks have met, or will not: tell those that still come why they are too late."""
        try:
            self.pool.poll(limit)
        except OutOfFilesError:
            self.pool.accept_no_more()

    def detach_all(self) -> list[DetachedConnection]:
        """The connections, which are the caller's now."""
        for peer in self._at.values():
            self.pool.detach(peer)
        return [(rank, peer.socket, peer.channel) for rank, peer in sorted(self._at.items())]

    def close(self) -> None:
        self.pool.close()

    def _reached(self) -> str | None:
        """The address of this host under which the ranks of other nodes reached it; None when there are none."""
        elsewhere = [
            peer
            for rank, peer in self._at.items()
            if self.table.records[rank].node != self._own.node
        ]
        addresses = Counter(without_mapping(peer.socket.getsockname()[0]) for peer in elsewhere)
        return addresses.most_common(1)[0][0] if addresses else None

    def _missing(self) -> DistbootError:
        table = self.table
        why = f"{table.describe_departed()}{self.reachability_hint}{self.pool.refusals()}"
        joined = f"{len(table.records)} of {table.world_size} {table.unit}s joined {self._limit}"
        text = f"{joined}; missing: {table.describe_missing()}{why}"
        remedy = f"{self.pool.remedy}; or " if self.pool.remedy else ""
        return DistbootError("missing-rank", text, remedy + self.hint)

    def _gather(self) -> None:
        """Wait for all ranks, and say now and then which are missing."""
        # What is there within a second needs no line
        next_line, between, said = time.monotonic() + 1.0, PROGRESS, ""
        while not self.table.is_complete:
            self._wanted()
            now = time.monotonic()
            if now >= self._end:
                raise self._missing()
            if now >= next_line:
                progress = f"{self.table.progress()}{self.table.describe_departed()}{self.reachability_hint}"
                between = min(between * 2, LEAST_PROGRESS) if progress == said else PROGRESS
                next_line, said = now + between, progress
                self._say(f"{progress}; giving up in {self._end - now:.0f} s", event="waiting")
            try:
                self.pool.poll(min(self._end, next_line) - now)
            except OutOfFilesError as error:
                needed = (
                    f"too few for the connections of {self.table.world_size} {self.table.unit}s"
                )
                why = f"rank 0 may open {error}, {needed}; {len(self.table.records)} of them had joined"
                hint = "raise the limit for rank 0 (ulimit -n, LimitNOFILE=, or docker run --ulimit nofile=…)"
                raise DistbootError("too-few-files", why, hint) from None

    def _take(self, peer: Connection, frame: Frame) -> None:
        if not peer.welcomed:
            self._take_hello(peer, decode(peer.frames.inflated(frame), Hello))
        elif peer.rank is None:
            kinds = (WorkerInfo, Resume) if self._has_met else (WorkerInfo,)
            message = peer.channel.verify(frame, peer.frames, *kinds)
            if isinstance(message, Resume):
                self._take_back(peer, message)
            else:
                self._take_worker(peer, message)
        else:
            raise ProtocolError("reports twice on one connection")

    def _take_hello(self, peer: Connection, hello: Hello) -> None:
        if hello.job != self._plan.job:
            raise ProtocolError("belongs to another job")
        if hello.version != VERSION:
            self._refuse_version(peer, hello.version)
        peer.channel = Channel(self._plan.secret, "rank 0", peer.challenge, hello.nonce)
        peer.welcomed = time.time()
        if self._has_met:
            self.greeted()
        self.pool.send(peer, peer.channel.sign(Welcome(peer.challenge)))

    def _refuse_version(self, peer: Connection, version: int) -> NoReturn:
        text = f"speaks version {version} of the protocol, and rank 0 {VERSION}"
        # Where it is not proved that it is of this job, or it is too late, the job goes on.
        if self._plan.secret or self._has_met or self._failure is not None:
            raise ProtocolError(text)
        self.pool.send(
            peer, peer.channel.sign(Refused(f"the connecting process {text}", incompatible=True))
        )
        raise DistbootError(
            "version-mismatch", f"the connecting process at {peer.at} {text}", ONE_DISTBOOT
        )

    def _take_worker(self, peer: Connection, record: WorkerInfo) -> None:
        rank = record.rank
        if self._failure is not None:
            self.pool.send(peer, peer.channel.sign(self._failure))
            self._told += 1
            return
        first = self.table.records.get(rank, record)
        # After a restart: the agent that was lost, and the one in its place. The job needs one of them.
        is_second = (
            first.process != record.process and max(self._own.round, first.round, record.round) > 0
        )
        if self._has_met or is_second:
            when = "after the roll call" if self._has_met else "a second time"
            place = f"process {first.pid} on {short_repr(first.host)}"
            raise ProtocolError(
                f"comes {when}, and {self.table.unit} {rank} is there already, as {place}"
            )
        try:
            self.table.add(record)
        except DistbootError as error:
            self.pool.send(peer, peer.channel.sign(Failed(as_problem(error))))
            raise
        earlier = self._at.get(rank)
        self._at[rank], peer.rank = peer, rank
        if earlier is not None:  # the same process, over a new connection
            earlier.rank = None
            self.pool.drop(earlier)
        self.log.joined(record, peer.welcomed)
        end = time.monotonic() + record.patience
        if end < self._end - 1.0:
            self._limit = (
                f"within the join timeout of {self.table.unit} {rank}, which was over first"
            )
        # When the first rank is out of patience, all are told who is missing
        self._end = min(end, self._end)

    def _take_back(self, peer: Connection, message: Resume) -> None:
        """An agent goes on over a new connection: the process that has joined, in this round."""
        first = self.table.records.get(message.agent)
        if first is None or first.process != message.process:
            raise ProtocolError(f"is not the process that joined as rank {message.agent}")
        if peer.frames.missing != HEADER:
            raise ProtocolError("sends more before it is answered")
        self.resume(peer, message)
        self.pool.detach(peer)

    def _lost(self, peer: Connection) -> None:
        if peer.rank is not None:
            del self._at[peer.rank]
            self.table.remove(peer.rank)
            self.log.add("left", peer.rank)

    def _abort(self, error: DistbootError) -> None:
        """Tell all that are there, and for a moment also those that come a little later."""
        failure = Failed(as_problem(error))
        self._broadcast(failure)
        self._failure, self._told = failure, len(self._at)
        end = min(self._end, time.monotonic() + _LINGER)
        while self._told < self._own.world_size - 1 and (left := end - time.monotonic()) > 0:
            self.serve(left)
        self.close()

    def _broadcast(self, message: object) -> None:
        broadcast = Broadcast(message)
        said = {peer.socket: partial(broadcast.sign, peer.channel) for peer in self._at.values()}
        send_to_all(said, _ANSWER_LIMIT)


def _refuse_resume(_: Connection, message: Resume) -> None:
    raise ProtocolError(f"goes on as rank {message.agent}, and no connection of it was lost")


def consistency_warnings(
    records: Sequence[WorkerInfo], membership: Membership, skews: Mapping[int, float]
) -> list[str]:
    """Lines like "ranks 8-15 (node 1): torch 2.12.0, others 2.13.0".

    `records` are in rank order; `skews` has the seconds that a rank's clock is ahead of rank 0's.
    """
    node_of = membership.node_of()
    found: list[str] = []
    if len({record.facts for record in records}) > 1:
        tables = [dict(record.facts) for record in records]
        for name in sorted({name for table in tables for name in table}):
            found += _about(name, [table.get(name) for table in tables], node_of)
    return found + _clocks(skews, node_of)


def refuse_several_frameworks(records: Sequence[WorkerInfo], membership: Membership) -> None:
    """Refuse ranks that are about to start different frameworks, or one in different ways: they could not meet."""
    chosen = [dict(record.facts).get(FRAMEWORK) for record in records]
    if len(set(chosen)) > 1 and None not in chosen:
        raise DistbootError(
            "membership-mismatch",
            "; ".join(_about(FRAMEWORK, chosen, membership.node_of())),
            "let all ranks call init() with the same arguments, and give the wrapper the same --framework",
        )


def _about(name: str, values: Sequence[str | None], node_of: Mapping[int, int]) -> list[str]:
    groups: dict[str | None, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        groups[value].append(rank)
    usual, *odd = sorted(groups, key=lambda value: (-len(groups[value]), groups[value][0]))
    rest = "others" if len(odd) == 1 else "most"
    lines = [
        f"{_ranks(groups[value], node_of)}: {_described(name, value)}, {rest} {_value(name, usual)}"
        for value in odd[:_MOST_GROUPS]
    ]
    if len(odd) > _MOST_GROUPS:
        lines.append(
            f"{escape_control(name.rstrip('='))}: {len(odd) - _MOST_GROUPS} more values on other ranks"
        )
    return lines


def _described(name: str, value: str | None) -> str:
    if name == "accelerators":
        return f"{_value(name, value)} accelerators visible"
    if name.endswith("=") and value is not None:
        return f"{escape_control(name)}{_value(name, value)}"
    return f"{escape_control(name.rstrip('='))} {_value(name, value)}"


def _value(name: str, value: str | None) -> str:
    if value is None:
        return "not set" if name.endswith("=") else "not there"
    return short_repr(value) if name.endswith("=") else escape_control(value)


def _clocks(skews: Mapping[int, float], node_of: Mapping[int, int]) -> list[str]:
    """Against the middle one: rank 0's own clock may be the one that is wrong."""
    clocks = {0: 0.0, **skews}
    middle = sorted(clocks.values())[len(clocks) // 2]
    lines = []
    for sign, how in ((1, "ahead of"), (-1, "behind")):
        off = {rank: sign * (clock - middle) for rank, clock in sorted(clocks.items())}
        off = {rank: seconds for rank, seconds in off.items() if seconds > _MOST_SKEW}
        if off:
            most = max(off.values())
            lines.append(
                f"{_ranks(list(off), node_of)}: clock up to {most:.0f} s {how} that of the others"
            )
    return lines


def _ranks(ranks: list[int], node_of: Mapping[int, int]) -> str:
    return f"{ranks_said(ranks)} {nodes_said(sorted({node_of[rank] for rank in ranks}))}"
