"""The job as any other agent than rank 0's takes part in it, as a pure machine: events in, effects out.

It decides nothing alone, unless rank 0 is gone. What a rank of ours says goes to rank 0's agent
(`Report`), and what that sends is carried out: stop our ranks, answer a script that waits at a key,
publish the read of `ctx.preempted` at which all stop. When our own ranks have ended, the agent
waits for the answer of rank 0 for as long as `stay` says.

What is known of the connection (`Rank0Link`) is written before the event that it leads to. Where
rank 0 is gone, the scripts that wait get an error, and our ranks stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from ..base.dataclass import replace
from ..base.errors import DistbootError
from ..base.text import said_by
from ..rendezvous.messages import (
    LONGEST_TEXT,
    READY,
    Arrive,
    AskStacks,
    Detach,
    Failed,
    Go,
    Key,
    Ready,
    Release,
    RequestStop,
    ShowStacks,
    as_problem,
)
from ..rendezvous.protocol import ProtocolError
from . import stay
from .agent_job import AgentJob
from .effects import (
    DoubtRank0,
    Effect,
    Execute,
    QuestionPeers,
    ReleaseReads,
    Reply,
    Report,
    Say,
    Stop,
)
from .facts import Facts, KeyWait
from .messages import (
    Abort,
    CountReads,
    Done,
    Exited,
    Failing,
    Locate,
    Probe,
    Register,
    StopAt,
    Terminating,
)
from .rank_0_link import Rank0Link
from .root_cause import RankState, RootCause, from_disconnect, from_exit

_NO_REPORTS = "no reports"  # the topic of the line that rank 0 has ended well
_NO_ANSWER = "it did not answer any more"
_NO_WAIT = KeyWait(
    Key(""),
    until=inf,
    reply=lambda _: None,
)
_LOOK = "look at the output of rank 0"
# What rank 0's job asks of every agent
_EXECUTED = (CountReads, Done, Locate, Probe, ShowStacks, StopAt)


class Follower(AgentJob):
    """What an agent knows of its own ranks and of rank 0. Times are those of `time.monotonic`."""

    def __init__(self, facts: Facts, link: Rank0Link) -> None:
        super().__init__(facts)
        self.link = link
        self._rank_0 = facts.members[0]
        self._effects: list[Effect] = []
        self._abort: Abort | None = None  # the first one of rank 0
        # By rank, why rank 0 failed before the script was ready itself
        self._not_begun: dict[int, Failed] = {}
        # Of our own ranks; any other message is sent on as it is
        self._own: dict[type, Callable[[RankState, Any, float], object]] = {
            Arrive: self._ask,
            Ready: self._ask,
            AskStacks: self._ask_stacks,
            Exited: self._exited,
            Register: self._registered,
            RequestStop: self._stop_requested,
            Failing: self._failing,
            Terminating: self._terminating,
        }
        self._of_rank_0: dict[type, Callable[[int, Any, float], object]] = {
            **dict.fromkeys(_EXECUTED, lambda _, message, __: self._emit(Execute(message))),
            Go: self._begin,
            Release: lambda rank, message, _: self._emit(Reply(rank, message)),
            Failed: self._failed,
            Register: self._rank_0_registered,
            Abort: self._aborted,
        }

    # Events

    def take(
        self,
        rank: int,
        message: object,
        now: float,
    ) -> list[Effect]:
        """A rank of ours says something."""
        handle = self._own.get(type(message))
        if handle is None:
            self._emit(Report(rank, message))
        else:
            handle(self.facts.members[rank], message, now)
        return self._emitted()

    def told(
        self,
        rank: int,
        message: object,
        now: float,
    ) -> list[Effect]:
        """Rank 0's agent says something to a rank; `ProtocolError`: it must not say that."""
        handle = self._of_rank_0.get(type(message))
        if handle is None:
            raise ProtocolError(f"sends {type(message).__name__}, which only another rank may")
        handle(rank, message, now)
        return self._emitted()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        late = [rank for rank, wait in self.facts.waits.items() if now >= wait.until]
        self._answer_for_rank_0(late, now)
        return self._emitted()

    def due(self) -> float:
        """When `tick` is to be called next."""
        ends = [wait.until for wait in self.facts.waits.values()]
        return min(ends, default=inf)

    def stays_until(self) -> float:
        """Until when the agent waits for other ranks, once its own have ended."""
        return stay.of_others(self.facts, self.link)

    def left(self, message: Detach) -> list[Effect]:
        """Rank 0 leaves the job, which is no failure; `gone` follows."""
        why = "rank 0 has exited"
        if message.gave_up:
            why = "the agent of rank 0 has given up"
        has_reason = message.ended or message.gave_up
        is_early = has_reason and bool(self.facts.running())
        if is_early:
            text = f"{why}; failures of other ranks are no longer reported"
            self._emit(Say(text, topic=_NO_REPORTS))
        return self._emitted()

    def lost(self, why: str, now: float) -> list[Effect]:
        """Rank 0's agent is lost, and rank 0 with it; `gone` follows."""
        has_to_stop = self.facts.may_restart or bool(self.facts.running())
        is_open = self.facts.detects and self.facts.cause is None
        if has_to_stop and is_open:
            self._lose_rank_0(why, now)
        return self._emitted()

    def silent(self, now: float, when: str) -> list[Effect]:
        """Rank 0's host does not answer at all, though it should: it counts as lost."""
        self._lose_rank_0(f"{_NO_ANSWER}{when}", now)
        return self._emitted()

    def unreachable(self, why: str, now: float) -> list[Effect]:
        """Rank 0's agent does not answer, though its host does."""
        text = f"warning: {self.name} {why}; this rank continues without failure detection until"
        self._emit(Say(f"{text} it answers again"))
        self._show(f"rank 0, which has asked all ranks, {self.link.absence(now)}")
        return self._emitted()

    def gone(self, now: float) -> list[Effect]:
        """Rank 0 cannot be asked any more."""
        self._show("rank 0, which has asked all ranks, is no longer there")
        self._emit(ReleaseReads())
        self._answer_for_rank_0(self.facts.waits, now)
        return self._emitted()

    @property
    def name(self) -> str:
        """Rank 0, for people."""
        return f"rank 0 {self._rank_0.where}"

    # Messages of our own ranks

    def _registered(
        self,
        member: RankState,
        message: Register,
        _: float,
    ) -> None:
        member.pid = message.pid
        told = replace(message, detects=self.facts.settings.detects)
        self._emit(Report(member.rank, told))

    def _stop_requested(
        self,
        member: RankState,
        message: RequestStop,
        _: float,
    ) -> None:
        if self.link.is_there:
            self._emit(Report(member.rank, message))
        else:
            self._emit(Execute(StopAt(1)))

    def _failing(
        self,
        member: RankState,
        message: Failing,
        _: float,
    ) -> None:
        if not message.end.cause:
            member.failing = message.end
        if self.facts.detects:
            self._emit(Report(member.rank, message))

    def _terminating(
        self,
        member: RankState,
        message: Terminating,
        _: float,
    ) -> None:
        if self.facts.detects:
            self._emit(QuestionPeers())
            self._emit(Report(member.rank, message))

    def _exited(
        self,
        member: RankState,
        message: Exited,
        now: float,
    ) -> None:
        end = message.end
        member.end = end
        self.facts.ends.ended_at = now
        self._emit(Report(member.rank, message))
        if not self.facts.detects or self.facts.cause is not None:
            return
        if end.is_failure and self.link.is_cut_off:  # for its neighbors
            self._stop(from_exit(member, end, 0.0), now)
        elif not end.succeeded:
            self._emit(DoubtRank0())  # which will not say why, if it is gone

    def _ask_stacks(
        self,
        member: RankState,
        message: AskStacks,
        now: float,
    ) -> None:
        self._emit(Report(member.rank, message))
        if self.link.is_cut_off:
            self._show(f"rank 0, which would ask all ranks, {self.link.absence(now)}")

    def _ask(
        self,
        member: RankState,
        message: Arrive | Ready,
        now: float,
    ) -> None:
        """Pass on that the script of a rank waits, and make sure that it gets an answer."""
        rank = member.rank
        before = self._not_begun.get(rank)
        if before is not None and before.key in (None, message.key):
            self._answer_failed(rank, before)
        elif self.link.is_there:
            self._emit(Report(rank, message))
        else:
            self._answer_for_rank_0([rank], now)

    # Messages of rank 0's agent

    def _rank_0_registered(
        self,
        _rank: int,
        message: Register,
        _: float,
    ) -> None:
        self._rank_0.pid = message.pid

    def _aborted(
        self,
        _rank: int,
        message: Abort,
        now: float,
    ) -> None:
        self._abort = self._abort or message
        self._stop(message.root_cause.escaped(), now)

    def _begin(
        self,
        _rank: int,
        message: Go,
        _: float,
    ) -> None:
        """All ranks are ready."""
        self.facts.is_starting = False
        self._emit(Execute(message))

    def _failed(
        self,
        rank: int,
        message: Failed,
        _: float,
    ) -> None:
        """A failure that names no key is for all ranks of this agent, those that wait later, too."""
        if message.key is not None:
            self._answer_failed(rank, message)
            return
        self._not_begun = {member.rank: message for member in self.facts.own}
        for each in {rank, *self.facts.waits}:
            self._answer_failed(each, message)

    # Answers to scripts that wait at a key

    def _answer_failed(self, rank: int, message: Failed) -> None:
        self._keep_failed_start(rank, message)
        message = self._with_name_of_rank_0(rank, message)
        self._emit(Reply(rank, message))

    def _waits_at(self, rank: int) -> Key:
        wait = self.facts.waits.get(rank, _NO_WAIT)
        return wait.key

    def _keep_failed_start(self, rank: int, message: Failed) -> None:
        """The script of a rank may not wait for it yet."""
        key = message.key
        is_of_start = key is not None and key.name == READY
        if is_of_start and key != self._waits_at(rank):
            self._not_begun[rank] = message

    def _with_name_of_rank_0(self, rank: int, message: Failed) -> Failed:
        """A failure of the start as the script is told."""
        waits_at = self._waits_at(rank)
        if waits_at.name != READY or message.key not in (None, waits_at):
            return message
        code, text, hint = message.problem
        text = said_by("rank 0", text)[:LONGEST_TEXT]
        return replace(message, problem=(code, text, hint))

    def _answer_for_rank_0(self, ranks: Iterable[int], now: float) -> None:
        """Rank 0 cannot say what becomes of the keys at which these ranks wait."""
        why = f"{self.name} {self.link.absence(now)}"
        for rank in ranks:
            key = self.facts.waits[rank].key
            error = DistbootError("missing-rank", f"{key.text}: {why}", _LOOK)
            if self.facts.is_starting:
                error = DistbootError("rank-failed", f"all ranks joined, and then {why}", _LOOK)
            failed = Failed(as_problem(error), key)
            self._emit(Reply(rank, failed))

    # Effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _emitted(self) -> list[Effect]:
        effects = self._effects
        self._effects = []
        return effects

    def _show(self, line: str) -> None:
        """Answer all that wait for the stacks of all ranks."""
        self._emit(Execute(ShowStacks((line,))))

    def _stop(self, cause: RootCause, now: float) -> None:
        self.facts.conclude(cause, now)
        self._emit(Stop(cause, self._abort))

    def _lose_rank_0(self, why: str, now: float) -> None:
        cause = from_disconnect([self._rank_0], why)
        self._stop(replace(cause, restarts=self.facts.may_restart), now)
