"""The job of rank 0 again, from its journal: what was heard of the ranks, at the times of then."""

import json
from collections.abc import Callable
from pathlib import Path

from job_rows import members_of

from distboot.base.settings import SupervisionSettings
from distboot.job.effects import Effect, Record
from distboot.job.facts import Facts
from distboot.job.job import Job
from distboot.job.journal import DECISIVE, HEARD, Round, read
from distboot.job.keys import Keys
from distboot.job.messages import Register
from distboot.job.root_cause import RootCause
from distboot.rendezvous.events import Event
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.messages import Detach
from distboot.rendezvous.protocol import decode

AFTERWARDS = 60.0  # seconds for what follows from the last event


class Replay:
    """One round of a job, event by event."""

    def __init__(self, round_: Round) -> None:
        membership = round_.membership
        assert membership is not None
        members = members_of(membership, membership.agents[0])
        facts = Facts(members, SupervisionSettings(grace=30.0), is_held=membership.by_node)
        keys = Keys(membership, JoinTable(membership.world_size))
        keys.has_begun = True
        self.job = Job(facts, keys, is_by_node=membership.by_node)
        self.records: list[tuple[str, int | None]] = []
        self._happens: dict[str, Callable[[Event, int], list[Effect]]] = {
            HEARD: self._heard,
            "registered": lambda one, rank: self.job.take(
                rank, Register(one.details["pid"]), one.time
            ),
            "unreachable": lambda one, rank: self.job.lost(
                rank, one.details["text"], one.time, gathering=0.1
            ),
            "silent": lambda one, rank: self.job.unreachable(
                rank, one.time, one.details["text"], one.time
            ),
            "reachable": lambda one, rank: self.job.returned(rank, one.time),
        }
        events = sorted([*round_.events, *round_.heard], key=lambda one: one.time)
        for one in events:
            self._pass_until(one.time)
            if one.event in self._happens and one.rank is not None:
                self._apply(self._happens[one.event](one, one.rank))
        self._pass_until(round_.last + AFTERWARDS)

    @property
    def cause(self) -> RootCause | None:
        return self.job.facts.cause

    def _heard(self, one: Event, rank: int) -> list[Effect]:
        content = json.dumps(one.details["message"])
        message = decode(content.encode(), *DECISIVE)
        if isinstance(message, Detach):
            self.job.facts.members[rank].connection = None
            return self.job.left(rank, one.time)
        return self.job.take(rank, message, one.time)

    def _pass_until(self, time: float) -> None:
        while self.job.due() <= time:
            self._apply(self.job.tick(self.job.due()))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Record):
                self.records.append((effect.event, effect.rank))


def last_round(path: Path) -> Round:
    journal = read(path.read_text().splitlines())
    assert journal.unreadable == 0
    return journal.rounds[-1]
