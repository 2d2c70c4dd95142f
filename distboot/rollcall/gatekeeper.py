"""Rank 0's side of the gate: it knows who is where, and lets them pass."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import DistbootError, printable, tell
from ..record import as_problem
from ..roster import ranks_said, with_nodes
from .connections import Connections, OutOfFilesError, Peer
from .doors import LONGEST_FAILURE, Door, Patience, door_of
from .files import files_allowed
from .wire import Session, WireError, canonical

_LONGEST = 1e6  # seconds that somebody can have waited


class Gatekeeper:
    """Rank 0 at the gate.

    Args:
        listener: a listening socket, which is ours.
        sessions: of every other rank in the roll call, by rank.
        job: digest of the job.
        nodes: the ranks of each node, by node rank.
    """

    def __init__(
        self, listener: socket.socket, sessions: Mapping[int, Session], job: str, nodes: Sequence[Sequence[int]]
    ) -> None:
        self._listener, self._sessions, self._job, self._nodes = listener, sessions, job, nodes
        self._node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        self._connections = Connections(listener, len(sessions) + 1, self._take, self._lost, self._say)
        self._peers: dict[int, Peer] = {}
        self._gone: set[int] = set()
        self._here: defaultdict[Door, set[int]] = defaultdict(set)
        self._late: defaultdict[Door, dict[int, float]] = defaultdict(dict)
        self._open: dict[tuple[str, int | None], int] = {}  # name of a door -> how often it was opened, in order
        self._failed: dict[Door, str] = {}  # those that were opened by a rank that had failed there, and why
        self._given_up: tuple[Door, object] | None = None  # the last barrier that we have, and why

    def meet(self, door: Door, limit: float) -> None:
        """Wait until all are here, and let them pass.

        Raises:
            DistbootError: `missing-rank`, on all that are here.
        """
        here, late = self._here[door], self._late[door]

        def over() -> bool:
            return len(here) == len(self._sessions) or bool(late) or bool(self._gone - here)

        def progress() -> str:
            said = f"{len(here) + 1}/{len(self._sessions) + 1} ranks are here"
            return f"{door.said}: {said}, missing {self._ranks(self._sessions.keys() - here)}"

        self._wait(over, progress, limit)
        del self._here[door], self._late[door]
        missing = self._sessions.keys() - here
        if not missing and not late:
            self._send(here, "pass", door.as_message())
            return
        error = self._unmet(door, missing, late, limit)
        self._given_up = door, as_problem(error)
        self._send(here, "error", as_problem(error))
        raise error

    def open(self, door: Door, limit: float, failure: str | None = None) -> None:
        """Let all pass that wait at this door, or will, or let them know that we have failed.

        Of a node's door: and wait for the doors of the other nodes.

        Raises:
            DistbootError: `missing-rank`.
        """

        def unknown() -> set[int]:
            return self._sessions.keys() - self._peers.keys() - self._gone

        # They have connected when their framework was up, so that this waits for nobody whose framework is.
        self._wait(
            lambda: not unknown(), lambda: f"{door.said}: rank {self._ranks(unknown())} has not connected yet", limit
        )
        self._connections.turn(0.0)  # for what those say who have just come
        self._let_pass(door, 0, failure)
        if door.node is not None:
            self._see_all_open(door, limit)
        late = self._late.pop(door, {})
        if late:
            said = f"{ranks_said(sorted(late))} did not wait longer than {min(late.values()):g} s for this one"
            hint = f"give the block more time: {door.what.removesuffix('()')}(timeout=…)"
            raise DistbootError("missing-rank", f"{door.said}: {said}", hint)
        if unknown():
            said = f"rank {self._ranks(unknown())} did not come within {limit:g} s"
            raise DistbootError("missing-rank", f"{door.said}: {said}", "look at the output of the missing ranks")

    def wait(self, door: Door, limit: float) -> None:
        """Wait at the door of our node, of which we are not the first; and for those of the other nodes.

        Raises:
            DistbootError: `missing-rank`.
        """
        self._see_all_open(door, limit)
        if door in self._failed:
            raise door.failed(self._first_of(self._node_of[0]), self._failed[door])

    def close(self) -> None:
        """End all connections."""
        self._connections.close()
        self._listener.close()

    def _see_all_open(self, door: Door, limit: float) -> None:
        """Stay until all nodes' doors are open: nobody else passes their words on."""

        def closed() -> list[int]:
            nodes = range(len(self._nodes))
            return [node for node in nodes if self._open.get(door.on(node).name, 0) < door.times]

        self._wait(
            lambda: not closed(), lambda: f"{door.what}: {self._first_of(closed()[0])} is not through yet", limit
        )
        if closed():
            raise door.on(closed()[0]).not_opened(self._first_of(closed()[0]), limit)

    def _first_of(self, node: int) -> str:
        return f"rank {self._nodes[node][0]} (node {node})"

    def _ranks(self, ranks: Iterable[int]) -> str:
        return with_nodes(sorted(ranks), self._node_of)

    def _unmet(self, door: Door, missing: set[int], late: Mapping[int, float], limit: float) -> DistbootError:
        limit = min(late.values(), default=limit)
        hint = "look at the output of the missing ranks: they ended early, hang, or do not come here"
        gone = missing & self._gone
        if gone:
            said = f"rank {self._ranks(gone)} ended, or closed its context, without coming here"
        elif missing:
            came = f"{len(self._sessions) + 1 - len(missing)} of {len(self._sessions) + 1} ranks came"
            said = f"{came} within {limit:g} s, missing {self._ranks(missing)}"
        else:
            said = f"{ranks_said(sorted(late))} did not wait longer than {limit:g} s for this one"
            hint = "look for what kept this rank, or give it more time: init(timeout=…)"
        return DistbootError("missing-rank", f"{door.said}: {said}", hint)

    def _wait(self, over: Callable[[], bool], progress: Callable[[], str], limit: float) -> None:
        """Read until it is over, or the limit has come."""
        patience = Patience(limit)
        try:
            self._connections.turn(0.0)
            while not over() and patience.left():
                line = patience.line(progress()) if patience.is_due() else None  # thousands of ranks are long to say
                if line is not None:
                    self._say(line)
                self._connections.turn(patience.pause())
        except OutOfFilesError:
            said = f"rank 0 may open {files_allowed()} files, too few for the connections of all ranks"
            raise DistbootError("too-few-files", said, "raise the limit (ulimit -n), or close files") from None

    def _take(self, peer: Peer, message: dict[str, object]) -> None:
        if not peer.ranks or peer.session is None:
            self._take_rank(peer, message)
            return
        (rank,) = peer.ranks
        kind, content = peer.session.opened(message, "here", "through", "failed", "late")
        more: object = None
        if kind in ("late", "failed"):
            content, more = content if isinstance(content, list) and len(content) == 2 else (None, None)
        door = door_of(content)
        is_fine = {
            "late": type(more) in (int, float) and 0 <= float(str(more)) <= _LONGEST,
            "failed": isinstance(more, str) and len(more) <= LONGEST_FAILURE,
        }
        if door is None or not is_fine.get(kind, True):
            raise WireError(f"sends a broken {kind}")
        if kind == "here":
            self._come(rank, door)
        elif kind == "late":
            if door.node in (None, self._node_of[0]):  # at the doors of other nodes nobody waits for us
                self._late[door][rank] = float(str(more))
        elif door.node == self._node_of[rank]:
            self._let_pass(door, rank, None if more is None else printable(str(more)))

    def _come(self, rank: int, door: Door) -> None:
        """A rank is at a barrier; if we have given that up, it is told."""
        if self._given_up is not None and self._given_up[0] == door:
            self._send([rank], "error", self._given_up[1])
        else:
            self._here[door].add(rank)

    def _take_rank(self, peer: Peer, message: dict[str, object]) -> None:
        """The first message of a connection: whose it is."""
        claim = message.get("gate")
        job, rank = claim if isinstance(claim, list) and len(claim) == 2 else (None, None)
        if type(rank) is not int or rank not in self._sessions:
            raise WireError("comes when the roll call is over, and is none of the ranks that have met")
        if job != self._job:
            raise WireError("belongs to another job")
        if rank in self._peers or rank in self._gone:  # each connects once, and what it says could be said again
            raise WireError(f"says that it is rank {rank}, which is there, or was")
        self._sessions[rank].opened(message, "gate")
        self._connections.admit(peer)
        peer.ranks, peer.session = {rank}, self._sessions[rank]
        self._peers[rank] = peer
        opened = [Door(what, node, times) for (what, node), times in self._open.items()]
        for door in (*self._failed, *opened):  # it passes them in this order
            if door.node in (None, self._node_of[rank]):
                self._tell_open([rank], door)

    def _lost(self, peer: Peer) -> None:
        for rank in peer.ranks:
            if self._peers.get(rank) is peer:
                del self._peers[rank]
                self._gone.add(rank)

    def _let_pass(self, door: Door, first: int, failure: str | None) -> None:
        """The door was opened by this rank, which does not wait there itself."""
        self._open[door.name] = door.times
        if failure is not None:
            self._failed[door] = failure
        here = self._sessions if door.node is None else self._nodes[door.node]
        self._tell_open([rank for rank in here if rank != first], door)

    def _tell_open(self, ranks: Iterable[int], door: Door) -> None:
        if door in self._failed:
            self._send(ranks, "failed", [door.as_message(), self._failed[door]])
        else:
            self._send(ranks, "pass", door.as_message())

    def _send(self, ranks: Iterable[int], kind: str, content: object) -> None:
        text = canonical(content)
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is not None and peer.session is not None:
                self._connections.send(peer, peer.session.sealed(kind, text))

    def _say(self, text: str) -> None:
        tell("rank 0", text)
