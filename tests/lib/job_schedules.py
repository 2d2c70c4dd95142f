"""Rank 0's job under random schedules of events: what has to hold in any order.

A *plan* has what the job is like, and its events, each a kind, a rank and a number. One generator, `plan_of`, makes it
out of choices. These are hypothesis's in the tests, which shrinks a plan that fails. In `make schedules` they are those
of `random.Random(seed)`, and the seed is the number of the schedule: it makes the same plan on every machine.

`Schedule` lets the events of a plan happen. One that cannot be now, such as a message of a rank whose agent is gone, is
left out. Ranks keep the order of a script: they wait at one key at a time, and end once. Where a plan is not `orderly`
they do not, as a message of any peer may come at any time; then the job may refuse a message with `ProtocolError`.

`job_checks` has what holds after each event, and once all ranks have ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple, TypeVar

from hypothesis import strategies as st
from job_checks import AFTER_ALL, RANKS, Round
from job_rows import (
    GREETED,
    SETTINGS,
    STARTING,
    Abandon,
    Cut,
    Event,
    Greet,
    Lose,
    Mend,
    Orphan,
    PureJob,
    Return,
    Rounds,
    Setup,
    Take,
    Wait,
)
from supervised import raised

from distboot.job.exit_status import ExitStatus
from distboot.job.messages import (
    Exited,
    Exiting,
    Failing,
    NodeSeen,
    Phases,
    Position,
    Probeable,
    Probed,
    Reads,
    Reaped,
    Register,
    SeparateModel,
    Stalled,
    Terminating,
)
from distboot.job.stacks import Stacks, frame
from distboot.rendezvous.messages import (
    BARRIER,
    LOCAL_MAIN_FIRST,
    MAIN_FIRST,
    SERVE,
    Arrive,
    AskStacks,
    Detach,
    Key,
    Leave,
    Ready,
    RequestStop,
)
from distboot.rendezvous.protocol import ProtocolError

NUMBERS = 40
MOST_EVENTS = 100
USUAL_EVENTS = 25  # on average, of those drawn
KEY_TIMEOUT = 60.0  # seconds, at the most
_MOST_STEPS = 200  # of the job after the last event
# Seconds: an agent may return for 3, and a key that fails is answered 5 later, as that may be explained
_REFUSED_AFTER = 9.0
_LONG_IN_A_WAIT = 40  # the number for that, see `Schedule._position`

NODES = (((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),), ((0,), (1, 2, 3)))
# Ranks that are ready; scripts that may call `init()`, below the wrapper; and ranks in `init()`
PHASES = (Setup(), Setup(), Setup(has_begun=False), STARTING)
SELDOM = (False, False, False, False, False, True)
CHECKS = ("off", "warn", "stop")
RESTARTS = (None, None, 0, 2)
HANGS = (None, None, 30.0)
ENDS = (
    ExitStatus(code=0, when=1.0),
    ExitStatus(code=0, when=1.0),
    ExitStatus(code=3, when=1.0),
    ExitStatus(code=78, when=1.0),
    ExitStatus(code=143, when=1.0),
    ExitStatus(signal=9, when=1.0),
    ExitStatus(signal=6, crash="Fatal Python error: Aborted", when=1.0),
    ExitStatus(signal=15, external_signal=15, when=1.0),
    ExitStatus(when=1.0),
    ExitStatus(signal=15, stopped_by_us=True, when=1.0),  # only if the job has a cause
)
TIMEOUT = raised("RuntimeError: Timed out waiting 8000ms for recv operation to complete")
RAISES = (
    raised("ValueError: boom", "train.py:7", when=1.0),
    raised("RuntimeError: Connection closed by peer [10.0.0.1]:3456"),
    TIMEOUT,
    raised("RuntimeError: CUDA error: an uncorrectable ECC error was encountered"),
)
STACKS = (
    Stacks((frame("all_reduce", "/x/torch/distributed/distributed_c10d.py", 1),)),
    Stacks((frame("all_reduce", "/x/torch/distributed/distributed_c10d.py", 1),)),
    Stacks((frame("load_batch", "/job/train.py", 7),)),
    Stacks(state="stopped by a signal"),
    None,
)
SEEN = (
    NodeSeen({"free memory": 9e11}),
    NodeSeen({"free memory": 9e11}),
    NodeSeen({"free memory": 3e9}, problems=("accelerator 3 is slowed down: heat",)),
    NodeSeen(),
)
SEPARATE = (SeparateModel("no group"), SeparateModel("no collective"), SeparateModel(""))
PROBED = (Probed(0, 0.0002, 12e9), Probed(0, 0.0002, 12e9), Probed(0, 0.05, 1e7))
NOT_PROBED = Probed(0, problem="no answer in time")
PROBLEM = ("device-failed", "no driver", "")
SECONDS = (0.01, 0.05, 0.12, 0.3, 0.6, 1.0, 1.5, 2.0, 3.1, 5.1, 8.5, 10.0, 20.0, 31.0, 61.0, 130.0)

T = TypeVar("T")
Observe = Callable[[Event, list[str]], object]
One = tuple[str, int, int]  # what happens, to which rank, and a number that says how


class Plan(NamedTuple):
    """All of a schedule."""

    setup: Setup
    is_orderly: bool
    events: Sequence[One]


def plan_of(choose: Callable[[int], int]) -> Plan:
    """A plan; `choose` returns a number below the one that it is given."""

    def choice(values: Sequence[T]) -> T:
        return values[choose(len(values))]

    setup = choice(PHASES)._replace(
        nodes=choice(NODES),
        is_by_node=choice(SELDOM),
        has_registered=not choice(SELDOM),
        is_held=choice(SELDOM),
        is_served=choice(SELDOM),
        most_restarts=choice(RESTARTS),
    )
    check = "off" if setup.has_begun else choice(CHECKS)
    settings = SETTINGS._replace(
        check=check,
        hang_after=choice(HANGS),
        detects=not choice(SELDOM),
    )
    setup = setup._replace(settings=settings)
    is_orderly = not choice(SELDOM)
    events: list[One] = []
    while len(events) < MOST_EVENTS and choose(USUAL_EVENTS):
        one = (choice(KINDS), choice(RANKS), choose(NUMBERS))
        events.append(one)
    return Plan(setup, is_orderly, events)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return plan_of(lambda count: draw(st.integers(0, count - 1)))


def plan_of_seed(seed: int) -> Plan:
    return plan_of(random.Random(seed).randrange)


def follow(plan: Plan, observe: Observe = lambda _event, _effects: None) -> Schedule:
    """Let a plan happen, and all ranks end; `observe` is called with each event and its effects."""
    schedule = Schedule(plan, observe)
    for one in plan.events:
        schedule.follow(*one)
    schedule.end()
    return schedule


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """A plan with fewer events that fails as well: none of them can be left out."""
    index = 0
    while index < len(plan.events):
        shorter = plan._replace(events=[*plan.events[:index], *plan.events[index + 1 :]])
        if fails(shorter):
            plan = shorter
        else:
            index += 1
    return plan


class Schedule:
    """The rounds of a job, event by event."""

    def __init__(self, plan: Plan, observe: Observe) -> None:
        self._observe = observe
        self.happened: list[Event] = []
        self.lines: list[str] = []  # all effects
        self._setup = plan.setup
        self._is_orderly = plan.is_orderly
        self._rounds: Rounds | None = None
        if plan.setup.most_restarts is not None:
            self._rounds = Rounds(plan.setup.most_restarts)
        self._begin_round(0.0)

    def follow(self, kind: str, rank: int, number: int) -> None:
        """Let an event happen, if it can."""
        is_of_rank, happens = _HAPPENS[kind]
        if not is_of_rank or self._speaks(rank):
            happens(self, rank, number)

    def end(self) -> None:
        """Let all ranks end, in as many rounds as there are."""
        self._end_round()
        while self._may_begin_round():
            self._begin_next_round()
            self._end_round()

    # Rounds

    def _begin_round(self, now: float) -> None:
        setup = self._setup
        job = PureJob(setup, self._rounds, now)
        begun = set(RANKS) if setup.has_begun else set()
        registered = set(RANKS) if setup.has_registered else set()
        self._round = Round(job, self._is_orderly, registered, begun, Counter(begun))

    def _begin_next_round(self) -> None:
        assert self._rounds is not None
        self._rounds.begin()
        self._begin_round(self._round.job.now)

    def _may_begin_round(self) -> bool:
        cause = self._round.facts.cause
        return cause is not None and cause.restarts

    def _end_round(self) -> None:
        """Let keys time out and agents return no more, let all ranks end, and let time pass."""
        round_ = self._round
        self._pass(_REFUSED_AFTER)
        if self._is_orderly:
            round_.check_waits()
        self._pass(AFTER_ALL)
        there = set(RANKS) - round_.absent - round_.away.keys()
        waiting = there.intersection(round_.waits)
        assert not (self._is_orderly and waiting), f"ranks {waiting} wait beyond their timeouts"
        end = ENDS[0 if round_.facts.cause is None else -1]
        for rank in sorted(there):
            round_.ended.add(rank)
            self._say(rank, Exited(end))
        self._pass(AFTER_ALL)
        round_.check_end()

    def _pass(self, seconds: float) -> None:
        """Let time pass as for the loop of an agent, which wakes up whenever something is due."""
        job = self._round.job
        end = job.now + seconds
        for _ in range(_MOST_STEPS):
            due = min([job.job.due(), *self._round.away.values()])
            if due > end:
                break
            self._happen(Wait(max(due - job.now, 0.0)))
        else:
            raise AssertionError("something is always due")
        self._happen(Wait(max(end - job.now, 0.0)))

    # What ranks can do

    def _speaks(self, rank: int) -> bool:
        """Whether a message of a rank can arrive now."""
        if rank in self._round.gone or rank in self._round.away:
            return False
        return not self._is_orderly or rank not in self._round.ended

    def _may_ask(self, rank: int) -> bool:
        """Whether the script of a rank can come to a key: it waits at one at a time."""
        return not self._is_orderly or rank not in self._round.waits

    def _say(self, rank: int, message: object) -> None:
        self._happen(Take(rank, message))

    def _say_once(self, rank: int, message: object, those: set[int]) -> None:
        if rank not in those or not self._is_orderly:
            those.add(rank)
            self._say(rank, message)

    def _register(self, rank: int, number: int) -> None:
        message = Register(100 + rank, detects=number % 8 != 7)
        self._say_once(rank, message, self._round.registered)

    def _arrive(self, rank: int, number: int, name: str, node: int | None = None) -> None:
        round_ = self._round
        if self._may_ask(rank) and (rank in round_.in_context or not self._is_orderly):
            round_.arrivals[rank, name] += 1
            key = Key(name, node, round_.arrivals[rank, name])
            limit = KEY_TIMEOUT - number % 5 * 10
            leader = self._setup.membership.leader(node)
            leads = name != BARRIER and rank == leader
            failure = "no disk" if leads and number % 4 == 3 else None
            round_.waits[rank] = key
            if leads:
                round_.led[key.place] = key.count
            self._say(rank, Arrive(key, limit, leads=leads, failure=failure))

    def _arrive_locally(self, rank: int, number: int) -> None:
        node = self._setup.membership.node_of()[rank]
        self._arrive(rank, number, LOCAL_MAIN_FIRST, node)

    def _arrive_all(self, _rank: int, number: int) -> None:
        for rank in RANKS:
            if self._speaks(rank):
                self._arrive(rank, number, BARRIER)

    def _get_ready(self, rank: int, number: int) -> None:
        round_ = self._round
        if self._may_ask(rank) and (rank not in round_.in_context or not self._is_orderly):
            round_.readied[rank] += 1
            round_.left.discard(rank)
            message = Ready(
                device=f"gpu {number % 3}" if number % 9 == 8 else None,
                offer=f"offer {rank}" if number % 2 else None,
                problem=PROBLEM if number == NUMBERS - 1 else None,
                framework="jax" if number % 16 == 15 else "torch",
                count=round_.readied[rank],
                limit=KEY_TIMEOUT,
            )
            round_.waits[rank] = message.key
            self._say(rank, message)

    def _get_ready_all(self, _rank: int, _number: int) -> None:
        for rank in RANKS:
            if self._speaks(rank):
                self._get_ready(rank, 0)

    def _begin_again(self, rank: int, number: int) -> None:
        """All ranks close their contexts, and call `init()` once more."""
        for each in RANKS:
            if self._speaks(each):
                self._close_context(each, number)
        self._get_ready_all(rank, number)

    def _close_context(self, rank: int, _number: int) -> None:
        round_ = self._round
        if not self._is_orderly or (rank in round_.in_context and rank not in round_.waits):
            round_.in_context.discard(rank)
            round_.left.add(rank)
            self._say(rank, Leave())

    def _fail(self, rank: int, number: int) -> None:
        end = RAISES[number % len(RAISES)]
        self._say_once(rank, Failing(end), self._round.failing)

    def _exit(self, rank: int, number: int) -> None:
        end = ENDS[number % len(ENDS)]
        if end.stopped_by_us and self._round.facts.cause is None:
            return
        is_reaped = number % 3 != 2
        if not is_reaped:
            self._round.unreaped.add(rank)
        self._round.ended.add(rank)
        self._round.waits.pop(rank, None)
        self._say(rank, Exited(end, is_reaped))

    def _reap(self, rank: int, _number: int) -> None:
        round_ = self._round
        is_there = rank not in round_.gone and rank not in round_.away
        if is_there and (rank in round_.unreaped or not self._is_orderly):
            round_.unreaped.discard(rank)
            self._say(rank, Reaped())

    def _terminate(self, rank: int, number: int) -> None:
        number_of_signal = (15, 15, 2, 10)[number % 4]
        self._say(rank, Terminating(number_of_signal, of_wrapper=number % 8 > 3))

    def _read_all(self, _rank: int, number: int) -> None:
        for rank in RANKS:
            if self._speaks(rank):
                self._say(rank, Reads(number + rank))

    def _position(self, rank: int, number: int, question: int, late: int) -> None:
        """How far a rank is; one is behind the others."""
        is_late = rank == late
        counts = {"0": 9 - is_late} if number % 4 != 3 else {}
        stacks = STACKS[2] if is_late else STACKS[number % len(STACKS)]
        since = SECONDS[-(1 + number % 8)]
        idle = since if number % 2 else 0.0
        self._say(rank, Position(question, since, counts, 0, 0, stacks, idle))

    def _be_somewhere(self, rank: int, number: int) -> None:
        question = (0, self._round.located, self._round.located, 1)[number % 4]
        self._position(rank, number // 4, question, late=number % 5)

    def _be_somewhere_all(self, rank: int, number: int) -> None:
        question = self._round.located
        for each in RANKS:
            if self._speaks(each):
                self._position(each, number, question, late=rank)

    def _hang(self, rank: int, number: int) -> None:
        """All wait for a rank, and answer what they are asked, for some seconds; or one fails of that first."""
        waiting = (rank + 1) % len(RANKS)
        if self._speaks(waiting):
            if number % 2:
                self._fail(waiting, RAISES.index(TIMEOUT))
            else:
                self._say(waiting, Stalled())
        for _ in range(number % 8):
            self._be_somewhere_all(rank, _LONG_IN_A_WAIT)
            self._happen(Wait(1.0))
            for witness in RANKS:
                if self._speaks(witness):
                    self._position(witness, _LONG_IN_A_WAIT, 0, late=rank)

    def _see_nodes(self, _rank: int, number: int) -> None:
        """All nodes wait for their neighbors, and are seen."""
        for first, *_ in self._setup.nodes:
            if self._speaks(first):
                self._say(first, Probeable(4000 + first, "token"))
                self._say(first, SEEN[(number + first) % len(SEEN)])

    def _probe_links(self, _rank: int, number: int) -> None:
        """All that were asked to probe a link answer."""
        for rank in sorted(self._round.probes):
            self._probe(rank, number + rank)

    def _probe(self, rank: int, number: int) -> None:
        asked = self._round.probes.pop(rank, 1)
        found = PROBED[number % len(PROBED)]
        if number % 7 == 6:
            found = NOT_PROBED
        if self._speaks(rank):
            self._say(rank, Probed(asked, found.round_trip, found.rate, problem=found.problem))

    # What happens to their agents; rank 0's is this one

    def _others(self, rank: int) -> tuple[int, ...]:
        """The ranks of another agent; none where that is rank 0's."""
        ranks = self._round.job.ranks_with(rank)
        return () if 0 in ranks else ranks

    def _detach(self, rank: int, _number: int) -> None:
        ranks = self._others(rank)
        if ranks:
            self._leave_for_good(ranks)
            self._say(rank, Detach())

    def _abandon(self, rank: int, _number: int = 0) -> None:
        ranks = self._others(rank)
        if ranks:
            self._leave_for_good(ranks)
            self._happen(Abandon(rank))

    def _leave_for_good(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._round.gone.add(rank)
            self._round.away.pop(rank, None)
            self._round.waits.pop(rank, None)

    def _lose(self, rank: int, number: int) -> None:
        round_ = self._round
        ranks = self._others(rank)
        if not ranks or rank in round_.gone or rank in round_.away:
            return
        gave_up = rank in round_.cut and number % 4 == 3
        if round_.ended.issuperset(ranks):
            self._leave_for_good(ranks)
        else:
            until = inf if gave_up else self._may_return_until(rank)
            round_.away.update(dict.fromkeys(ranks, until))
        self._happen(Lose(rank, gave_up))

    def _may_return_until(self, rank: int) -> float:
        round_ = self._round
        return round_.job.now + round_.job.seconds_to_return(rank)

    def _greet(self, _rank: int, _number: int) -> None:
        round_ = self._round
        until = round_.job.now + GREETED
        for rank, end in round_.away.items():
            round_.away[rank] = max(end, until)
        self._happen(Greet())

    def _return(self, rank: int, _number: int) -> None:
        round_ = self._round
        if rank in round_.away:
            ranks = self._others(rank)
            for each in ranks:
                del round_.away[each]
            round_.cut.difference_update(ranks)
            self._happen(Return(rank))

    def _cut(self, rank: int, _number: int) -> None:
        ranks = self._others(rank)
        is_running = not self._round.ended.issuperset(ranks)
        if ranks and is_running and not self._round.cut.intersection(ranks):
            self._round.cut.update(ranks)
            self._happen(Cut(rank))

    def _mend(self, rank: int, _number: int) -> None:
        ranks = self._others(rank)
        if self._round.cut.intersection(ranks) and rank not in self._round.gone:
            self._round.cut.difference_update(ranks)
            self._happen(Mend(rank))

    def _orphan(self, rank: int, _number: int) -> None:
        self._round.failing.update(self._round.job.ranks_with(rank))
        self._happen(Orphan(rank))

    def _next_round(self, _rank: int, _number: int) -> None:
        if self._may_begin_round():
            self._end_round()
            self._begin_next_round()

    # What happens

    def _happen(self, event: Event) -> None:
        round_ = self._round
        if isinstance(event, Wait):
            self._round.check_not_before(event.seconds)
        self.happened.append(event)
        lines: list[str] = []
        try:
            lines = round_.job.after(event)
        except ProtocolError:
            assert not self._is_orderly, "an orderly rank is refused"
            assert isinstance(event, Take)
            self._abandon(event.rank)
            return
        finally:
            self._observe(event, lines)
        self.lines += lines
        self._forget_lost()
        round_.check(event, round_.job.effects)

    def _forget_lost(self) -> None:
        """An agent that has not returned in time is gone."""
        round_ = self._round
        lost = [rank for rank, end in round_.away.items() if round_.job.now >= end]
        self._leave_for_good(lost)


def _wait(schedule: Schedule, _rank: int, number: int) -> None:
    schedule._happen(Wait(SECONDS[number % len(SECONDS)]))


def _wait_until_due(schedule: Schedule, _rank: int, _number: int) -> None:
    """As long as the loop of the agent sleeps, at the most."""
    job = schedule._round.job
    schedule._happen(Wait(max(min(job.job.due() - job.now, AFTER_ALL), 0.0)))


def _saying(message_of: Callable[[int], object]) -> Callable[[Schedule, int, int], None]:
    return lambda schedule, rank, number: schedule._say(rank, message_of(number))


def _arriving(name: str) -> Callable[[Schedule, int, int], None]:
    return lambda schedule, rank, number: schedule._arrive(rank, number, name)


def _exiting(schedule: Schedule, rank: int, _number: int) -> None:
    schedule._say_once(rank, Exiting(), schedule._round.exiting)


_OF_RANK = True  # it needs a rank that speaks
_OF_ANY = False
# What happens: how often, by itself; whether it needs a rank that speaks; and how it does
_TABLE: tuple[tuple[str, int, bool, Callable[[Schedule, int, int], None]], ...] = (
    ("arrives", 3, _OF_RANK, _arriving(BARRIER)),
    ("all arrive", 1, _OF_ANY, Schedule._arrive_all),
    ("comes to main_first", 2, _OF_RANK, _arriving(MAIN_FIRST)),
    ("comes to local_main_first", 1, _OF_RANK, Schedule._arrive_locally),
    ("serves", 1, _OF_RANK, _arriving(SERVE)),
    ("closes its context", 1, _OF_RANK, Schedule._close_context),
    ("gets ready", 2, _OF_RANK, Schedule._get_ready),
    ("all get ready", 1, _OF_ANY, Schedule._get_ready_all),
    ("all begin again", 1, _OF_ANY, Schedule._begin_again),
    ("registers", 1, _OF_RANK, Schedule._register),
    ("has taken steps", 1, _OF_RANK, _saying(lambda number: Phases({"import": 1.0 + number}))),
    ("raises", 2, _OF_RANK, Schedule._fail),
    ("is about to end", 1, _OF_RANK, _exiting),
    ("ends", 2, _OF_RANK, Schedule._exit),
    ("is reaped", 1, _OF_ANY, Schedule._reap),
    ("is terminated", 1, _OF_RANK, Schedule._terminate),
    ("asks to stop", 1, _OF_RANK, _saying(lambda number: RequestStop("USR1", number % 2 == 0))),
    ("has read", 1, _OF_RANK, _saying(Reads)),
    ("all have read", 1, _OF_ANY, Schedule._read_all),
    ("has stalled", 2, _OF_RANK, _saying(lambda _: Stalled())),
    ("trains apart", 1, _OF_RANK, _saying(lambda number: SEPARATE[number % len(SEPARATE)])),
    ("is at", 2, _OF_RANK, Schedule._be_somewhere),
    ("all are at", 2, _OF_ANY, Schedule._be_somewhere_all),
    ("all wait for it", 2, _OF_ANY, Schedule._hang),
    ("asks for stacks", 1, _OF_RANK, _saying(lambda _: AskStacks())),
    ("all nodes are seen", 1, _OF_ANY, Schedule._see_nodes),
    ("node is seen", 1, _OF_RANK, _saying(lambda number: SEEN[number % len(SEEN)])),
    ("probes", 1, _OF_RANK, Schedule._probe),
    ("all probe", 2, _OF_ANY, Schedule._probe_links),
    ("detaches", 1, _OF_RANK, Schedule._detach),
    ("is abandoned", 1, _OF_RANK, Schedule._abandon),
    ("is lost", 2, _OF_ANY, Schedule._lose),
    ("greets", 1, _OF_ANY, Schedule._greet),
    ("returns", 2, _OF_ANY, Schedule._return),
    ("does not answer", 1, _OF_RANK, Schedule._cut),
    ("answers again", 1, _OF_RANK, Schedule._mend),
    ("is orphaned", 1, _OF_RANK, Schedule._orphan),
    ("next round", 1, _OF_ANY, Schedule._next_round),
    ("time passes", 4, _OF_ANY, _wait),
    ("until it is due", 4, _OF_ANY, _wait_until_due),
)
KINDS = tuple(kind for kind, often, _, _ in _TABLE for _ in range(often))
_HAPPENS = {kind: (is_of_rank, happens) for kind, _, is_of_rank, happens in _TABLE}
