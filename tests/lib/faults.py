"""The faults of the fault matrix: what happens to the job, and what the ranks that are left print then.

`says` has, for each rank that is left, a regular expression for the first failure, as it is after
"distboot: rank 0 on nodea: ". One rank of each host prints it, for the log that they share: on rank 0's
host rank 0, if it is left. A fault without any is no failure: the training must go on and end well.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import faults_inject as do
from faults_job import LAUNCHERS, Job
from hosts import Hosts

QUIET = {"DISTBOOT_HEARTBEAT_TIMEOUT": str(do.SHORT)}
LOST = "lost"  # in place of an exit code


def all_but(culprits: Sequence[int], text: str) -> dict[int, str]:
    return {rank: text for rank in range(4) if rank not in culprits}


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str  # in the ids of the tests
    title: str  # in the table
    # Of the first failure, by rank; empty: the training goes on
    says: Mapping[int, str] = field(default_factory=dict)
    # Of those that failed, in the report: LOST, or None for no report at all
    code: int | str | None = None
    culprits: tuple[int, ...] = (3,)  # the ranks that fail
    act: str = "none"  # what the script of the `actors` does by itself; see `faults_worker.py`
    actors: tuple[int, ...] = (3,)
    inject: Callable[[Job], None] = do.go  # makes it happen
    env: Mapping[str, str] = field(default_factory=dict)  # further variables of the job
    before: Callable[[Hosts], object] = do.nothing  # prepares the hosts
    after: Callable[[Hosts], object] = do.nothing  # undoes that, and whatever `inject` did to them
    once: str = ""  # what exactly one rank must print, a regular expression
    silence: bool = False  # whether it takes the bound until the fault is seen
    cut: bool = False  # whether the launcher, too, does not reach some ranks
    # Codes where the training goes on; None where rank 0 does not hear
    well: tuple[int | None, ...] = (0, 0, 0, 0)
    exit_code: int = 143  # of the job
    # The ranks whose process that the launcher started the fault, or the end, kills
    killed: tuple[int, ...] = ()
    launchers: tuple[str, ...] = LAUNCHERS  # under which there can be such a fault

    @property
    def missing(self) -> str | None:
        return do.no_groups() if self.name == "cgroup" else None


KILLED = "killed by SIGKILL"
_SIGTERM_OF_3 = "stopped by an external SIGTERM: (the wrapper of rank 3 got it|rank 3 got it first)"
NO_MEMORY = "(exit code 1|uncaught exception: MemoryError)"
# Having lost its daemon on nodeb, mpirun (Open MPI 5) exits, now and then before it has ended the ranks of nodea
LAUNCHER_GONE = r"rank \d failed first: its launcher is gone: \S+ \(process \d+\), on node[ab]"
WITH_PROCESSES = ("torchrun", "mpirun", "srun")
HOST_GONE = "rank(s 2-3| 2| 3) (became unreachable|failed) first: "
_B_GONE = "(ranks 2-3|rank [23]) became unreachable first: "
CUT = {
    0: _B_GONE,
    1: _B_GONE,
    2: "rank 0 became unreachable first: ",
    3: "rank 0 became unreachable first: ",
}
NAN = r"(exit code 1|uncaught exception: RuntimeError: the loss is nan), on nodeb"


def _failed(name: str, title: str, how: str, code: int | None, rank: int = 3, **more: Any) -> Fault:
    """A failure of one rank, which all others name."""
    more.setdefault("exit_code", code)
    return Fault(
        name, title, all_but([rank], f"rank {rank} failed first: {how}"), code, (rank,), **more
    )


def _cut(
    name: str, title: str, inject: Callable[[Job], None], after: Callable[[Hosts], object]
) -> Fault:
    """Something that keeps nodeb's ranks and rank 0 from hearing of each other."""
    return Fault(
        name,
        title,
        CUT,
        LOST,
        (2, 3),
        inject=inject,
        env=QUIET,
        after=after,
        silence=True,
        cut=True,
    )


