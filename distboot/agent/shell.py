"""The shell of an agent's job: it hears what happens, lets the job decide, and carries out its effects.

The job is pure (`job/job` on rank 0, `job/follower` elsewhere). Its events come from the scripts
and processes of this agent, from the connections to other agents, and from the clock. Each is told
to the job, and the effects of it are carried out in the same turn.

What the two kinds of agents do about their connections is in `rank_connections` (rank 0's, to all
others) and `rank_0_connection` (the one of any other). Each has the job, and carries out the
effects that only its kind has.

A *key* is a place where ranks wait for each other. A script of this agent that waits there is in
`Facts.waits` until the job answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from operator import attrgetter
from typing import Any

from ..job import effects as of_job
from ..job.exit_status import ExitStatus
from ..job.facts import Facts, KeyWait
from ..job.messages import CountReads, Done, Failing, Locate, Probe, Reads, StopAt
from ..rendezvous.events import clock_time
from ..rendezvous.messages import Answer, Arrive, AskStacks, Detach, Go, Ready, ShowStacks
from .own_processes import OwnProcesses
from .stop_pages import StopPages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..job.follower import Follower
    from ..job.job import Job
    from ..job.root_cause import RootCause
    from .connections import Connections
    from .peer_watch import PeerWatch
    from .restarts import Restarts

_LATER = 2.0  # seconds beyond the timeout of a key for the answer of rank 0
_was_left = attrgetter("was_left")
_was_terminated = attrgetter("was_terminated")
CAUSE = "cause"  # the topic of the line that says why the job ends


class Shell:
    """The io of one agent. All times are those of `time.monotonic`."""

    # Given by `use`
    connections: Connections
    peers: PeerWatch
    job: Job | Follower

    def __init__(
        self,
        facts: Facts,
        # Prints a text, as the agent or as a rank, of an event with its details
        say: Callable[..., None],
    ) -> None:
        self.facts = facts
        self.say = say
        # Whether this agent is the one of its node that prints what all of them know of a topic
        self.claim: Callable[[str], bool] = lambda _: True
        # Probes the link to a neighbor
        self.probe: Callable[[Probe], object] = lambda _: None
        self.restarts: Restarts | None = None  # what the wrapper knows of all rounds
        self.own = OwnProcesses(facts)
        self.stops = StopPages(facts.settings.grace / 3)
        # What waits for the stacks of all ranks
        self._shows: list[Callable[[Sequence[str]], object]] = []
        self._executors: dict[type, Callable[[Any, float], object]] = {
            CountReads: lambda _, now: self.stops.ask(now),
            Done: lambda _, now: self.own.end_served(now),
            Go: self._answer_all,
            Locate: self.own.locate,
            Probe: lambda message, _: self.probe(message),
            ShowStacks: self._show,
            StopAt: lambda message, _: self.stops.stop_at(message.read),
        }
        self._appliers: dict[type, Callable[[Any, float], object]] = {
            of_job.Reply: lambda effect, now: self.answer(effect.rank, effect.message, now),
            of_job.Execute: lambda effect, now: self.execute(effect.message, now),
            of_job.Say: self._print,
            of_job.Stop: self.stop,
            of_job.QuestionPeers: lambda _, now: self.peers.question_all(now),
            of_job.ReleaseReads: lambda _, __: self.stops.release(),
        }
        self._has_left = False
        self._is_hurried = False
        self._has_announced = False  # whether it was printed why the job ends
        self._has_told_platform = False  # that the job has failed

    def use(self, connections: Connections) -> None:
        """The connections of this agent, with its job."""
        self.connections = connections
        self.peers = connections.peers
        self.job = connections.job
        self._appliers.update(connections.appliers)

    @property
    def root_cause(self) -> RootCause | None:
        """Why the job ends, once that is known."""
        return self.facts.cause

    # Events

    def take(
        self,
        rank: int,
        message: object,
        now: float,
    ) -> None:
        """A rank of ours says something."""
        self.apply(self.job.take(rank, message, now), now)

    def ask(
        self,
        rank: int,
        message: Arrive | Ready,
        reply: Callable[[Answer], object],
        now: float,
    ) -> None:
        """Let the script of a rank wait at a key; `reply` is called with the answer."""
        self.facts.waits[rank] = KeyWait(
            key=message.key,
            until=now + message.limit + _LATER,
            reply=reply,
        )
        self.own.pass_key(rank, now)
        self.take(rank, message, now)

    def ask_stacks(self, reply: Callable[[Sequence[str]], object], now: float) -> None:
        """Call `reply` with lines that show where all ranks are."""
        self._shows.append(reply)
        self.take(self.facts.own[0].rank, AskStacks(), now)

    def orphaned(self, why: str, now: float) -> None:
        """The launcher's process above our ranks is gone: they fail, and do not start again."""
        self.facts.is_orphaned = True
        self.facts.may_restart = False
        orphans = self.facts.running()
        if self.facts.cause is None:
            # Its helpers may have sent SIGTERM before it could be seen to be gone, as Horovod's do
            left = filter(_was_left, self.facts.own)
            orphans += filter(_was_terminated, left)
        for member in orphans:
            end = ExitStatus(
                cause=why,
                when=clock_time(),
            )
            self.take(member.rank, Failing(end), now)
        if not self.facts.detects:
            self.stop_orphans(why, now)

    def stop_orphans(self, why: str, now: float) -> None:
        """Stop our ranks without an answer of rank 0, if there is none."""
        self.apply(self.job.stop_orphans(why, now), now)

    def tick(self, now: float) -> None:
        """Once a second: poll our processes and peers, and send heartbeats."""
        self.own.poll(now)
        self.peers.tick(now)

    def turn(self, now: float) -> None:
        """In each turn of the loop: do what is due."""
        self.peers.poll_suspects(now)
        if now >= self.stops.due:
            self._report_reads(now)
        self.connections.turn(now)
        self.apply(self.job.tick(now), now)

    def due(self, now: float) -> float:
        """When `turn` and `own.execute` are to be called next."""
        return min(
            self.peers.due(now),
            self.stops.due,
            self.connections.due(),
            self.job.due(),
            self.own.due(),
            max(self._over_at(), now),
        )

    def _report_reads(self, now: float) -> None:
        """Report how often each script has read `ctx.preempted`; warn of those that are late."""
        ranks = [member.rank for member in self.facts.own]
        for rank, reads in self.stops.counted(ranks, now).items():
            self.take(rank, Reads(reads), now)
        running = {member.rank for member in self.facts.running()}
        for rank, text in self.stops.late(running, now).items():
            self.say(text, rank)

    # Effects

    def apply(self, effects: Sequence[of_job.Effect], now: float) -> None:
        """Carry out what an event has led to, in its order."""
        for effect in effects:
            apply = self._appliers[type(effect)]
            apply(effect, now)

    def answer(
        self,
        rank: int,
        message: Answer,
        now: float,
    ) -> None:
        """Answer the script of a rank, unless it has given up the wait that this is for."""
        wait = self.facts.waits.get(rank)
        if wait is not None and wait.ends_with(message):
            del self.facts.waits[rank]
            self.own.pass_key(rank, now)
            wait.reply(message)

    def _answer_all(self, message: Go, now: float) -> None:
        """All ranks are ready."""
        for rank in list(self.facts.waits):
            self.answer(rank, message, now)

    def execute(self, message: object, now: float) -> None:
        """Do what rank 0's job asks of every agent."""
        execute = self._executors.get(type(message))
        if execute is not None:
            execute(message, now)

    def stop(self, effect: of_job.Stop, now: float) -> None:
        """Stop our own ranks, and print why, once; tell the platform of a job that fails."""
        self.own.stop(effect.cause, now)
        if not self._has_announced:
            self._has_announced = True
            self._announce(effect)
        ends_in_failure = effect.cause.is_failure and not effect.cause.restarts
        if ends_in_failure and not self._has_told_platform:
            self._has_told_platform = True
            with suppress(OSError):  # no file left, also for the module
                from . import platform_log  # here, as most jobs end well

                platform_log.write_in_time(effect.cause.text, replaces=True)

    def _announce(self, effect: of_job.Stop) -> None:
        cause = effect.cause
        text = self.connections.words_for(effect)
        if not text:
            return
        self.say(
            text,
            event="root_cause",
            ranks=cause.ranks,
            is_failure=cause.is_failure,
        )
        if self.restarts is not None:
            self.restarts.prints = True

    def _print(self, effect: of_job.Say, _: float) -> None:
        if not effect.topic or self.claim(effect.topic):
            self.say(effect.text, event=effect.event, **effect.details)

    def _show(self, message: ShowStacks, _: float) -> None:
        """Answer all that wait for the stacks of all ranks."""
        shows = self._shows
        self._shows = []
        for reply in shows:
            reply(message.lines)

    # The end

    def leave(self, *, gave_up: bool = False) -> None:
        """The ranks of this agent leave the job, which is no failure."""
        self.peers.send(Detach(gave_up=gave_up))
        self._has_left = True

    def hurry(self) -> None:
        """Do not wait for other ranks any more."""
        self._is_hurried = True

    def over(self, now: float) -> bool:
        """Whether this agent is done."""
        if self._has_left or self._is_hurried:
            return True
        return now >= self._over_at()

    def _over_at(self) -> float:
        if self.facts.running() or self.own.is_leaving:
            return inf
        return self.job.stays_until()

    def finish(self) -> None:
        """The loop ends: say goodbye to the peers."""
        self.connections.finish(has_left=self._has_left, is_hurried=self._is_hurried)

    def close(self) -> None:
        self.connections.close()
        self.stops.pages.clear()  # each has a file
