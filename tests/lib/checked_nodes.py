"""Rank 0's job of a few nodes with one rank each, and what its check of all nodes asks, finds and says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rendezvous_peers import record

from distboot.base.settings import SupervisionSettings
from distboot.job.effects import Blame, Record, Reply, Say, Send, Tell
from distboot.job.facts import Facts
from distboot.job.job import Job
from distboot.job.keys import Keys
from distboot.job.messages import NodeSeen, Probe, Probeable, Probed
from distboot.job.root_cause import ranks_of
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import Go

GIB = float(1 << 30)
USUAL = Probed(0, 0.0002, 12e9)  # of a network of 100 Gbit/s


class Checked:
    """Rank 0's job of a few nodes with one rank each, and what it has printed."""

    def __init__(self, nodes: int = 4, mode: str = "warn", hosts: Sequence[str] = ()) -> None:
        hosts = hosts or [f"node-{number}" for number in range(nodes)]
        membership = Membership(tuple(hosts), tuple((number,) for number in range(nodes)))
        members = {member.rank: member for member in ranks_of(membership)}
        for member in members.values():
            member.is_local = member.rank == 0
        addresses = {number: f"10.0.0.{number}" for number in range(1, nodes)}
        settings = SupervisionSettings(grace=30.0, check=mode)
        table = JoinTable(nodes)
        for number in range(nodes):
            table.add(record(number, nodes))
        self.facts = Facts(members, settings, is_held=True)
        self.facts.is_starting = True
        self.job = Job(self.facts, Keys(membership, table), addresses=addresses)
        self.now = 100.0
        self.said: list[str] = []
        self.probes: list[tuple[int, Probe]] = []
        self.replies: list[object] = []
        self.findings: list[str] | None = None
        self.details: dict[str, Any] = {}  # of the event "checked"
        self.blamed: list[Blame] = []
        self._tick()

    def take(self, rank: int, message: object) -> None:
        self._apply(self.job.take(rank, message, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._tick()

    def see(self, **odd: NodeSeen) -> None:
        """All nodes report; those named `node_3` something of their own."""
        for rank in range(len(self.facts.members)):
            self.take(rank, Probeable(4000 + rank, f"token {rank}"))
        for rank in range(len(self.facts.members)):
            self.take(rank, odd.get(f"node_{rank}", NodeSeen({"free memory": 900 * GIB})))

    def answer(self, **odd: Probed) -> None:
        """Answer all probes of the first two rounds, or a later one; the links from those named `node_3` so."""
        is_first = bool(self.probes) and self.probes[0][1].number == 1
        for _ in range(1 + is_first):
            probes, self.probes = self.probes, []
            for rank, probe in probes:
                found = odd.get(f"node_{rank}", USUAL)
                self.take(rank, Probed(probe.number, found.round_trip, found.rate, found.problem))

    def _tick(self) -> None:
        self._apply(self.job.tick(self.now))

    def _apply(self, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Probe):
                (rank,) = effect.ranks
                self.probes.append((rank, effect.message))
            elif isinstance(effect, Say):
                self.said.append(effect.text)
            elif isinstance(effect, Record) and effect.event == "checked":
                self.findings = effect.details["findings"]
                self.details = dict(effect.details)
            elif isinstance(effect, Send) and isinstance(effect.message, Go):
                self.replies.append(effect.message)
            elif isinstance(effect, Blame):
                self.blamed.append(effect)
            elif isinstance(effect, Reply | Tell):
                self.replies.append(effect)
