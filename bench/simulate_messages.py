"""What the ranks of a job, or the relays of their nodes, say to rank 0: real frames, whose contents are made up."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from distboot.facts import facts
from distboot.lifeline.ends import End
from distboot.lifeline.verdict import Verdict, lost, seats
from distboot.record import Record
from distboot.rollcall.ready import Ready
from distboot.rollcall.wire import VERSION, Membership, Session, canonical, frame
from distboot.roster import Roster

RANKS_A_NODE = 8
SHAPES = {"flat": 1, "relays": RANKS_A_NODE}  # -> ranks that share a connection
JOB = Membership("5c2f10aa")
HELLO = frame({"distboot": VERSION, "job": JOB.job, "nonce": "0" * 32})
CHALLENGE = frame({"distboot": VERSION, "challenge": "0" * 32})
BEAT = Session().sealed("beat", "null")
_FACTS = facts({}, RANKS_A_NODE, "torch")


def record(rank: int, world_size: int, **more: object) -> Record:
    """A rank that Slurm has started, on a node of eight, with the facts of this very Python."""
    node = rank // RANKS_A_NODE
    host = f"node-{node:05}"
    return Record(
        rank, "slurm", host, f"{host}/boot", 1000 + rank, str(rank), world_size, local_rank=rank % RANKS_A_NODE,
        local_world_size=min(RANKS_A_NODE, world_size - node * RANKS_A_NODE), node_rank=node, facts=_FACTS, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def roster_of_nodes(world_size: int) -> Roster:
    """The roster that follows."""
    nodes = [range(first, min(first + RANKS_A_NODE, world_size)) for first in range(0, world_size, RANKS_A_NODE)]
    return Roster(tuple(f"node-{node:05}" for node in range(len(nodes))), tuple(map(tuple, nodes)), "10.0.0.1")


@cache
def roster_bytes(world_size: int) -> int:
    """Of the roster on the wire."""
    return len(Session().sealed("roster", canonical(roster_of_nodes(world_size).as_message())))


def verdict(rank: int = 8) -> Verdict:
    """What all are told when a rank has gone."""
    node = rank - rank % RANKS_A_NODE
    roster = roster_of_nodes(node + RANKS_A_NODE)
    return lost(seats(roster)[rank : rank + 1], "the connection ended without a word")


@dataclass(frozen=True)
class Line:
    """Whoever has one connection to rank 0: a rank, or the relay of a node.

    Attributes:
        world_size: of the job.
        ranks: for which it speaks.
        is_relay: whether it is one, even of a single rank.
    """

    world_size: int
    ranks: tuple[int, ...]
    is_relay: bool

    @cached_property
    def records(self) -> bytes:
        """What the ranks say of themselves, all at once."""
        records = [record(rank, self.world_size, clock=time.time()).as_message() for rank in self.ranks]
        if not self.is_relay:
            return Session().sealed("record", canonical(records[0]))
        return Session().sealed("records", canonical([[each, os.urandom(16).hex(), "0" * 32] for each in records]))

    def ready(self) -> bytes:
        """That they are ready, each at another moment."""
        return self._each("ready", [Ready(device=f"0000:{rank % 8:02}:00.0").as_message() for rank in self.ranks])

    def watch(self) -> bytes:
        """That the lifeline begins."""
        return self._each("watch", [{"pid": 1000 + rank} for rank in self.ranks])

    def end(self) -> bytes:
        """How they end when they are told to."""
        return self._each("end", [End(signal=15, told=True).as_message()] * len(self.ranks))

    def death(self) -> bytes:
        """That one of them has gone; empty: by ending the connection."""
        if not self.is_relay:
            return b""
        return Session().sealed("of", canonical([[self.ranks[0], "gone", "the connection ended without a word"]]))

    def _each(self, kind: str, contents: list[dict[str, object]]) -> bytes:
        if not self.is_relay:
            return Session().sealed(kind, canonical(contents[0]))
        said = zip(self.ranks, contents, strict=True)
        return b"".join(Session().sealed("of", canonical([[rank, kind, content]])) for rank, content in said)


def lines_of(world_size: int, ranks_a_line: int) -> list[Line]:
    """All of a job but rank 0, by rank."""
    firsts = range(0, world_size, ranks_a_line)
    ranks = [tuple(range(max(first, 1), min(first + ranks_a_line, world_size))) for first in firsts]
    return [Line(world_size, each, ranks_a_line > 1) for each in ranks if each]
