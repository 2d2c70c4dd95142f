"""What rank 0 decides, as rows of events and effects: who failed first, who waits for whom, at which read all stop."""

from collections.abc import Callable, Sequence

import pytest
from job_rows import (
    SETTINGS,
    STARTING,
    USUAL,
    Cut,
    Event,
    JobOfRank0,
    Lose,
    PureJob,
    Return,
    Row,
    Setup,
    Take,
    Wait,
)
from supervised import raised

from distboot.job.effects import Remind, Tell
from distboot.job.exit_status import ExitStatus
from distboot.job.messages import (
    Exited,
    Exiting,
    Failing,
    NodeSeen,
    Position,
    Probeable,
    Probed,
    Reads,
    Reaped,
    Register,
    Stalled,
    Terminating,
)
from distboot.job.stacks import Stacks, frame
from distboot.rendezvous.messages import (
    BARRIER,
    MAIN_FIRST,
    Arrive,
    AskStacks,
    Detach,
    Key,
    Leave,
    Ready,
    RequestStop,
)

KILLED = ExitStatus(signal=9, when=1.0)
WELL = ExitStatus(code=0, when=1.0)
TERMINATED = ExitStatus(signal=15, when=1.0)
HUNG_UP = ExitStatus(signal=1, when=1.0)
ORPHANED = ExitStatus(cause="its launcher is gone: horovodrun (process 7)", when=1.0)
CODE_3 = ExitStatus(code=3, when=1.0)
CODE_143 = ExitStatus(code=143, when=1.0)  # with which a script asks to be started again
BUG = raised("ValueError: boom", "train.py:7", when=1.0)
PEER_CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:3456"
OF_A_PEER = raised(PEER_CLOSED)
TIMEOUT = raised("RuntimeError: Timed out waiting 8000ms for recv operation to complete")
NO_DRIVER = ("device-failed", "no driver", "")
SIGTERM = 15
SIGINT = 2
RANK_2_IS_KILLED = (
    "say: rank 2 failed first: killed by SIGKILL (out of memory, or kill -9), on host-1"
)
KILLED_AND_TOLD = [
    RANK_2_IS_KILLED,
    "all <- Abort",
    "record: exited 2",
    "record: root_cause 2",
    "conclude: rank 2",
]
CAME_LATE = "error[missing-rank]: barrier(): rank 1 timed out after 5 s waiting for this one"
RANK_3_LOST_A_PEER = (
    "say: rank 3 failed first, because a peer disconnected: "
    f"uncaught exception: {PEER_CLOSED}, on host-1"
)
RANK_1_ENDED_EARLY = (
    "say: rank 1 exited with code 0 while 3 other ranks were still training, on host-0; "
    "then rank 3 failed, because a peer disconnected"
)
NODE_IS_LOST = (
    "say: ranks 2-3 became unreachable first: the connection closed without an exit report, "
    "on host-1 (node 1)"
)
STOPS_AT_44 = "say: rank 3 was asked to stop (SIGUSR1): all ranks stop at read 44 of ctx.preempted"
RANK_3_IS_LATE = (
    "say: waiting for rank 3 (host-1) for 71 s: it is in load_batch (train.py:7); "
    "ranks 0-2 wait in all_reduce (train.py:7), collective operation 9, rank 3 has begun 8\n"
    "  | rank 3: load_batch (train.py:7)\n"
    "  | ranks 0-2: all_reduce (train.py:7)"
)
NOTHING: Sequence[str] = ()


def fails(rank: int, end: ExitStatus) -> Event:
    return Take(rank, Failing(end))


def exits(rank: int, end: ExitStatus) -> Event:
    return Take(rank, Exited(end))


def is_about_to_end(rank: int) -> Event:
    return Take(rank, Exiting())


def is_terminated(rank: int) -> Event:
    return Take(rank, Terminating(SIGTERM))


def is_interrupted(rank: int) -> Event:
    return Take(rank, Terminating(SIGINT))


def arrives(rank: int, name: str = BARRIER, limit: float = 60.0) -> Event:
    return Take(rank, Arrive(Key(name), limit))


def leads(rank: int, failure: str | None = None) -> Event:
    return Take(rank, Arrive(Key(MAIN_FIRST), 60.0, leads=True, failure=failure))


def has_read(rank: int, count: int) -> Event:
    return Take(rank, Reads(count))


