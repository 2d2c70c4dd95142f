"""The agent of one rank or several, once all have met: it owns their connections.

An agent is put together here: the shell of its job, the loop that calls it, the server of its
scripts, and what this agent alone watches (the process of its launcher, notices of the cloud).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

from ..base.dataclass import replace
from ..base.settings import SupervisionSettings
from ..base.text import log_line, without_mapping
from ..host.network import address_of_peer
from ..job.facts import Facts
from ..job.messages import NodeSeen
from ..job.root_cause import RankState, ranks_of
from ..rendezvous.events import job_time
from ..rendezvous.join import Joined
from ..rendezvous.membership import Membership
from ..rendezvous.messages import RequestStop
from ..rendezvous.protocol import BEFORE_AUTHENTICATION, most_from_rank_0
from .heartbeat import HeartbeatConnection
from .launcher_process import LauncherProcess
from .loop import EventLoop
from .script_server import ScriptServer, job_mark
from .shell import Shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.connection_pool import DetachedConnection
    from ..rendezvous.coordinator import Coordinator
    from .calls import Calls
    from .claims import Claims
    from .node_check import NodeCheck

_EXPLANATION = 1.0  # seconds for rank 0 to report why all stop, once the launcher is gone
_POLL_INTERVAL = 1.0  # seconds, where the kernel does not report that a process has ended
_OTHERS_LOSE_RANK_0 = 1.0  # seconds; they look once a second, or are told by their launcher


class Agent:
    """The agent of this process; `held`: the exit of its ranks waits for it, as in the wrapper."""

    def __init__(
        self,
        joined: Joined,
        settings: SupervisionSettings,
        *,
        held: bool,
    ) -> None:
        assert joined.result is not None
        assert joined.side is not None
        membership = joined.result.membership
        own = joined.plan.own.rank
        self._joined = joined
        self._result = joined.result
        self._settings = settings
        self.ranks = membership.agents[own]
        self.shell = shell_of(
            own,
            membership,
            joined.side.detach_all(),
            joined.coordinator,
            settings,
            held=held,
        )
        # Beside a script in `init`, whose rank is not ready yet
        self.shell.facts.is_starting = not held
        self.shell.facts.may_restart = held and membership.round < membership.max_restarts
        self._claims: Claims | None = None
        self._check: NodeCheck | None = None  # of all nodes, where this agent takes part in it
        self.met_at = job_time()  # when the round began; for the journal, too
        self.shell.claim = self._claim
        self.loop = EventLoop(self.shell)
        self.scripts = ScriptServer(
            joined,
            self.shell,
            self.loop,
        )
        if joined.coordinator is None:
            self._let_return(membership)
        else:
            self._accept_returning(joined.coordinator)
            self._note_membership(joined.coordinator, membership)
        self._is_over = threading.Event()  # set once this agent needs no more notices
        self._notices: Calls | None = None  # that this machine will be taken away
        self._is_first_of_node = self.ranks[0] in {node[0] for node in membership.nodes}
        self._expect_stops()

    def watch_launcher(self, launcher: LauncherProcess) -> None:
        """End our ranks if the process of the launcher above them ends before them."""
        self.shell.facts.has_launcher = True
        self.shell.own.launcher_is_ending = launcher.is_ending
        if launcher.file is None:
            self._poll_launcher(launcher)
            return
        self.loop.add_reader(
            launcher.file,
            partial(self._launcher_ended, launcher),
        )

    def check_node(self, pid: int, *, is_rank: bool) -> None:
        """Take part in the check of all nodes, if this agent is the first one of its node.

        `pid` is a process of the job here; `is_rank`: the rank itself, and not what starts it.
        """
        if not self._is_first_of_node:
            return
        if not self._settings.checks:
            self.shell.take(self.ranks[0], NodeSeen(), time.monotonic())
            return
        from .node_check import NodeCheck  # here, as a check may be off

        self._check = NodeCheck(
            self.shell,
            self.loop,
            self.ranks[0],
            self._joined.plan.secret,
            self._result.store_host,
        )
        has_neighbors = len(self._result.membership.nodes) > 1
        self._check.begin(pid, is_rank=is_rank, has_neighbors=has_neighbors)

    @property
    def seconds_to_stay(self) -> float:
        """Seconds to stay, so that other agents of this node do not print again why all stop.

        Where rank 0 is lost each finds that out alone, and a claim ends with its process.
        """
        has_printed = self._claims is not None and bool(self._claims.topics)
        has_lost_rank_0 = self.shell.facts.members[0].lost_at > 0
        if has_printed and has_lost_rank_0:
            return _OTHERS_LOSE_RANK_0
        return 0.0

    def close(self) -> None:
        """The loop is over."""
        self._is_over.set()
        self.scripts.close()
        if self._check is not None:
            self._check.close()
        if self._claims is not None:
            self._claims.close()
        if self._notices is not None:
            self._notices.close()

    def _claim(self, topic: str) -> bool:
        """Whether this agent is the one of its node that prints what all of them know."""
        if self._claims is None:
            try:
                from .claims import Claims  # here, as most jobs end well
            except OSError:  # no file left: a line twice is better than none
                return True
            result = self._result
            node = result.membership.node_of()[self.ranks[0]]
            mark = job_mark(self._joined.plan.job, result.port)
            place = f"{node}-{self._joined.plan.own.log}"
            self._claims = Claims(f"{mark}-{result.membership.round}-{place}")
        return self._claims.claim(topic)

    def _accept_returning(self, server: Coordinator) -> None:
        """Take other agents back that return over another connection."""
        from .rank_connections import RankConnections

        connections = self.shell.connections
        assert isinstance(connections, RankConnections)
        server.returns = connections
        self.loop.add_reader(
            server.pool.fileno(),
            lambda _: server.serve(),
        )
        # A silent connection makes no file readable
        self.loop.each_tick = server.pool.refuse_overdue

    def _note_membership(self, side: Coordinator, membership: Membership) -> None:
        """For the journal and the metrics, if there are any."""
        if self._settings.keeps_events:
            from ..job import journal  # here, as most jobs have none

            details = journal.met(
                membership,
                separate_jobs=self._settings.apart,
                unused=self._settings.unused,
            )
            self.met_at = side.log.note("met", **details)

    def _let_return(self, membership: Membership) -> None:
        """Let this agent return to rank 0's over another connection, if that takes it back."""
        from .rank_0_connection import Rank0Connection

        connections = self.shell.connections
        assert isinstance(connections, Rank0Connection)
        if not membership.resume_port:
            return
        returning = connections.returning
        with suppress(OSError):  # it has ended already
            host = address_of_peer(connections.connection.socket)
            returning.aim(
                self._joined.plan,
                host,
                membership.resume_port,
            )
            # Only wakes the loop up: `turn` polls
            self.loop.add_reader(
                returning.woken.fileno(),
                lambda _: None,
            )

    def _poll_launcher(self, launcher: LauncherProcess) -> None:
        now = time.monotonic()
        if launcher.has_ended():
            self._launcher_ended(launcher, now)
            return
        self.loop.call_at(
            now + _POLL_INTERVAL,
            partial(self._poll_launcher, launcher),
        )

    def _launcher_ended(self, launcher: LauncherProcess, now: float) -> None:
        if launcher.file is not None:
            self.loop.remove_reader(launcher.file)
        if launcher.has_left_rank():
            self.shell.orphaned(launcher.text, now)
            self.loop.call_at(
                now + _EXPLANATION,
                lambda: self.shell.stop_orphans(launcher.text, time.monotonic()),
            )

    def _expect_stops(self) -> None:
        """Request a stop when the settings say so: before the end, or at a notice of the cloud."""
        stop_at = self._settings.stop_at
        if stop_at is not None:
            left = max(stop_at - time.time(), 0.0)
            request = partial(self._request_stop, self._settings.stop_reason)
            self.loop.call_at(time.monotonic() + left, request)
        if self._settings.stop_notice and self._is_first_of_node:
            self._watch_notices()

    def _request_stop(self, why: str) -> None:
        self.shell.take(
            self.ranks[0],
            RequestStop(why),
            time.monotonic(),
        )

    def _watch_notices(self) -> None:
        """Ask for notices that this machine will be taken away; one agent of each node does."""
        from ..script.stop_notices import watch  # here and below, as few jobs do
        from .calls import Calls

        calls = Calls()
        self._notices = calls
        self.loop.add_reader(calls.fileno(), calls.take)
        watch(
            self._settings.stop_notice,
            self._settings.notice_address,
            lambda why: calls.put(lambda _: self._request_stop(why)),
            self.shell.say,
            self._is_over,
        )


