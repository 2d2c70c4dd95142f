"""The matrix of hangs: a rank that lives and does not come, below the wrapper and with `init`, under every launcher.

`make test` takes one cell, `make test-all` three a hang. `make hangs` runs all of it, some 40 minutes, and writes
docs/hangs.md; with ARGS="-k …" only the cells that were run.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import faults_inject as do
import pytest
from faults_job import LAUNCHERS, RANKS, WAYS, Job, Process, job, processes, require
from hosts import Hosts
from launched import needs_hosts, needs_torch
from page_of_cells import Tables

pytestmark = [needs_hosts, needs_torch]

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "hangs.md"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_HANGS"))
AFTER = 3  # seconds: DISTBOOT_LATE_AFTER
BOUND = AFTER + 5
ALL_REDUCE = r"all_reduce \(worker.py:\d+\)"


@dataclass(frozen=True)
class Hang:
    """A row of the table."""

    name: str  # in the ids of the tests, and for hangs_worker.py
    title: str  # in the table
    says: str  # what rank 0 prints after "distboot: rank 0 on nodea: ", a regular expression
    culprits: tuple[int, ...] = (3,)  # the ranks that hang
    inject: Callable[[Job], object] = lambda job: job.go([3])  # makes it happen
    after: Callable[[Hosts], object] = do.nothing  # undoes it


def _late(where: str, counts: str = ", collective operation ") -> str:
    return (
        rf"waiting for rank 3 \(nodeb\) for \d+ s: it is {where}; ranks 0-2 wait in "
        rf"{ALL_REDUCE}{counts}"
    )


def _at(function: str) -> str:
    return rf"in {function} \(worker.py:\d+\)"


def stop(job: Job) -> None:
    job.send(signal.SIGSTOP, job.scripts[3])


def stop_inside(job: Job) -> None:
    job.go([0, 1, 2])  # they sleep for two seconds
    time.sleep(1)
    stop(job)


def signal_worker(number: int) -> Callable[[Job], None]:
    def inject(job: Job) -> None:
        pid = int((job.folder / "worker.3").read_text())
        job.send(number, Process(processes(job.hosts, "nodeb")[pid]))

    return inject


def keep_packets_of_training(job: Job) -> None:
    """Between the hosts only the port at which the ranks meet stays open."""
    port = do.supervision_port(job)
    for host, other, of in (("nodea", "nodeb", "sport"), ("nodeb", "nodea", "dport")):
        job.shell(
            host, f"ip rule add pref 1 ipproto tcp {of} {port} to {do.ADDRESSES[other]} lookup main"
        )
        job.shell(host, f"ip rule add pref 2 ipproto tcp to {do.ADDRESSES[other]} blackhole")
    job.send(0)  # the clock


def let_packets_pass(hosts: Hosts) -> None:
    for host in do.ADDRESSES:
        hosts.run(host, ["sh", "-c", "ip rule del pref 1; ip rule del pref 2"])


def mount_and_go(job: Job) -> None:
    mount = job.hosts.command(
        "nodeb", [sys.executable, str(job.hosts.shared / "hangs_fuse.py"), "/tmp/stuck"]
    )
    server = subprocess.Popen(mount, env=job.hosts.environment(), start_new_session=True)
    mounted = ["grep", "-q", " /tmp/stuck fuse ", "/proc/mounts"]
    job.await_(lambda: job.hosts.run("nodeb", mounted).returncode == 0, 20, "the mount")
    job.beside.append(server)
    job.go([3])
    stat = Path(f"/proc/{job.scripts[3].pid}/stat")
    job.await_(
        lambda: Path(f"/proc/{job.scripts[3].pid}/wchan").read_text() == "request_wait_answer",
        20,
        "it to wait",
    )
    job.send(signal.SIGURG, job.scripts[3])  # until then it can be interrupted
    job.await_(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D", 20, "state D")


def unmount(hosts: Hosts) -> None:
    hosts.run("nodeb", ["umount", "-l", "/tmp/stuck"])


HANGS = [
    Hang(
        "skip",
        "skips a collective operation, and waits in the next one",
        (
            r"waiting for each other for \d+ s: rank 3 waits in barrier \(\S+\), ranks "
            r"0-2 wait in all_reduce \(\S+\)"
        ),
    ),
    Hang(
        "other",
        "takes another collective operation",
        (
            r"waiting for each other for \d+ s: rank 3 waits in (broadcast|all_reduce) "
            r"\(\S+\), ranks 0-2 wait in all_red"
        ),
    ),
    Hang("loader", "sleeps in its data loader", _late(_at("read_slowly"))),
    Hang("lock-in-c", "C code holds Python's lock", _late(_at("match"))),
    Hang(
        "state-d",
        "state D: opens a file of a FUSE mount that does not answer",
        _late(rf"({_at('read_a_file')}, )?in the kernel, where no signal reaches it( \(\w+\))?"),
        inject=mount_and_go,
        after=unmount,
    ),
    Hang(
        "stopped",
        "stopped by a signal",
        _late(r"(in \S+ \(\S+\), )?stopped by a signal.*?", ""),
        inject=stop,
    ),
    Hang(
        "stopped-inside",
        "stopped by a signal in a collective operation",
        _late(rf"(in {ALL_REDUCE}, )?stopped by a signal.*?", ""),
        culprits=(0, 1, 2),
        inject=stop_inside,
    ),
    Hang("deadlock", "waits for a lock that it holds itself", _late(_at("take_a_lock"))),
    Hang(
        "packets",
        "the network drops the packets of the training",
        (
            r"waiting for each other for \d+ s: ranks 0-3 wait in all_reduce "
            r"\(worker.py:\d+\); the network "
        ),
        inject=keep_packets_of_training,
        after=let_packets_pass,
    ),
    Hang(
        "worker-sleeps",
        "a worker of its data loader sleeps",
        _late(r"in __next__ \(worker.py:\d+\), its worker in read_slowly \(worker.py:\d+\)"),
    ),
    Hang(
        "worker-stopped",
        "a worker of its data loader is stopped",
        _late(r"in __next__ \(worker.py:\d+\), its worker stopped by a signal( \(\w+\))?"),
        inject=signal_worker(signal.SIGSTOP),
    ),
    Hang(
        "worker-killed",
        "a worker of its data loader is killed",
        (
            r"rank 3 failed first: (uncaught exception: RuntimeError: DataLoader worker \("
            r"|RuntimeError: DataLoader worker \(pid\(s\) \d+\) exited unexpectedly .*….*"
            r"signal: Killed\.\), "
            r"|uncaught exception: ConnectionResetError: ).*on"
        ),
        inject=signal_worker(signal.SIGKILL),
    ),
    Hang(
        "all",
        "all ranks wait for locks that they hold themselves",
        rf"no rank has moved for \d+ s: ranks 0-3 are {_at('take_a_lock')}",
        culprits=RANKS,
        inject=lambda job: job.go(RANKS),
    ),
]


def run(hosts: Hosts, hang: Hang, way: str, launcher: str, index: int) -> tuple[float, str]:
    """The seconds until rank 0 has said what it should, or all that was printed; and that line."""
    says = re.compile(rf"^.*distboot: rank \d on nodea: ({hang.says}.*)$", re.MULTILINE)
    with job(hosts, hosts.shared / f"hang-{index}", way, launcher) as one, ExitStack() as undo:
        undo.callback(hang.after, hosts)
        one.start(hang.name, hang.culprits, 29500 + index, {"DISTBOOT_LATE_AFTER": str(AFTER)})
        one.await_ready()
        hang.inject(one)
        end = time.monotonic() + 4 * BOUND
        found = None
        while found is None and time.monotonic() < end:
            time.sleep(0.05)
            found = says.search(one.output())
        seconds = time.monotonic() - one.began
        undo.close()
        return seconds, found[
            1
        ] if found else f"nothing that matches {hang.says}:\n{one.output()[-6000:]}"


_TABLES = Tables("rank 3 …", {hang.name: hang.title for hang in HANGS}, WAYS, LAUNCHERS)
_texts: dict[tuple[str, str, str], str] = {}
_index = itertools.count()


# In `make test`: the four ranks of a cell import torch, 12 seconds of CPU. tests/ranks/test_late.py has a job with
# `init`, and with tests/unit/test_stacks.py what is printed of each hang.
_QUICK = ("lock-in-c", "wrapper", "mpirun")


def _cells() -> Iterator[object]:
    for number, (hang, way, launcher) in enumerate(itertools.product(HANGS, WAYS, LAUNCHERS)):
        # So that each hang is tried in all ways and launchers, as far as it goes
        tier = (number // 8 + number) % 8
        if WRITE or tier < 3:
            marks = () if (hang.name, way, launcher) == _QUICK else pytest.mark.all
            yield pytest.param(hang, way, launcher, id=f"{hang.name}-{way}-{launcher}", marks=marks)


@pytest.mark.parametrize(("hang", "way", "launcher"), list(_cells()))
def test_hang(
    hosts: Hosts, request: pytest.FixtureRequest, hang: Hang, way: str, launcher: str
) -> None:
    require(launcher, request)
    shutil.copy(HERE / "hangs_worker.py", hosts.shared / "worker.py")
    shutil.copy(HERE / "hangs_fuse.py", hosts.shared)
    seconds, said = run(hosts, hang, way, launcher, next(_index))
    text = f"{seconds:.1f} s"
    key = (hang.name, way, launcher)
    _texts[key] = f"**{text}**"  # unless it is as it should be
    assert re.match(hang.says, said), said
    assert seconds < (BOUND if WRITE else 4 * BOUND)  # a busy machine takes longer
    _texts[key] = text


def test_page_has_all_hangs() -> None:
    assert f"`DISTBOOT_LATE_AFTER` is {AFTER}" in _TABLES.checked(DOCS, _texts, write=WRITE)