def is_at(rank: int, question: int, operations: int, place: str, since: float = 70.0) -> Event:
    stacks = Stacks((frame(place, "/job/train.py", 7),))
    return Take(
        rank,
        Position(
            question,
            since,
            {"0": operations},
            0,
            0,
            stacks,
        ),
    )


FIRST_FAILURE: dict[str, list[Row]] = {
    "a rank that is killed is named, and what follows is not": [
        (
            exits(2, KILLED),
            [
                RANK_2_IS_KILLED,
                "all <- Abort",
                "record: exited 2",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
        (exits(3, KILLED), ["record: exited 3"]),
        (exits(0, WELL), ["record: exited 0"]),
    ],
    "an exception that speaks of a peer waits for that peer": [
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (
            exits(2, KILLED),
            [
                RANK_2_IS_KILLED,
                "all <- Abort",
                "record: exited 2",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
    ],
    "a rank that is about to end may be that peer": [
        (is_about_to_end(2), NOTHING),
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (Wait(1), NOTHING),
        (
            exits(2, CODE_3),
            [
                "say: rank 2 failed first: exit code 3, on host-1",
                "all <- Abort",
                "record: exited 2",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
    ],
    "a node is lost with all of its ranks": [
        (Lose(2), ["record: unreachable 2"]),
        (Lose(3), ["record: unreachable 3"]),
        (
            Wait(1),
            [
                NODE_IS_LOST,
                "all <- Abort",
                "record: root_cause 2",
                "conclude: ranks 2, 3",
            ],
        ),
    ],
    "a rank that is about to end for ever is waited for within a limit": [
        (is_about_to_end(2), NOTHING),
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (Wait(1), NOTHING),
        (
            Wait(15),
            [
                RANK_3_LOST_A_PEER,
                "all <- Abort",
                "record: root_cause 3",
                "conclude: rank 3",
            ],
        ),
    ],
    "a rank that ends too early explains those that waited for it": [
        (exits(1, WELL), ["record: exited 1"]),
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (
            Wait(1),
            [
                RANK_1_ENDED_EARLY,
                "all <- Abort",
                "record: root_cause 1",
                "conclude: rank 1",
            ],
        ),
    ],
    "a signal that has ended all ranks is the cause at once": [
        *((exits(rank, TERMINATED), [f"record: exited {rank}"]) for rank in range(3)),
        (
            exits(3, TERMINATED),
            [
                "say: stopped by an external SIGTERM: rank 0 got it first, on host-0",
                "all <- Abort",
                "record: exited 3",
                "record: root_cause 0",
                "conclude: rank 0",
            ],
        ),
    ],
    "an agent that detaches may end as it likes": [
        (Take(1, Detach()), NOTHING),
        (Wait(100), NOTHING),
    ],
    "a signal that answers a failure is not the cause": [
        (is_terminated(1), ["all <- CountReads", "record: stop_requested 1"]),
        (
            exits(2, KILLED),
            [
                RANK_2_IS_KILLED,
                "all <- Abort",
                "record: exited 2",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
    ],
    "a signal that ends a rank is why a peer that still runs has failed": [
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (exits(0, TERMINATED), ["record: exited 0"]),
        (
            Wait(1),
            [
                "say: stopped by an external SIGTERM: rank 0 got it first, on host-0",
                "all <- Abort",
                "all <- CountReads",
                "record: root_cause 0",
                "record: stop_requested 0",
                "conclude: rank 0",
            ],
        ),
    ],
    "a signal may be sent because of the second rank that has failed": [
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (exits(2, OF_A_PEER), ["record: exited 2"]),
        (is_terminated(1), ["all <- CountReads", "record: stop_requested 1"]),
        (
            Wait(1),
            [
                RANK_3_LOST_A_PEER,
                "all <- Abort",
                "record: root_cause 3",
                "conclude: rank 3",
            ],
        ),
    ],
    "a rank that ends well is not why another one came late to a barrier": [
        (exits(1, WELL), ["record: exited 1"]),
        (
            fails(3, raised(f"distboot.DistbootError: {CAME_LATE}")),
            [
                f"say: rank 3 failed first: {CAME_LATE}, on host-1",
                "all <- Abort",
                "record: failing 3",
                "record: root_cause 3",
                "conclude: rank 3",
            ],
        ),
    ],
    "a signal may be sent because of a peer that has ended": [
        (exits(3, OF_A_PEER), ["record: exited 3"]),
        (is_terminated(1), ["all <- CountReads", "record: stop_requested 1"]),
        (
            Wait(1),
            [
                RANK_3_LOST_A_PEER,
                "all <- Abort",
                "record: root_cause 3",
                "conclude: rank 3",
            ],
        ),
    ],
}

# A launcher is watched, which may turn out to be gone
BELOW_A_LAUNCHER: dict[str, list[Row]] = {
    "a signal of helpers of a launcher that is gone is not the cause": [
        *((exits(rank, TERMINATED), [f"record: exited {rank}"]) for rank in range(4)),
        (
            fails(0, ORPHANED),
            [
                "say: rank 0 failed first: its launcher is gone: horovodrun (process 7), on host-0",
                "all <- Abort",
                "record: failing 0",
                "record: root_cause 0",
                "conclude: rank 0",
            ],
        ),
    ],
}

# The agent of ranks 2 and 3 is cut off for a moment, and rank 1 fails meanwhile.
RANK_1_HAS_A_BUG: list[Row] = [
    (Cut(2), ["record: silent 2", "record: silent 3"]),
    (Lose(2), ["record: unreachable 2", "record: unreachable 3"]),
    (exits(1, BUG), ["record: exited 1"]),
]
CUT_OFF: dict[str, list[Row]] = {
    "a rank that may return has not failed first": [
        *RANK_1_HAS_A_BUG,
        (Wait(0.5), NOTHING),
        (
            Return(2),
            [
                (
                    "say: rank 1 failed first: uncaught exception: ValueError: boom, on host-0, "
                    "in train.py:7"
                ),
                "all <- Abort",
                "record: reachable 2",
                "record: reachable 3",
                "record: reachable 2",
                "record: reachable 3",
                "record: root_cause 1",
                "conclude: rank 1",
            ],
        ),
    ],
    "a rank that does not return has": [
        *RANK_1_HAS_A_BUG,
        (Wait(2.5), NOTHING),
        (Wait(1), [NODE_IS_LOST, "record: root_cause 2", "conclude: ranks 2, 3"]),
    ],
}

KEYS: dict[str, list[Row]] = {
    "a barrier is over when all have come": [
        (arrives(0), NOTHING),
        (arrives(3), NOTHING),
        (arrives(1), NOTHING),
        (arrives(2), ["rank 0 <- Release", "all <- Release"]),
    ],
    "a barrier fails where a rank has closed its context": [
        (arrives(0), NOTHING),
        (arrives(1), NOTHING),
        (Take(3, Leave()), ["rank 0 <- Failed missing-rank", "rank 1 <- Failed missing-rank"]),
        (arrives(2), ["rank 2 <- Failed missing-rank"]),
    ],
    "a barrier fails where a rank has ended": [
        (arrives(1), NOTHING),
        (exits(3, WELL), ["rank 1 <- Failed missing-rank", "record: exited 3"]),
    ],
    "a barrier whose first rank gives up is over for all": [
        (arrives(1, limit=20.0), NOTHING),
        (arrives(0, limit=30.0), NOTHING),
        (
            Wait(10),
            [
                (
                    "say: barrier(): 2/4 ranks are here; missing: ranks "
                    "2-3 (node 1); giving up in 20 s"
                ),
            ],
        ),
        (Wait(10), ["rank 0 <- Failed missing-rank", "rank 1 <- Failed missing-rank"]),
    ],
    "all wait for the rank that leads": [
        (arrives(1, MAIN_FIRST), NOTHING),
        (arrives(3, MAIN_FIRST), NOTHING),
        (leads(0), ["rank 0 <- Release", "ranks 1, 3 <- Release"]),
        (arrives(2, MAIN_FIRST), ["rank 2 <- Release"]),
    ],
    "all hear why the rank that leads has failed": [
        (arrives(1, MAIN_FIRST), NOTHING),
        (leads(0, "no disk"), ["rank 0 <- Release", "rank 1 <- Failed rank-failed"]),
        (arrives(2, MAIN_FIRST), ["rank 2 <- Failed rank-failed"]),
    ],
}

START: dict[str, list[Row]] = {
    "all start when all are ready": [
        (Take(0, Ready()), NOTHING),
        (Take(1, Ready()), NOTHING),
        (Take(2, Ready()), NOTHING),
        (Take(3, Ready()), ["rank 0 <- Go", "all <- Go"]),
    ],
    "nobody starts where two frameworks meet": [
        (Take(0, Ready(framework="torch")), NOTHING),
        (
            Take(1, Ready(framework="jax")),
            [
                "rank 0 <- Failed membership-mismatch",
                "all <- Failed membership-mismatch",
                "record: not_ready",
            ],
        ),
    ],
    "nobody starts where a rank has a problem": [
        (Take(0, Ready()), NOTHING),
        (
            Take(2, Ready(problem=NO_DRIVER)),
            [
                "rank 0 <- Failed device-failed",
                "all <- Failed device-failed",
                "record: not_ready",
            ],
        ),
        (Take(1, Ready()), ["rank 1 <- Failed device-failed"]),
    ],
    "nobody starts where a rank has ended": [
        (Take(0, Ready()), NOTHING),
        (
            exits(1, KILLED),
            [
                "rank 0 <- Failed rank-failed",
                "all <- Failed rank-failed",
                "record: exited 1",
                "record: not_ready",
            ],
        ),
        (Take(2, Ready()), ["rank 2 <- Failed rank-failed"]),
    ],
}

AGREED: list[Row] = [
    (Take(3, RequestStop("SIGUSR1")), ["all <- CountReads", "record: stop_requested 3"]),
    *((has_read(rank, 43), NOTHING) for rank in (1, 2, 3)),
    (has_read(0, 43), [STOPS_AT_44, "all <- StopAt 44", "record: stop_agreed"]),
]
STOP: dict[str, list[Row]] = {
    "all stop at one read, which none has begun": [
        (Take(3, RequestStop("SIGUSR1")), ["all <- CountReads", "record: stop_requested 3"]),
        (Take(2, RequestStop("SIGUSR1")), NOTHING),
        (has_read(1, 41), NOTHING),
        (has_read(2, 42), NOTHING),
        (has_read(3, 43), NOTHING),
        (
            has_read(0, 40),
            [
                STOPS_AT_44,
                "all <- StopAt 44",
                "record: stop_agreed",
            ],
        ),
    ],
    "a rank whose agent does not answer is not waited for": [
        (Take(3, RequestStop("SIGUSR1")), ["all <- CountReads", "record: stop_requested 3"]),
        (has_read(0, 40), NOTHING),
        (has_read(1, 41), NOTHING),
        (has_read(3, 43), NOTHING),
        (
            Wait(10),
            [
                f"{STOPS_AT_44}; rank 2 did not report in time, and may stop at a different read",
                "all <- StopAt 44",
                "record: stop_agreed",
            ],
        ),
    ],
    "nor is one that has ended": [
        (Take(3, RequestStop("SIGUSR1")), ["all <- CountReads", "record: stop_requested 3"]),
        (has_read(0, 40), NOTHING),
        (has_read(1, 41), NOTHING),
        (has_read(3, 43), NOTHING),
        (
            exits(2, WELL),
            [
                STOPS_AT_44,
                "all <- StopAt 44",
                "record: exited 2",
                "record: stop_agreed",
            ],
        ),
    ],
    "a signal from outside stops all, and is no failure": [
        (is_terminated(1), ["all <- CountReads", "record: stop_requested 1"]),
        (has_read(1, 5), NOTHING),
        (has_read(2, 5), NOTHING),
        (has_read(3, 5), NOTHING),
        (has_read(0, 5), NOTHING),
        (
            Wait(1),
            [
                "say: stopped by an external SIGTERM: rank 1 got it first, on host-0",
                (
                    "say: rank 1 was asked to stop (SIGTERM): all ranks "
                    "stop at read 6 of ctx.preempted"
                ),
                "all <- Abort",
                "all <- StopAt 6",
                "record: root_cause 1",
                "record: stop_agreed",
                "conclude: rank 1",
            ],
        ),
    ],
    "ranks that are left after any signal stop together": [
        (exits(1, HUNG_UP), ["record: exited 1"]),
        (
            Wait(1),
            [
                "say: stopped by an external SIGHUP: rank 1 got it first, on host-0",
                "all <- Abort",
                "all <- CountReads",
                "record: root_cause 1",
                "record: stop_requested 1",
                "conclude: rank 1",
            ],
        ),
        (has_read(0, 5), NOTHING),
        (has_read(2, 4), NOTHING),
        (
            has_read(3, 5),
            [
                (
                    "say: rank 1 was asked to stop (SIGHUP): all ranks "
                    "stop at read 6 of ctx.preempted"
                ),
                "all <- StopAt 6",
                "record: stop_agreed",
            ],
        ),
    ],
    "ranks that Ctrl-C has interrupted stop at no read": [
        (is_interrupted(0), NOTHING),
        (is_interrupted(1), NOTHING),
        (is_interrupted(2), NOTHING),
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (
            Wait(1),
            [
                "say: stopped by an external SIGINT: Ctrl-C, which ranks 0-2 got, on host-0",
                "all <- Abort",
                "record: root_cause 0",
                "conclude: rank 0",
            ],
        ),
    ],
    "a rank that Ctrl-C has not reached stops at a read": [
        (is_interrupted(0), NOTHING),
        (is_interrupted(1), NOTHING),
        (is_interrupted(2), NOTHING),
        (
            Wait(1),
            [
                "say: stopped by an external SIGINT: Ctrl-C, which ranks 0-2 got, on host-0",
                "all <- Abort",
                "all <- CountReads",
                "record: root_cause 0",
                "record: stop_requested 0",
                "conclude: rank 0",
            ],
        ),
    ],
    "an exit code of a signal after an agreed stop is no signal": [
        *AGREED,
        (exits(2, CODE_143), ["record: exited 2"]),
        (
            Wait(1),
            [
                "say: stopped as agreed: rank 3 was asked to stop (SIGUSR1), on host-1",
                "all <- Abort",
                "record: root_cause 3",
                "conclude: rank 3",
            ],
        ),
    ],
    "a signal after an agreed stop is one": [
        *AGREED,
        (exits(2, TERMINATED), ["record: exited 2"]),
        (
            Wait(1),
            [
                "say: stopped by an external SIGTERM: rank 2 got it first, on host-1",
                "all <- Abort",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
    ],
    "an exit code of a signal before a stop is agreed is that signal": [
        (Take(3, RequestStop("SIGUSR1")), ["all <- CountReads", "record: stop_requested 3"]),
        (exits(2, CODE_143), ["record: exited 2"]),
        (
            Wait(1),
            [
                "say: stopped by an external SIGTERM: rank 2 got it first, on host-1",
                "all <- Abort",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
    ],
}

# Rank 2 has waited for a minute; all say how far they are, and then where.
ASKED: list[Row] = [
    (Take(2, Stalled()), ["all <- Locate"]),
    (is_at(0, 1, 9, "all_reduce"), NOTHING),
    (is_at(1, 1, 9, "all_reduce"), NOTHING),
    (is_at(2, 1, 9, "all_reduce"), NOTHING),
    (is_at(3, 1, 8, "load_batch"), ["all <- Locate"]),
    (is_at(0, 2, 9, "all_reduce"), NOTHING),
    (is_at(1, 2, 9, "all_reduce"), NOTHING),
    (is_at(2, 2, 9, "all_reduce"), NOTHING),
    (is_at(3, 2, 8, "load_batch"), NOTHING),
    (Wait(1), NOTHING),
]
LATE: dict[str, list[Row]] = {
    "a rank is late where one that waits for it still does": [
        *ASKED,
        (is_at(0, 0, 9, "all_reduce"), [RANK_3_IS_LATE, "record: late 3"]),
    ],
    "nobody is late where one that waited has gone on": [
        *ASKED,
        (is_at(0, 0, 10, "all_reduce", since=0.0), NOTHING),
    ],
}

# What random schedules have found (`make schedules`): after each event the loop of the agent can sleep.
SLEEPS: dict[str, list[Row]] = {
    "a rank that stalls meanwhile is no second question": [
        (Take(2, Stalled()), ["all <- Locate"]),
        (Take(1, Stalled()), NOTHING),
        (Wait(2), NOTHING),
    ],
    "a second user asks before all have answered the first": [
        (Take(1, AskStacks()), ["all <- Locate"]),
        (Take(2, AskStacks()), NOTHING),
        (Wait(2), NOTHING),
    ],
    "a timeout waits for the positions of all": [
        (fails(3, TIMEOUT), ["all <- Locate", "record: failing 3"]),
        (Wait(2), NOTHING),
    ],
    "a stop waits for the cause": [
        (Take(1, RequestStop("SIGUSR1")), ["all <- CountReads", "record: stop_requested 1"]),
        (Wait(1), NOTHING),
        (is_about_to_end(2), NOTHING),
        (fails(3, OF_A_PEER), ["record: failing 3"]),
        (Wait(9.2), NOTHING),
    ],
    "a user asks where the ranks are that the job stops": [
        (exits(2, KILLED), KILLED_AND_TOLD),
        (Take(1, AskStacks()), ["ranks 1, 3 <- Locate"]),
        (is_at(0, 1, 9, "save"), NOTHING),
        (is_at(1, 1, 9, "save"), NOTHING),
        (is_at(3, 1, 9, "save"), ["rank 1 <- ShowStacks"]),
        (Take(1, AskStacks()), ["ranks 1, 3 <- Locate"]),
        (is_at(0, 2, 9, "save"), NOTHING),
        (exits(1, TERMINATED), ["record: exited 1"]),
        (exits(3, TERMINATED), ["rank 1 <- ShowStacks", "record: exited 3"]),
    ],
    "no stacks are read for a question before the root cause": [
        (Take(0, Stalled()), ["all <- Locate"]),
        (is_at(0, 1, 9, "all_reduce"), NOTHING),
        (is_at(3, 1, 8, "load_batch"), NOTHING),
        (exits(2, KILLED), KILLED_AND_TOLD),
        (Take(1, Stalled()), NOTHING),
        (Wait(2), NOTHING),
    ],
    "a user waits for another question at the root cause": [
        (Take(0, Stalled()), ["all <- Locate"]),
        (Take(1, AskStacks()), NOTHING),
        (
            exits(2, KILLED),
            [RANK_2_IS_KILLED, "all <- Abort", "ranks 1, 3 <- Locate", *KILLED_AND_TOLD[2:]],
        ),
        (is_at(0, 2, 9, "save"), NOTHING),
        (is_at(1, 2, 9, "save"), NOTHING),
        (is_at(3, 2, 9, "save"), ["rank 1 <- ShowStacks"]),
    ],
    "a user's question ends with the job": [
        (Take(1, AskStacks()), ["all <- Locate"]),
        (
            exits(2, KILLED),
            [
                RANK_2_IS_KILLED,
                "all <- Abort",
                "rank 1 <- ShowStacks",
                "record: exited 2",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
    ],
}

CHECK_STOPS: dict[str, list[Row]] = {
    "what the check finds after a failure is no second cause": [
        (
            exits(2, KILLED),
            [
                RANK_2_IS_KILLED,
                "all <- Abort",
                "record: exited 2",
                "record: root_cause 2",
                "conclude: rank 2",
            ],
        ),
        (Wait(3), ["record: checked"]),
    ],
}
CHECK_WARNS: dict[str, list[Row]] = {
    "an odd link is not probed again once its node has gone": [
        (Take(0, Probeable(4000, "token")), NOTHING),
        (Take(0, NodeSeen()), NOTHING),
        (Take(2, Probeable(4002, "token")), ["rank 2 <- Probe"]),
        (Take(2, NodeSeen()), NOTHING),
        (Take(0, Probed(1, 0.05, 12e9)), NOTHING),
        (Take(2, Probed(1, 0.0002, 12e9)), ["rank 2 <- Probe"]),
        (Take(0, Probed(2, 0.05, 12e9)), NOTHING),
        (
            Take(2, Detach()),
            [
                (
                    "say: warning: host-0: a round trip of 50 ms to host-1, "
                    "median of the others 0.2 ms"
                ),
                "record: checked",
            ],
        ),
    ],
}

# Without failure detection a signal is no cause that the log would have
NOT_DETECTED: dict[str, list[Row]] = {
    "no read is printed where no script reads": [
        (is_terminated(0), ["all <- CountReads", "record: stop_requested 0"]),
        (has_read(1, 0), NOTHING),
        (has_read(2, 0), NOTHING),
        (has_read(3, 0), NOTHING),
        (has_read(0, 0), ["all <- StopAt 1", "record: stop_agreed"]),
        (exits(0, TERMINATED), ["record: exited 0"]),
    ],
    "a read is printed where a script reads": [
        (is_terminated(0), ["all <- CountReads", "record: stop_requested 0"]),
        (has_read(1, 5), NOTHING),
        (has_read(2, 5), NOTHING),
        (has_read(3, 5), NOTHING),
        (
            has_read(0, 5),
            [
                (
                    "say: rank 0 was asked to stop (SIGTERM): all ranks "
                    "stop at read 6 of ctx.preempted"
                ),
                "all <- StopAt 6",
                "record: stop_agreed",
            ],
        ),
    ],
}
# A signal before all ranks are ready, which their scripts outlive
STOP_AT_START: dict[str, list[Row]] = {
    "a read is printed once there is a context": [
        (is_terminated(0), ["all <- CountReads", "record: stop_requested 0"]),
        (has_read(1, 0), NOTHING),
        (has_read(2, 0), NOTHING),
        (has_read(3, 0), NOTHING),
        (has_read(0, 0), ["all <- StopAt 1", "record: stop_agreed"]),
        (Take(0, Ready()), NOTHING),
        (Take(1, Ready()), NOTHING),
        (Take(2, Ready()), NOTHING),
        (
            Take(3, Ready()),
            [
                "rank 0 <- Go",
                (
                    "say: rank 0 was asked to stop (SIGTERM): all ranks "
                    "stop at read 1 of ctx.preempted"
                ),
                "all <- Go",
            ],
        ),
    ],
}
TABLES = FIRST_FAILURE | KEYS | START | STOP | LATE | SLEEPS | CHECK_STOPS | CHECK_WARNS
TABLES |= BELOW_A_LAUNCHER | NOT_DETECTED | STOP_AT_START
# Where a job is not the usual one. Below the wrapper the check does not hold up a script until it calls `init()`
WRAPPED = Setup(has_begun=False)
SETUPS = {
    **dict.fromkeys(BELOW_A_LAUNCHER, USUAL._replace(has_launcher=True)),
    **dict.fromkeys(START, STARTING),
    **dict.fromkeys(STOP_AT_START, STARTING),
    **dict.fromkeys(NOT_DETECTED, USUAL._replace(settings=SETTINGS._replace(detects=False))),
    **dict.fromkeys(CHECK_STOPS, WRAPPED._replace(settings=SETTINGS._replace(check="stop"))),
    **dict.fromkeys(CHECK_WARNS, WRAPPED._replace(settings=SETTINGS._replace(check="warn"))),
}


@pytest.mark.parametrize("job_of", [PureJob, JobOfRank0])
@pytest.mark.parametrize("name", TABLES)
def test_each_event_has_these_effects(
    name: str, job_of: Callable[..., PureJob | JobOfRank0]
) -> None:
    job = job_of(SETUPS.get(name, USUAL))
    try:
        for event, effects in TABLES[name]:
            assert job.after(event) == list(effects), event
    finally:
        job.close()


@pytest.mark.parametrize("name", CUT_OFF)
def test_rank_that_is_cut_off_may_return(name: str) -> None:
    job = PureJob(USUAL._replace(is_by_node=True))
    for event, effects in CUT_OFF[name]:
        assert job.after(event) == list(effects), event


def test_rank_that_begins_late_learns_who_prints() -> None:
    job = PureJob(USUAL).job
    job.stop_orphans("the launcher is gone", 1.0)
    (remind,) = [each for each in job.take(3, Register(103), 2.0) if isinstance(each, Remind)]
    assert remind.speakers == {0, 2}


SIGNALED: list[Event] = [is_terminated(1), Wait(1)]
LINGER = 5.0  # seconds, as docs/explanation/failure-detection.md has them
GRACE = SETTINGS.grace
# Rank 2 has failed, and its libraries still end; by then a peer's end has ended two others
ENDS_SLOWLY = [Take(2, Exited(CODE_3, is_reaped=False)), exits(0, OF_A_PEER), exits(1, OF_A_PEER)]
# What has happened, and for how many seconds after that rank 0's agent stays for the others
STAYS: dict[str, tuple[list[Event], float]] = {
    "rank 0 ended well": ([exits(0, WELL)], LINGER),
    "all ended well": ([exits(rank, WELL) for rank in (1, 2, 3, 0)], 0.0),
    "another rank failed": ([exits(2, CODE_3), exits(0, TERMINATED)], GRACE + 2.0),
    "another rank failed, and ends slowly": (
        [Take(2, Exited(CODE_3, is_reaped=False)), Wait(1), exits(0, TERMINATED)],
        8.75 + GRACE + 2.0 - 1.0,
    ),
    "it is the last one that ends": ([*ENDS_SLOWLY, exits(3, OF_A_PEER), Wait(1)], 8.0),
    "it has ended": ([*ENDS_SLOWLY, exits(3, OF_A_PEER), Wait(1), Take(2, Reaped())], 0.25),
    "a signal ended rank 0, which saves nothing": (
        [is_terminated(0), exits(0, TERMINATED), Wait(1)],
        LINGER,
    ),
    "the rank that a signal has ended ends slowly": (
        [
            *SIGNALED,
            *(exits(rank, WELL) for rank in (2, 3)),
            Take(1, Exited(TERMINATED, is_reaped=False)),
            exits(0, OF_A_PEER),
        ],
        0.15,
    ),
    "rank 0 saved after a signal": (
        [*SIGNALED, Wait(7), exits(0, WELL)],
        LINGER,
    ),
    "rank 0 had ended before the signal": (
        [exits(0, WELL), Wait(3), *SIGNALED],
        LINGER,
    ),
    "rank 0 saved for nearly as long as the grace": (
        [*SIGNALED, Wait(GRACE - 1), exits(0, WELL)],
        3.0,
    ),
    "rank 0 was killed after the grace": (
        [*SIGNALED, Wait(GRACE + 3), exits(0, KILLED)],
        0.0,
    ),
    "all others saved before rank 0": (
        [
            *SIGNALED,
            *(exits(rank, WELL) for rank in (1, 2, 3)),
            Wait(7),
            exits(0, WELL),
        ],
        0.0,
    ),
}


@pytest.mark.parametrize(("events", "seconds"), STAYS.values(), ids=STAYS)
def test_agent_of_rank_0_stays_for_others(events: list[Event], seconds: float) -> None:
    job = PureJob(USUAL)
    for event in events:
        job.after(event)
    assert job.job.stays_until() - job.now == pytest.approx(seconds)


# The same below wrappers, whose exit waits
STAYS_OF_WRAPPER: dict[str, tuple[list[Event], float]] = {
    "rank 0 asks for another start before the others have saved": (
        [*SIGNALED, Wait(7), exits(0, CODE_143)],
        GRACE + 2.0 - 7.0,
    ),
    "another rank does, and its wrapper waits for rank 0": (
        [*SIGNALED, exits(1, CODE_143), Wait(7), exits(0, WELL)],
        GRACE + 2.0 - 7.0,
    ),
    "all ask for another start": (
        [*SIGNALED, *(exits(rank, CODE_143) for rank in (1, 2, 3, 0))],
        0.0,
    ),
    "all that ended have ended well": ([*SIGNALED, exits(1, WELL), exits(0, WELL)], LINGER),
    "rank 0 was killed after the grace": (
        [*SIGNALED, Wait(GRACE + 3), exits(0, KILLED)],
        0.0,
    ),
}


@pytest.mark.parametrize(("events", "seconds"), STAYS_OF_WRAPPER.values(), ids=STAYS_OF_WRAPPER)
def test_wrapper_of_rank_0_stays_for_saves(events: list[Event], seconds: float) -> None:
    job = PureJob(USUAL._replace(is_held=True))
    for event in events:
        job.after(event)
    assert job.job.stays_until() - job.now == pytest.approx(seconds)


FILE = "64768:11"
# By rank, where its agent prints; and the ranks whose agents print why all stop as rank 3 fails
LOGS = {
    "a stream for each node": ({}, {0, 2}),
    "a file for each node": (dict.fromkeys(range(4), FILE), {0, 2}),
    "a file for each rank": (
        {0: "64768:0", 1: "64768:1", 2: "64768:2", 3: "64768:3"},
        {0, 1, 2, 3},
    ),
    "a file for rank 1": ({1: FILE}, {0, 1, 2}),
    "a file for rank 3": ({3: FILE}, {0, 2, 3}),
}


@pytest.mark.parametrize(("logs", "speakers"), LOGS.values(), ids=LOGS)
def test_one_agent_speaks_for_each_log(logs: dict[int, str], speakers: set[int]) -> None:
    job = PureJob(USUAL).job
    for rank, log in logs.items():
        job.facts.members[rank].log = log
    effects = job.take(3, Exited(ExitStatus(code=3, when=1.0)), 2.0) + job.tick(9.0)
    (tell, *_) = [each for each in effects if isinstance(each, Tell)]
    assert tell.speakers == speakers