def shell_of(
    agent: int,
    membership: Membership,
    connections: Iterable[DetachedConnection],
    coordinator: Coordinator | None,
    settings: SupervisionSettings,
    *,
    held: bool,
) -> Shell:
    """The shell of an agent's job, on the connections of the rendezvous.

    Each process loads what one of the two kinds of agents needs.
    """
    unit = "rank"
    if membership.by_node:
        unit = "node"

    def say(text: str, rank: int | None = None, event: str = "", **more: object) -> None:
        who = f"{unit} {agent}"
        if rank is not None:
            who = f"rank {rank}"
        if text.startswith(f"{who} failed first"):
            text = text.removeprefix(f"{who} ")  # the line begins with it
        log_line(who, text, event, **more)

    ranks = _ranks_known(agent, membership, coordinator)
    peers = connect(ranks, _connection_of(agent, membership, connections))
    facts = Facts({member.rank: member for member in ranks}, settings, is_held=held)
    shell = Shell(facts, say)
    if coordinator is None:
        from .rank_0_connection import Rank0Connection

        timeout = membership.heartbeat_timeout
        shell.use(Rank0Connection(shell, peers, timeout, membership.round))
    else:
        from ..job.keys import Keys
        from .rank_connections import RankConnections

        addresses = {}
        if settings.checks:
            addresses = _addresses(ranks)
        rank_connections = RankConnections(
            shell,
            peers,
            membership,
            Keys(membership, coordinator.table),
            coordinator.log,
            addresses=addresses,
            # What connects then may be meant for a store of the script, or its next attempt
            started=coordinator.pool.accept_no_more,
        )
        shell.use(rank_connections)
    return shell


