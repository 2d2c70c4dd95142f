"""Rank 0's side of failure detection: it receives every end first, and tells all what its job decides.

The job (`job/job`) has the decisions; this is the io around it. What a rank says, its own or that of
another agent, what is found out about the connections, and that time has passed, are its events.
Their effects are carried out in the same turn (`_apply`).

Once the root cause is known all agents are told, a second time when the rank that failed has ended,
as the others stop only after the launcher has seen its exit code.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from ..base.table import first_that_holds
from ..base.text import first_line, writes_json
from ..job import effects as of_job
from ..job import messages
from ..job.root_cause import RankState, RootCause
from ..rendezvous.messages import READY, AskStacks, Detach, Failed, Go, Release
from ..rendezvous.protocol import Broadcast, ProtocolError
from .heartbeat import HeartbeatConnection
from .participant import AFTER_THE_FIRST, CAUSE
from .peer_connection import close_gracefully
from .rank_connections import RankConnections

_LINGER = 5.0  # seconds after rank 0 has ended well, for the others to end, too
_LAST_MESSAGE = 2.0  # seconds beyond the grace for ranks that were told to stop
_FIRST_OUT = 0.5  # seconds for the rank that failed to end before the others do
_is_reachable = operator.attrgetter("is_reachable")
_pid = operator.attrgetter("pid")


@dataclass
class FailureCoordinator(RankConnections):
    """Rank 0's side, which knows all ranks of the job."""

    # Called when no rank gets ready any more: all are, or cannot be
    started: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._appliers: dict[type, Callable[[Any, float], object]] = {
            of_job.Send: self._send_to,
            of_job.Reply: self._reply,
            of_job.Say: self._print,
            of_job.Record: self._record,
            of_job.Tell: self._tell,
            of_job.Remind: self._remind,
            of_job.Blame: self._blame,
            of_job.QuestionPeers: lambda _, now: self._question_peers(now),
        }
        self._executors[Go] = self._go
        self._speakers: tuple[int, ...] = ()  # see `messages.Abort`; empty: none is told yet

    # Events

    def take(self, rank: int, message: object, now: float) -> None:
        if isinstance(message, messages.Exited):
            self._ended_at = now
        self._hear(rank, message, now)

    def ask_stacks(
        self,
        reply: Callable[[Sequence[str]], object],
        now: float,
    ) -> None:
        self._shows.append(reply)
        self.take(self.own[0].rank, AskStacks(), now)

    def turn(self, now: float) -> None:
        super().turn(now)
        effects = self.job.tick(now)
        self._apply(effects, now)

    def due(self, now: float) -> float:
        return min(super().due(now), self.job.due())

    def _take_from(
        self,
        connection: HeartbeatConnection,
        rank: int,
        message: object,
        now: float,
    ) -> None:
        if isinstance(message, Detach):
            for each in self.peers[connection]:
                self._note(each.rank, message)
            self._forget(connection)
            connection.close()
            return
        member = self.members.get(rank)
        if member is None or member.connection is not connection:
            raise ProtocolError(f"speaks for rank {rank}, which is not its own")
        self._hear(rank, message, now)

    def _hear(self, rank: int, message: object, now: float) -> None:
        self._note(rank, message)
        effects = self.job.take(rank, message, now)
        self._apply(effects, now)

    def _note(self, rank: int, message: object) -> None:
        """For the journal, if there is one."""
        if self.settings.report is None:
            return
        from ..job import journal  # here, as most jobs have none

        details = journal.heard(message)
        if details is not None:
            self.log.note(journal.HEARD, rank, **details)

    # Effects

    def _apply(self, effects: Sequence[of_job.Effect], now: float) -> None:
        for effect in effects:
            apply = self._appliers[type(effect)]
            apply(effect, now)

    def _send_to(self, effect: of_job.Send, now: float) -> None:
        self._send_to_agents(effect.message, effect.ranks)
        is_for_us = not self._own_ranks.isdisjoint(effect.ranks)
        execute = self._executors.get(type(effect.message))
        if is_for_us and execute is not None:
            execute(0, effect.message, now)

    def _send_to_agents(self, message: object, ranks: Collection[int]) -> None:
        """Send a message once to each other agent that has one of these ranks."""
        connections = {self.members[rank].connection: None for rank in ranks}
        connections.pop(None, None)
        broadcast = Broadcast(message)
        for connection in connections:
            connection.send(broadcast)

    def _reply(self, effect: of_job.Reply, _: float) -> None:
        member = self.members[effect.rank]
        message = effect.message
        if member.is_local:
            assert isinstance(message, Release | Failed)
            if message.key is not None and message.key.name == READY:
                self.started()  # it ends here: a rank is not ready
            self._answer(effect.rank, message)
        elif member.connection is not None:
            member.connection.send(message, effect.rank)

    def _go(self, _rank: int, message: Go, _: float) -> None:
        """All ranks are ready."""
        self.started()
        for rank in list(self.waiting):
            self._answer(rank, message)

    def _print(self, effect: of_job.Say, _: float) -> None:
        self.say(effect.text, event=effect.event, **effect.details)

    def _record(self, effect: of_job.Record, _: float) -> None:
        self.log.add(effect.event, effect.rank, **effect.details)

    def _tell(self, effect: of_job.Tell, now: float) -> None:
        self.claim(CAUSE)  # before any other agent of this node knows
        self._send(self._abort(effect.cause))
        self._stop_own(effect.cause, now)

    def _remind(self, effect: of_job.Remind, _: float) -> None:
        abort = self._abort(effect.cause)
        self._send_to_agents(abort, (effect.rank,))

    def _abort(self, cause: RootCause) -> messages.Abort:
        """What other agents are told.

        Who prints it is said here: an agent that has printed it may have ended before another one
        of its node knows.
        """
        from .claims import own_log  # here, as most jobs end well

        if not self._speakers:
            self._speakers = _speakers(self.members, cause)
        return messages.Abort(
            cause,
            own_log(),
            self._speakers,
        )

    def _blame(self, effect: of_job.Blame, _: float) -> None:
        """Add a host to the file of bad hosts."""
        path = self.settings.bad_hosts
        if path is None:
            return
        from .bad_hosts import append  # here, as few jobs have such a file

        try:
            append(
                path,
                effect.host,
                effect.why,
            )
        except (OSError, ValueError) as error:
            why = first_line(error)
            self.say(f"warning: the file of bad hosts was not written: {why}")

    def _words_for(self, cause: RootCause) -> str:
        """The headline, and what follows it, unless the rank that failed prints that on this node."""
        first = self.members[cause.ranks[0]]
        is_here = first.node_rank == self.own[0].node_rank
        has_printed = first.failing is not None or first.end is not None
        if is_here and has_printed and not writes_json():
            return cause.headline
        return cause.text

    # The end

    def finish(self) -> None:
        """Let the others end: first the rank that failed, whose exit code the launcher has to see first."""
        has_started = any(map(_pid, self.own))
        if not self._has_left:
            if not has_started:
                return  # the others are to see that as a loss
            if self.detects:
                self._summarize()
        cause = self.root_cause
        if cause is None or cause.restarts:
            self._say_goodbye()
        elif self.held and not self._hurried:
            self._let_first_end(cause)

    def _say_goodbye(self) -> None:
        if not self._has_left:
            self._send(Detach(ended=self.detects))
        reachable = [each for each in self.peers if each.unreachable_since is None]
        close_gracefully(reachable)

    def _let_first_end(self, cause: RootCause) -> None:
        connections = {self.members[rank].connection for rank in cause.ranks}
        connections.discard(None)
        close_gracefully(connections, _FIRST_OUT)
        if not self._is_own(cause):
            time.sleep(AFTER_THE_FIRST)

    def _summarize(self) -> None:
        """Print one line on how the job ended, and write the report where there is to be one."""
        # Here, as an agent needs it at its end only
        from ..report.content import Doubts, job_report, summary_line
        from ..report.files import try_to_write
        from ..report.spent import NO_ROUND, RoundTime, goodput_line

        exit_code = self._exit_code_of_job()
        self.log.note("ended", exit_code=exit_code)
        doubts = Doubts(self.settings.apart, self.settings.unused)
        now = time.time()
        known = (self.log, self.membership, doubts, now)
        round_ = RoundTime(self.log, self.membership.world_size)
        earlier = []
        before = NO_ROUND
        if self.restarts is not None:
            earlier = self.restarts.rounds
            before = self.restarts.spent or before
            self.restarts.spent = before.with_round(round_, now)
        if self.root_cause is None or not self.root_cause.restarts:
            line = summary_line(
                *known,
                exit_code,
                rounds=earlier,
            )
            self.say(line)
            goodput = goodput_line(before.with_round(round_, now))
            if goodput:
                self.say(goodput)
        if self.settings.report is None or self.log[0].event != "rendezvous_started":
            return
        problem = try_to_write(
            self.settings.report, lambda: job_report(*known, earlier, before=before)
        )
        if problem is not None:
            self.say(problem)

    def _exit_code_of_job(self) -> int | None:
        """The exit code for the launcher; None where no failure and no signal has ended the job."""
        cause = self.root_cause
        if cause is None:
            return None
        found = cause.exit_code
        for rank in (*cause.ranks, *self.members):
            end = self.members[rank].end
            if end is not None:
                found = cause.exit_code_for(end) or end.status or 0
                if found:
                    return found
        return found

    def _limit(self) -> float:
        """Until when this agent stays for the others."""
        cause = self.root_cause
        is_open = cause is None
        is_failure = cause is not None and cause.is_failure
        is_alone = not any(map(_is_reachable, self.members.values()))
        told_all = self._concluded_at + self.settings.grace + _LAST_MESSAGE
        return first_that_holds(
            (not self.detects, self._ended_at),
            (is_open and bool(self.facts.reports), inf),  # it is being decided
            (is_alone, self._ended_at),
            (is_open and self.may_restart, inf),
            (is_open, self._ended_at + _LINGER),
            (is_failure, max(told_all, self._ended_at)),
            (True, max(self._concluded_at + _LINGER, self._ended_at)),
        )


def _speakers(members: Mapping[int, RankState], cause: RootCause) -> tuple[int, ...]:
    """The first rank of each node that still runs; the script of one that failed prints itself."""
    found: dict[int, int] = {}
    for rank, member in members.items():
        is_silent = rank in cause.ranks or not member.is_open
        if not is_silent:
            found.setdefault(member.node_rank, rank)
    for rank, member in members.items():
        found.setdefault(member.node_rank, rank)
    return tuple(sorted(found.values()))
