"""Rank 0's side of the gate: it knows who is where, and lets them pass."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import DistbootError, tell
from ..record import as_problem
from ..roster import ranks_said, with_nodes
from .connections import Connections, OutOfFilesError, Peer
from .doors import Door, Patience, door_of
from .files import files_allowed
from .wire import Session, WireError, canonical


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
        self._open: set[Door] = set()  # of nodes, which other ranks have opened, or we

    def meet(self, door: Door, limit: float) -> None:
        """Wait until all are here, and let them pass.

        Raises:
            DistbootError: `missing-rank`, on all that are here.
        """
        here, late = self._here[door], self._late[door]

        def missing() -> set[int]:
            return self._sessions.keys() - here

        def progress() -> str:
            said = f"{len(here) + 1}/{len(self._sessions) + 1} ranks are here"
            return f"{door.said}: {said}, missing {with_nodes(sorted(missing()), self._node_of)}"

        self._wait(lambda: not missing() or bool(late) or bool(missing() & self._gone), progress, limit)
        del self._here[door], self._late[door]
        if not missing() and not late:
            self._send(here, "pass", door.as_message())
            return
        error = self._unmet(door, missing(), late, limit)
        self._send(here, "error", as_problem(error))
        raise error

    def open(self, door: Door, limit: float) -> None:
        """Let all pass that wait at this door, or will. Of a node's door: and wait for the doors of the other nodes.

        Raises:
            DistbootError: `missing-rank`.
        """
        # They have connected when their framework was up, so that this waits for nobody whose framework is.
        self._wait(self._all_are_known, lambda: f"{door.said}: {self._unknown_said()} has not connected yet", limit)
        self._connections.turn(0.0)  # for what those say who have just come
        if door.node is None:
            self._send(self._sessions, "pass", door.as_message())
        else:
            self._let_pass(door)
            self._see_all_open(door, limit)
        late = self._late[door]
        if late:
            said = f"{ranks_said(sorted(late))} did not wait longer than {min(late.values()):g} s for this one"
            hint = f"give the block more time: {door.what.removesuffix('()')}(timeout=…)"
            raise DistbootError("missing-rank", f"{door.said}: {said}", hint)

    def wait(self, door: Door, limit: float) -> None:
        """Wait at the door of our node, of which we are not the first; and for those of the other nodes.

        Raises:
            DistbootError: `missing-rank`.
        """
        self._see_all_open(door, limit)

    def close(self) -> None:
        """End all connections."""
        self._connections.close()
        self._listener.close()

    def _see_all_open(self, door: Door, limit: float) -> None:
        """Stay until all nodes' doors are open: nobody else passes their words on."""

        def closed() -> list[int]:
            return [node for node in range(len(self._nodes)) if door.on(node) not in self._open]

        self._wait(
            lambda: not closed(), lambda: f"{door.what}: {self._first_of(closed()[0])} is not through yet", limit
        )
        if closed():
            raise door.on(closed()[0]).not_opened(self._first_of(closed()[0]), limit)

    def _first_of(self, node: int) -> str:
        return f"rank {self._nodes[node][0]} (node {node})"

    def _all_are_known(self) -> bool:
        return len(self._peers) + len(self._gone) == len(self._sessions)

    def _unknown_said(self) -> str:
        unknown = sorted(self._sessions.keys() - self._peers.keys() - self._gone)
        return f"rank {with_nodes(unknown, self._node_of)}"

    def _unmet(self, door: Door, missing: set[int], late: Mapping[int, float], limit: float) -> DistbootError:
        said = with_nodes(sorted(missing), self._node_of)
        limit = min(late.values(), default=limit)
        hint = "look at the output of the missing ranks: they ended early, hang, or do not come here"
        gone = sorted(missing & self._gone)
        if gone:
            said = f"rank {with_nodes(gone, self._node_of)} ended, or closed its context, without coming here"
        elif missing:
            came = f"{len(self._sessions) + 1 - len(missing)} of {len(self._sessions) + 1} ranks came"
            said = f"{came} within {limit:g} s, missing {said}"
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
                line = patience.line(progress())
                if line is not None:
                    self._say(line)
                self._connections.turn(patience.pause())
        except OutOfFilesError:
            said = f"rank 0 may open {files_allowed()} files, too few for the connections of all ranks"
            raise DistbootError("too-few-files", said, "raise the limit (ulimit -n), or close files") from None

    def _take(self, peer: Peer, message: dict[str, object]) -> None:
        if peer.rank is None or peer.session is None:
            self._take_rank(peer, message)
            return
        kind, content = peer.session.opened(message, "here", "through", "late")
        waited = 0.0
        if kind == "late":
            content, waited = content if isinstance(content, list) and len(content) == 2 else (None, 0.0)
        door = door_of(content)
        if door is None or not isinstance(waited, int | float):
            raise WireError(f"sends a broken {kind}")
        if kind == "here":
            self._here[door].add(peer.rank)
        elif kind == "late":
            self._late[door][peer.rank] = waited
        elif door.node == self._node_of[peer.rank]:
            self._let_pass(door)

    def _take_rank(self, peer: Peer, message: dict[str, object]) -> None:
        """The first message of a connection: whose it is."""
        claim = message.get("gate")
        job, rank = claim if isinstance(claim, list) and len(claim) == 2 else (None, None)
        if type(rank) is not int or rank not in self._sessions:
            raise WireError("comes when the roll call is over, and is none of the ranks that have met")
        if job != self._job:
            raise WireError("belongs to another job")
        self._sessions[rank].opened(message, "gate")
        self._connections.admit(peer)
        peer.rank, peer.session = rank, self._sessions[rank]
        self._peers[rank] = peer
        for door in self._open:
            if door.node == self._node_of[rank]:
                self._send([rank], "pass", door.as_message())

    def _lost(self, peer: Peer) -> None:
        if peer.rank is not None and self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
            self._gone.add(peer.rank)

    def _let_pass(self, door: Door) -> None:
        """The door of a node is open."""
        assert door.node is not None
        self._open.add(door)
        self._send(self._nodes[door.node], "pass", door.as_message())

    def _send(self, ranks: Iterable[int], kind: str, content: object) -> None:
        text = canonical(content)
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is not None and peer.session is not None:
                self._connections.send(peer, peer.session.sealed(kind, text))

    def _say(self, text: str) -> None:
        tell("rank 0", text)