def connect(
    ranks: Iterable[RankState], connection_of: Mapping[int, HeartbeatConnection]
) -> dict[HeartbeatConnection, list[RankState]]:
    """Note which ranks are of other agents; returns those at the other end of each connection."""
    peers: dict[HeartbeatConnection, list[RankState]] = {}
    for member in ranks:
        connection = connection_of.get(member.rank)
        if connection is not None:
            member.connection = connection
            member.is_local = False
            peers.setdefault(connection, []).append(member)
    return peers


def _addresses(ranks: Iterable[RankState]) -> dict[int, str]:
    """Where other nodes are, as rank 0's agent sees them, by their first rank."""
    found = {}
    for member in ranks:
        if member.local_rank == 0 and member.connection is not None:
            with suppress(OSError):  # it has ended already
                address = address_of_peer(member.connection.socket)
                found[member.rank] = without_mapping(address)
    return found


def _ranks_known(
    agent: int,
    membership: Membership,
    coordinator: Coordinator | None,
) -> list[RankState]:
    """The ranks that an agent knows: rank 0's agent all, any other one rank 0 and its own."""
    ranks = ranks_of(membership)
    if coordinator is None:
        return [ranks[rank] for rank in (0, *membership.agents[agent])]
    for rank, record in coordinator.table.records.items():
        ranks[rank].log = record.log
    return ranks


def _connection_of(
    agent: int,
    membership: Membership,
    connections: Iterable[DetachedConnection],
) -> dict[int, HeartbeatConnection]:
    """By rank of another agent, the connection to that agent."""
    most = BEFORE_AUTHENTICATION
    if agent != 0:
        most = most_from_rank_0(membership.world_size)
    found: dict[int, HeartbeatConnection] = {}
    for other, link, channel in connections:
        connection = HeartbeatConnection(
            link,
            replace(channel, round=membership.round),  # messages of other rounds are refused
            membership.heartbeat_timeout,
            most,
        )
        for rank in membership.agents[other]:
            found[rank] = connection
    return found