B_TO_A = ("nodeb", "nodea")
A_TO_B = ("nodea", "nodeb")
FAULTS = [
    _failed("exception", "uncaught exception", NAN, 1, act="exception"),
    _failed("exit", "`sys.exit(3)`", "exit code 3", 3, act="exit"),
    _failed("system-exit", "`raise SystemExit(3)`", "exit code 3", 3, act="system-exit"),
    _failed("os-exit", "`os._exit(4)`", "exit code 4", 4, act="os-exit"),
    _failed("sigkill", "SIGKILL", KILLED, 137, inject=do.kill(signal.SIGKILL, 3)),
    _failed("segv", "SIGSEGV, of a null pointer", "killed by SIGSEGV", 139, act="segv"),
    _failed("abort", "`os.abort()`", "killed by SIGABRT", 134, act="abort"),
    _failed("ulimit", "out of memory: `ulimit -v`, so MemoryError", NO_MEMORY, 1, act="ulimit"),
    _failed(
        "cgroup",
        "out of memory: a cgroup's limit, so the kernel kills",
        KILLED,
        137,
        act="cgroup",
        inject=do.eat_in_a_group,
        after=do.remove_group,
    ),
    _failed(
        "rank-0",
        "rank 0: SIGKILL",
        KILLED,
        137,
        0,
        inject=do.kill(signal.SIGKILL, 0),
    ),
    Fault(
        "watcher-0",
        "rank 0: SIGKILL for its wrapper, or the sidecar of `init`",
        all_but([0], "rank 0 became unreachable first: "),
        culprits=(0,),
        inject=do.kill_watcher,
        killed=(0,),
    ),
    Fault(
        "host",
        "nodeb: SIGKILL for all its processes",
        all_but([2, 3], HOST_GONE),
        LOST,
        (2, 3),
        inject=do.kill_host,
        killed=(2, 3),
    ),
    _cut("link", "nodeb: link down", do.cut_link, do.mend_link),
    _cut(
        "drop-to-0", "packets from nodeb to nodea dropped", do.drop(*B_TO_A), do.let_pass(*B_TO_A)
    ),
    _cut(
        "drop-from-0", "packets from nodea to nodeb dropped", do.drop(*A_TO_B), do.let_pass(*A_TO_B)
    ),
    Fault("stop-5", "SIGSTOP for 5 s, bound 15 s", inject=do.stop_for_a_while),
    _failed(
        "stop",
        "SIGSTOP for ever",
        "stopped by a signal",
        143,
        inject=do.kill(signal.SIGSTOP, 3),
        env=QUIET,
        silence=True,
    ),
    Fault(
        "freeze",
        "SIGSTOP for ever, also for its wrapper or sidecar",
        all_but([3], "rank 3 became unreachable first: .*stopped or frozen"),
        LOST,
        inject=do.freeze,
        env=QUIET,
        silence=True,
        killed=(3,),
    ),
    Fault("hog", "Python's lock held for 6 s", act="hog", inject=do.hold_the_lock, env=QUIET),
    _failed(
        "hog-survivor",
        "SIGKILL, while rank 1 holds Python's lock for ever",
        KILLED,
        137,
        act="hog-for-ever",
        actors=(1,),
        inject=do.kill_beside_a_busy_rank,
    ),
    Fault(
        "two",
        "ranks 2 and 3 at once: SIGKILL",
        all_but([2, 3], f"rank [23] failed first: {KILLED}"),
        137,
        (2, 3),
        inject=do.kill(signal.SIGKILL, 2, 3),
        exit_code=137,
    ),
    Fault(
        "sigterm",
        "SIGTERM from outside",
        all_but([3], _SIGTERM_OF_3),
        143,
        inject=do.stop_politely,
    ),
    _failed(
        "full",
        "`sys.exit(3)`, and the report's disk is full",
        "exit code 3",
        None,
        act="exit",
        env={"DISTBOOT_REPORT": "/tmp/disk/report.json"},
        before=do.small_disk,
        after=do.no_disk,
        once="warning: the report could not be written: .*No space left",
        exit_code=3,
    ),
    Fault("apart", "rank 3 ends well, 3 s before the others", act="apart", inject=do.end_well),
    Fault(
        "apart-0",
        "rank 0 ends well, 3 s before the others",
        act="apart",
        actors=(0,),
        inject=do.end_well,
    ),
    Fault(
        "firewall",
        "a firewall closes the port of failure detection",
        inject=do.close_port,
        env=QUIET,
        after=do.open_ports,
        once="rank 3 on nodeb: rank 0 on nodea .* answered again after",
    ),
    Fault(
        "cut-key",
        ("all that agents send each other dropped for 6 s, ranks at `barrier()`"),
        act="key",
        inject=do.cut_and_mend,
        env=QUIET,
        after=do.open_ports,
        once="rank 3 on nodeb: rank 0 on nodea .* answered again after",
    ),
    Fault(
        "cut-stop",
        "the same, and rank 3 is asked to stop meanwhile",
        act="stop",
        inject=do.stop_while_cut,
        env={**QUIET, "DISTBOOT_GRACE": "60", "DISTBOOT_STOP_SIGNALS": "USR1"},
        after=do.open_ports,
        once=r"all ranks stop at read \d+ of ctx.preempted\n",
    ),
    Fault(
        "launcher",
        "SIGKILL for the launcher's process on nodeb",
        all_but([], LAUNCHER_GONE),
        143,
        (2, 3),
        inject=do.kill_launcher,
        cut=True,
        killed=(0, 1, 2, 3),
        launchers=WITH_PROCESSES,
    ),
    Fault(
        "launcher-stop",
        "SIGSTOP for the launcher's process on nodeb, for 5 s",
        inject=do.stop_launcher_for_a_while,
        launchers=WITH_PROCESSES,
    ),
]
