"""The faults of the fault matrix: what happens to the job, and what every rank that is left must say then.

A rank that is left must print the first failure once: `says` has, for each of them, a regular expression for the line
after "distboot: rank 0 on nodea: ". A fault without any is no failure: the training must go on and end well.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faults_job import Job, processes
from hosts import Hosts

SHORT = 3  # seconds for which a rank may be silent, in faults about silence
QUIET = {"DISTBOOT_LIFELINE_TIMEOUT": str(SHORT)}
ADDRESSES = {"nodea": "10.77.0.11", "nodeb": "10.77.0.12"}
LOST = "lost"  # in place of an exit code
_MEMORY = Path("/sys/fs/cgroup/memory")  # of cgroup version 1


def all_but(culprits: Sequence[int], text: str) -> dict[int, str]:
    """All ranks but these say so."""
    return {rank: text for rank in range(4) if rank not in culprits}


def _nothing(_: Hosts) -> None:
    """Nothing to prepare, nothing to undo."""


def _go(job: Job) -> None:
    job.go([3])


def _end_well(_: Job) -> None:
    """The end of the training is the fault."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: in the ids of the tests.
        title: in the table.
        says: what each rank that is left prints of the first failure; empty: the training goes on.
        code: what the report says of the ranks that failed: their exit code, `LOST`, or None for no report at all.
        culprits: the ranks that fail.
        act: what the script of the `actors` does by itself; see `faults_worker.py`.
        inject: makes it happen.
        env: further variables of the job.
        before, after: prepare the hosts, and undo that and whatever `inject` did to them.
        once: what exactly one rank must print, a regular expression.
        silence: whether it takes the bound until the fault is seen.
        cut: whether the launcher, too, does not reach some ranks.
        well: the exit codes in the report, where the training goes on; None where rank 0 does not hear.
    """

    name: str
    title: str
    says: Mapping[int, str] = field(default_factory=dict)
    code: int | str | None = None
    culprits: tuple[int, ...] = (3,)
    act: str = "none"
    actors: tuple[int, ...] = (3,)
    inject: Callable[[Job], None] = _go
    env: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[Hosts], object] = _nothing
    after: Callable[[Hosts], object] = _nothing
    once: str = ""
    silence: bool = False
    cut: bool = False
    well: tuple[int | None, ...] = (0, 0, 0, 0)

    @property
    def missing(self) -> str | None:
        """What this machine lacks for it; None if nothing."""
        if self.name == "cgroup" and not os.access(_MEMORY / "memory.limit_in_bytes", os.R_OK):
            return "no memory controller of cgroup version 1"
        return None


def _kill(number: int, *ranks: int) -> Callable[[Job], None]:
    return lambda job: job.send(number, *(job.scripts[rank] for rank in ranks))


def _goes_on(job: Job, seconds: float) -> None:
    assert job.await_end_of([0], seconds) is None, job.output()


def _stop_for_a_while(job: Job) -> None:
    job.send(signal.SIGSTOP, job.scripts[3])
    _goes_on(job, 5)
    job.send(signal.SIGCONT, job.scripts[3])
    job.go_on()


def _hold_the_lock(job: Job) -> None:
    job.go([3])
    _goes_on(job, SHORT + 2)


def _kill_beside_a_busy_rank(job: Job) -> None:
    job.go([1])
    job.began = 0.0
    job.send(signal.SIGKILL, job.scripts[3])


def _kill_watcher(job: Job) -> None:
    job.send(signal.SIGKILL, job.watcher_of(0))


def _freeze(job: Job) -> None:
    job.send(signal.SIGSTOP, job.watcher_of(3), job.scripts[3])


def _kill_host(job: Job) -> None:
    members = job.members("nodeb")
    job.send(signal.SIGKILL, *sorted(members, key=lambda one: not one.watches))


def _stop_politely(job: Job) -> None:
    job.send(signal.SIGTERM, job.watcher_of(3) if job.way == "wrapper" else job.scripts[3])


def _cut_link(job: Job) -> None:
    job.send(0)  # the clock
    job.shell("nodeb", "ip link set eth0 down")


def _mend_link(hosts: Hosts) -> None:
    hosts.run("nodeb", ["ip", "link", "set", "eth0", "up"])


def _drop(source: str, target: str) -> Callable[[Job], None]:
    def drop(job: Job) -> None:
        job.send(0)
        # To a network card that does not exist.
        job.shell(source, f"ip neigh replace {ADDRESSES[target]} lladdr 02:00:00:00:00:01 dev eth0 nud permanent")

    return drop


def _let_pass(source: str, target: str) -> Callable[[Hosts], object]:
    return lambda hosts: hosts.run(source, ["ip", "neigh", "del", ADDRESSES[target], "dev", "eth0"])


def _eat_in_a_group(job: Job) -> None:
    group = _group()
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("200M")
    (group / "cgroup.procs").write_text(str(job.scripts[3].pid))
    job.go([3])


def _group() -> Path:
    return _MEMORY / f"distboot-faults-{os.getpid()}"


def _remove_group(_: Hosts) -> None:
    with suppress(FileNotFoundError):
        _group().rmdir()


def _small_disk(options: str) -> Callable[[Hosts], object]:
    command = f"mkdir /tmp/disk && mount -n -t tmpfs -o {options} tmpfs /tmp/disk"
    fill = "; cat /dev/zero > /tmp/disk/full 2>/dev/null; true"
    return lambda hosts: hosts.run("nodea", ["sh", "-c", command + fill])


def _no_disk(hosts: Hosts) -> None:
    hosts.run("nodea", ["sh", "-c", "umount -n /tmp/disk; rmdir /tmp/disk"])


def _close_port(job: Job) -> None:
    """Let the hosts drop what goes over the port at which the ranks met; the others stay open."""
    port = _lifeline_port(job)
    job.send(0)
    job.shell("nodea", f"ip rule add pref 1 ipproto tcp sport {port} to {ADDRESSES['nodeb']} blackhole")
    job.shell("nodeb", f"ip rule add pref 1 ipproto tcp dport {port} to {ADDRESSES['nodea']} blackhole")
    _goes_on(job, SHORT + 3)


def _lifeline_port(job: Job) -> int:
    shown = job.hosts.run("nodeb", ["ss", "-Htnp", "dst", ADDRESSES["nodea"]]).stdout
    watcher = {own for own, pid in processes(job.hosts, "nodeb").items() if pid == job.watcher_of(3).pid}
    lines = [line for line in shown.splitlines() if any(f"pid={own}," in line for own in watcher)]
    (port,) = {int(match[1]) for line in lines for match in [re.search(r":(\d+)\s+users:", line)] if match}
    return port


def _open_port(hosts: Hosts) -> None:
    for host in ADDRESSES:
        hosts.run(host, ["ip", "rule", "del", "pref", "1"])


FAILED = "rank 3 failed first: "
HOST_GONE = "rank(s 2-3| 2| 3) (lost|failed) first: "
_B_GONE = "(ranks 2-3|rank [23]) lost first: "
CUT = {0: _B_GONE, 1: _B_GONE, 2: "rank 0 lost first: ", 3: "rank 0 lost first: "}
NAN = r"(exit code 1|uncaught exception: RuntimeError: the loss is nan), on nodeb \(node 1, local rank 1, process \d+\)"

FAULTS = [
    Fault("exception", "uncaught exception", all_but([3], FAILED + NAN), 1, act="exception"),
    Fault("exit", "`sys.exit(3)`", all_but([3], FAILED + "exit code 3"), 3, act="exit"),
    Fault("system-exit", "`raise SystemExit(3)`", all_but([3], FAILED + "exit code 3"), 3, act="system-exit"),
    Fault("os-exit", "`os._exit(4)`", all_but([3], FAILED + "exit code 4"), 4, act="os-exit"),
    Fault("sigkill", "SIGKILL", all_but([3], FAILED + "killed by SIGKILL"), 137, inject=_kill(signal.SIGKILL, 3)),
    Fault("segv", "SIGSEGV, of a null pointer", all_but([3], FAILED + "killed by SIGSEGV"), 139, act="segv"),
    Fault("abort", "`os.abort()`", all_but([3], FAILED + "killed by SIGABRT"), 134, act="abort"),
    Fault(
        "ulimit",
        "out of memory: `ulimit -v`, so MemoryError",
        all_but([3], FAILED + "(exit code 1|uncaught exception: MemoryError)"),
        1,
        act="ulimit",
    ),
    Fault(
        "cgroup",
        "out of memory: a cgroup's limit, so the kernel kills",
        all_but([3], FAILED + "killed by SIGKILL"),
        137,
        act="cgroup",
        inject=_eat_in_a_group,
        after=_remove_group,
    ),
    Fault(
        "rank-0",
        "rank 0: SIGKILL",
        all_but([0], "rank 0 failed first: killed by SIGKILL"),
        137,
        culprits=(0,),
        inject=_kill(signal.SIGKILL, 0),
    ),
    Fault(
        "watcher-0",
        "rank 0: SIGKILL for its wrapper, or the guard of `init`",
        all_but([0], "rank 0 lost first: "),
        None,
        culprits=(0,),
        inject=_kill_watcher,
    ),
    Fault("host", "nodeb: SIGKILL for all its processes", all_but([2, 3], HOST_GONE), LOST, (2, 3), inject=_kill_host),
    Fault(
        "link",
        "nodeb: link down",
        CUT,
        LOST,
        (2, 3),
        inject=_cut_link,
        env=QUIET,
        after=_mend_link,
        silence=True,
        cut=True,
    ),
    Fault(
        "drop-to-0",
        "packets from nodeb to nodea dropped",
        CUT,
        LOST,
        (2, 3),
        inject=_drop("nodeb", "nodea"),
        env=QUIET,
        after=_let_pass("nodeb", "nodea"),
        silence=True,
    ),
    Fault(
        "drop-from-0",
        "packets from nodea to nodeb dropped",
        CUT,
        LOST,
        (2, 3),
        inject=_drop("nodea", "nodeb"),
        env=QUIET,
        after=_let_pass("nodea", "nodeb"),
        silence=True,
    ),
    Fault("stop-5", "SIGSTOP for 5 s, bound 15 s", inject=_stop_for_a_while),
    Fault(
        "stop",
        "SIGSTOP for ever",
        all_but([3], FAILED + "stopped by a signal"),
        143,
        inject=_kill(signal.SIGSTOP, 3),
        env=QUIET,
        silence=True,
    ),
    Fault(
        "freeze",
        "SIGSTOP for ever, also for its wrapper or guard",
        all_but([3], "rank 3 lost first: .*stopped or frozen"),
        LOST,
        inject=_freeze,
        env=QUIET,
        silence=True,
    ),
    Fault("hog", "Python's lock held for 6 s", act="hog", inject=_hold_the_lock, env=QUIET),
    Fault(
        "hog-survivor",
        "SIGKILL, while rank 1 holds Python's lock for ever",
        all_but([3], FAILED + "killed by SIGKILL"),
        137,
        act="hog-for-ever",
        actors=(1,),
        inject=_kill_beside_a_busy_rank,
    ),
    Fault(
        "two",
        "ranks 2 and 3 at once: SIGKILL",
        all_but([2, 3], "rank [23] failed first: killed by SIGKILL"),
        137,
        (2, 3),
        inject=_kill(signal.SIGKILL, 2, 3),
    ),
    Fault(
        "sigterm",
        "SIGTERM from outside",
        all_but([3], "stopped by SIGTERM from outside: rank 3 got it first"),
        143,
        inject=_stop_politely,
    ),
    Fault(
        "full",
        "`sys.exit(3)`, and the report's disk is full",
        all_but([3], FAILED + "exit code 3"),
        None,
        act="exit",
        env={"DISTBOOT_REPORT": "/tmp/disk/report.json"},
        before=_small_disk("size=4k"),
        after=_no_disk,
        once="warning: the report could not be written: .*No space left",
    ),
    Fault(
        "read-only",
        "`sys.exit(3)`, and the report's disk is read-only",
        all_but([3], FAILED + "exit code 3"),
        None,
        act="exit",
        env={"DISTBOOT_REPORT": "/tmp/disk/report.json"},
        before=_small_disk("ro"),
        after=_no_disk,
        once="warning: there will be no report: ",
    ),
    Fault("apart", "rank 3 ends well, 3 s before the others", act="apart", inject=_end_well),
    Fault("apart-0", "rank 0 ends well, 3 s before the others", act="apart", actors=(0,), inject=_end_well),
    Fault(
        "firewall",
        "a firewall closes the port of the lifeline",
        inject=_close_port,
        env=QUIET,
        after=_open_port,
        cut=True,
        once="rank 3 on nodeb: warning: .* goes on without the lifeline",
        well=(0, 0, None, None),
    ),
]
