"""Rank 0's side of the gate, and peers that are not who they say, or say what nobody should."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from distboot.errors import DistbootError
from distboot.rollcall.doors import Door
from distboot.rollcall.gatekeeper import Gatekeeper
from distboot.rollcall.wire import Session, canonical

SESSION = Session("secret", "rank 0", "challenge", "nonce")
BARRIER = Door("barrier()", None, 1)


class Gate:
    """Rank 0 of a job of two at its gate, in a thread."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.keeper = Gatekeeper(self.listener, {1: SESSION}, "job", [[0, 1]])
        self.outcome: list[str] = []
        self.peers: list[socket.socket] = []

    def peer(self, *said: tuple[str, object]) -> socket.socket:
        """A connection on which this is said."""
        connection = socket.create_connection(self.listener.getsockname(), timeout=20)
        self.peers.append(connection)
        for kind, content in said:
            connection.sendall(SESSION.sealed(kind, canonical(content)))
        return connection

    def meet(self, limit: float = 20) -> threading.Thread:
        def work() -> None:
            try:
                self.keeper.meet(BARRIER, limit)
                self.outcome.append("met")
            except DistbootError as error:
                self.outcome.append(str(error))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.keeper.close()
    for peer in gate.peers:
        peer.close()


def _heard(connection: socket.socket) -> dict[str, object]:
    """The next message; empty when the connection has ended."""
    stream = connection.makefile("rb")
    length = int.from_bytes(stream.read(4), "big")
    return dict(json.loads(stream.read(length))) if length else {}


def test_who_repeats_what_a_rank_has_said_does_not_take_its_place(gate: Gate) -> None:
    rank = gate.peer(("gate", ["job", 1]))
    meeting = gate.meet()
    copy = gate.peer(("gate", ["job", 1]))
    assert "says that it is rank 1, which is there, or was" in str(_heard(copy)["refused"])
    rank.sendall(SESSION.sealed("here", canonical(BARRIER.as_message())))
    meeting.join(20)
    assert gate.outcome == ["met"]
    assert _heard(rank)["pass"] == BARRIER.as_message()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("here", ["elsewhere()", None, 1]), ("here", ["barrier()", -1, 1]), ("here", ["barrier()", None, 0]),
        ("here", ["barrier()", None, 10**30]), ("here", None), ("late", [BARRIER.as_message(), 10**400]),
        ("late", [BARRIER.as_message(), -1]), ("late", [BARRIER.as_message(), "long"]), ("late", BARRIER.as_message()),
    ],
)  # fmt: skip
def test_what_no_rank_says_is_refused(gate: Gate, kind: str, content: object) -> None:
    rank = gate.peer(("gate", ["job", 1]), (kind, content))
    meeting = gate.meet()
    assert f"sends a broken {kind}" in str(_heard(rank)["refused"])
    meeting.join(20)
    assert "rank 1 (node 0) ended, or closed its context, without coming here" in gate.outcome[0]


def test_who_comes_when_the_barrier_was_given_up_is_told(gate: Gate) -> None:
    rank = gate.peer(("gate", ["job", 1]))
    gate.meet(0.2).join(20)
    assert "missing 1 (node 0)" in gate.outcome[0]
    rank.sendall(SESSION.sealed("here", canonical(BARRIER.as_message())))
    again = threading.Thread(target=lambda: gate.keeper.open(Door("main_first()", None, 1), 5), daemon=True)
    again.start()
    assert "missing 1 (node 0)" in str(_heard(rank)["error"])
    again.join(20)
