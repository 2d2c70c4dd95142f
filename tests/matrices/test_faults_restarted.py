"""The faults of the matrix once more with --max-restarts: the training goes on, to the loss of an unbroken run."""

import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import faults_inject as do
import pytest
from faults import A_TO_B, B_TO_A, FAULTS, QUIET
from faults_job import Job, job, require
from hosts import Hosts
from launched import needs_hosts, needs_torch

pytestmark = [pytest.mark.all, needs_hosts, needs_torch]
WRITE = bool(os.environ.get("DISTBOOT_WRITE_FAULTS"))
WORKER = Path(__file__).parent / "faults_worker.py"
LAUNCHERS = ("torchrun", "mpirun", "srun", "plain", "per node")
ENDS_A_RANK = (
    *(
        "exception",
        "exit",
        "system-exit",
        "os-exit",
        "sigkill",
        "segv",
        "abort",
        "ulimit",
        "cgroup",
    ),
    *("rank-0", "stop", "hog-survivor", "two", "full"),
)
UNDER_EACH = ("sigkill", "rank-0")
# DistributedDataParallel takes twice as long to start
WITH_DDP = {("rank-0", "plain"), *(("sigkill", launcher) for launcher in LAUNCHERS)}
_index = itertools.count()
_LIMIT = 90  # seconds for a training to end
_ENV = {"DISTBOOT_MAX_RESTARTS": "2", "DISTBOOT_SECRET": "of the job"}


# Relative; a resumed run adds the gradients of 4 ranks in another order from its second step on, as
# DistributedDataParallel lays its buckets out anew, and the last bits of a float32 differ. A step
# that is lost changes the loss by 30 % and more.
_TOLERANCE = 1e-2


def _loss(one: Job) -> tuple[int, float]:
    """From which step the last round went on, and the loss at the end."""
    one.exits(_LIMIT)
    assert (one.folder / "loss").exists(), one.output()[-8000:]
    begin, loss = (one.folder / "loss").read_text().split()
    return int(begin), float(loss)


@pytest.fixture(scope="module")
def unbroken(hosts: Hosts) -> float:
    """The loss of a training that nothing interrupts."""
    shutil.copy(WORKER, hosts.shared / "worker.py")
    with job(hosts, hosts.shared / "unbroken", "restarts", "plain") as one:
        one.start("unbroken", (3,), 29400, {})
        begin, loss = _loss(one)
    assert begin == 0
    return loss


def _goes_on(one: Job, unbroken: float) -> None:
    codes = one.exits(_LIMIT)
    sys.stdout.write(one.output()[-8000:])
    assert set(codes) == {0}, codes
    begin, loss = _loss(one)
    assert begin == 10
    assert loss == pytest.approx(unbroken, rel=_TOLERANCE)


def _cells() -> Iterator[object]:
    """Each fault under one launcher, and some under each; `make faults` has all."""
    for number, name in enumerate(ENDS_A_RANK):
        for launcher in LAUNCHERS:
            if WRITE or name in UNDER_EACH or launcher == LAUNCHERS[number % len(LAUNCHERS)]:
                yield pytest.param(name, launcher, id=f"{name}-{launcher}")


@pytest.mark.parametrize(("name", "launcher"), list(_cells()))
def test_training_goes_on(
    hosts: Hosts, request: pytest.FixtureRequest, unbroken: float, name: str, launcher: str
) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    require(launcher, request, fault.missing)
    index = next(_index)
    env = {**_ENV, **fault.env}
    if (name, launcher) in WITH_DDP:
        env["FAULTS_DDP"] = "1"
    with job(hosts, hosts.shared / f"restarted-{index}", "restarts", launcher) as one:
        fault.before(hosts)
        try:
            one.start(fault.act, fault.actors, 29600 + index, env)
            one.await_ready()
            fault.inject(one)
            _goes_on(one, unbroken)
        finally:
            fault.after(hosts)
        restarted = (
            r"(?:rank|node) 0 on nodea: restart 1 of 2: round 0 "
            r"ended after .*, as ranks? \S+ failed"
        )
        assert len(re.findall(restarted, one.output())) == 1
        report = one.report(0.0)
        if report is not None:
            (failed,) = report["failed_rounds"]
            assert set(failed["ranks"]) <= {*fault.culprits}


OUTLIVED = [
    (how, name) for how in ("ignored", "handled") for name in ("SIGHUP", "SIGINT", "SIGQUIT")
]


def _outlived_cells() -> Iterator[object]:
    """Each signal under one launcher; `make faults` has all."""
    for number, (how, name) in enumerate(OUTLIVED):
        for launcher in LAUNCHERS:
            if WRITE or launcher == LAUNCHERS[number % len(LAUNCHERS)]:
                yield pytest.param((how, name), launcher, id=f"{name}-{how}-{launcher}")


@pytest.mark.parametrize(("outlived", "launcher"), list(_outlived_cells()))
def test_outlived_signal_changes_no_restart(
    hosts: Hosts,
    request: pytest.FixtureRequest,
    unbroken: float,
    outlived: tuple[str, str],
    launcher: str,
) -> None:
    """Every rank gets it from its wrapper; later one is killed."""
    require(launcher, request)
    how, name = outlived
    index = next(_index)
    with job(hosts, hosts.shared / f"outlived-{index}", "restarts", launcher) as one:
        env = {**_ENV, "FAULTS_OUTLIVES": how}
        one.start("none", (3,), 29600 + index, env)
        one.await_ready()
        watchers = {each.pid: each for each in one.members() if each.watches}
        one.send(getattr(signal, name), *watchers.values())
        do.kill(signal.SIGKILL, 3)(one)
        _goes_on(one, unbroken)
        assert len(re.findall("(?:rank|node) 0 on nodea: restart 1 of 2: ", one.output())) == 1


def _replaced(*indices: int) -> Callable[[Job], None]:
    """Kill what runs for these, with the scripts, and start it once more."""

    def inject(one: Job) -> None:
        for index in indices:
            watcher = one.watcher_of(index)
            one.send(9, watcher, one.scripts[index])
        one.again(*indices)

    return inject


COMES_AGAIN: dict[str, tuple[Callable[[Job], None], Callable[[Hosts], object]]] = {
    "an agent, started again": (_replaced(3), do.nothing),
    "rank 0's agent, started again": (_replaced(0), do.nothing),
    "a host, started again": (_replaced(2, 3), do.nothing),
    "all but rank 1, which alone knows of the round": (_replaced(2, 3, 0), do.nothing),
    "the link of a host": (do.cut_link, do.mend_link),
    "packets to rank 0": (do.drop(*B_TO_A), do.let_pass(*B_TO_A)),
    "packets from rank 0": (do.drop(*A_TO_B), do.let_pass(*A_TO_B)),
}


@pytest.mark.parametrize("name", COMES_AGAIN)
def test_what_is_lost_comes_again(hosts: Hosts, unbroken: float, name: str) -> None:
    inject, mend = COMES_AGAIN[name]
    index = next(_index)
    with job(hosts, hosts.shared / f"again-{index}", "restarts", "plain") as one:
        try:
            one.start("none", (3,), 29600 + index, {**_ENV, **QUIET})
            one.await_ready()
            inject(one)
            if mend is not do.nothing:  # all see it, and end their ranks
                one.await_end_of([0, 1, 2, 3], 30)
        finally:
            mend(hosts)
        _goes_on(one, unbroken)
