"""What the tests share: an environment without launchers, and running distboot as a user does."""

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensorflows
from captured import without_launchers
from horovods import write_scripts
from hosts import Hosts, Slurm
from launched import hosts_up
from ranks import Ranks, RunRanks, run_ranks, runner
from recorded import Get, machine
from rendezvous_peers import FakeRank0, Rank0, record
from supervised import Start, job
from tensorflows import QUIET, ByHand, by_rank

import distboot as package
from distboot.rendezvous.messages import Ready
from distboot.tools.doctor.machine import Machine

ROOT = Path(__file__).parent.parent  # of the repository, or of an sdist
# What is tested: in ROOT, or where the wheel is installed (environments.py)
PACKAGE = Path(package.__file__).parent


def pytest_configure() -> None:
    """Give the tests the signals of an ordinary shell: a background job of CI, or nohup, may have these ignored."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many tests run side by side with `-n auto`: more than there are CPUs, as they mostly wait; at most 8."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    if (
        config.getoption("markexpr") == "all"
    ):  # launchers, frameworks and faults, with limits of seconds
        return min(cpus, 6) + 2
    return min(cpus, 4) + 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Where several run side by side, those of a file stay together that makes something once for all of its tests."""
    from xdist.scheduler import LoadScopeScheduling

    shared = {
        path.name
        for path in Path(__file__).parent.rglob("test_*.py")
        if 'scope="module"' in path.read_text()
    }

    # Not --dist=loadgroup, which does nothing from pytest 9.2 on (pytest-xdist issue 1386).
    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.rpartition("/")[2] in shared else nodeid

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was not tested here, and why, in a line a reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(re.sub("^Skipped: ", "", str(report.longrepr[2])) for report in skipped)
    if reasons:
        terminalreporter.section("not tested here")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(
            f"{count:4} tests: {reason}" if count > 1 else f"   1 test:  {reason}"
        )


@pytest.fixture
def clean_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """This process's environment without any launcher, set up for MPI and threads on a small machine."""
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # A killed mpirun (4.1.4, 5.0.11) leaves files, and with them a later one that has its process id does not start.
    folder = str(tmp_path_factory.getbasetemp() / f"mpi{next(_MPI_FOLDERS)}")
    for_mpirun = {"OMPI_MCA_orte_tmpdir_base": folder, "PRTE_MCA_prte_tmpdir_base": folder}
    # Which takes longer to import than the rest of a pytest that a test starts
    no_hypothesis = {"PYTEST_ADDOPTS": "-p no:hypothesispytest"}
    return {**without_launchers(os.environ), **ours, **as_root, **for_mpirun, **no_hypothesis}


_MPI_FOLDERS = itertools.count()


# Below those that the kernel gives to outgoing connections; others for each of the tests that run side by side.
_FIRST_PORT = 12000 + 2500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_PORTS = itertools.cycle(random.sample(range(_FIRST_PORT, _FIRST_PORT + 2500), 2500))


@pytest.fixture
def port() -> int:
    """A port of this machine that nobody uses now."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port := next(_PORTS)))
            return port


@pytest.fixture(autouse=True)
def _begin_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open line that a test leaves on stderr is not ended in the next one of this process."""
    monkeypatch.setattr("distboot.base.text._is_line_open", False)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(clean_env: dict[str, str], tmp_path: Path) -> Run:
    """Run a command in an empty folder, with this as train.py and extra variables, bounded in time."""

    def run_it(
        *command: str, train: str | None = None, env: Mapping[str, str] = {}, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        if train is not None:
            (tmp_path / "train.py").write_text(train)
        return subprocess.run(
            command,
            env={**clean_env, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run_it


@pytest.fixture
def distboot(run: Run) -> Run:
    return partial(run, sys.executable, "-m", "distboot")


@pytest.fixture
def get(tmp_path: Path) -> Get:
    def it(name: str = "laptop", **changes: object) -> Machine:
        return machine(name, tmp_path, **changes)  # type: ignore[arg-type]

    return it


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up() as up:
        yield up


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    with Slurm.up(hosts) as up:
        yield up


@pytest.fixture
def start(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[Start]:
    """Starts a job, as `Job` has it; it ends with the test."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(
            job(clean_env, port, tmp_path, *arguments, **options)
        )


@pytest.fixture
def start_init(start: Start) -> Start:
    return partial(start, init=True)


@pytest.fixture
def by_hand(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[ByHand]:
    started: list[tensorflows.Ranks] = []

    def begin(
        script: str,
        ranks: int = 2,
        *,
        env: Mapping[str, str] = {},
        each: Sequence[Mapping[str, str]] = (),
        wrapper: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> tensorflows.Ranks:
        (tmp_path / "train.py").write_text(script)
        job = {**clean_env, **QUIET, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
        environs = [{**job, **own} for own in each or by_rank(ranks)]
        started.append(
            tensorflows.Ranks(
                tmp_path, [sys.executable, *wrapper, "train.py", *arguments], environs
            )
        )
        return started[-1]

    yield begin
    for one in started:
        one.end()


@pytest.fixture(name="run_ranks")
def _run_ranks(clean_env: dict[str, str], port: int, tmp_path: Path) -> RunRanks:
    return run_ranks(clean_env, port, tmp_path)


@pytest.fixture
def ranks(run_ranks: RunRanks) -> Ranks:
    return runner(run_ranks)


StartRank0 = Callable[..., Rank0]
Fake = Callable[[Callable[[socket.socket], object]], FakeRank0]


@pytest.fixture
def rank0() -> Iterator[StartRank0]:
    with ExitStack() as stack:

        def start(
            world_size: int,
            join_timeout: float = 20,
            secret: str = "",
            *,
            ready: Ready | None = None,
            **more: Any,
        ) -> Rank0:
            own = record(0, world_size, **more)
            return stack.enter_context(closing(Rank0(own, join_timeout, secret, ready=ready)))

        yield start


@pytest.fixture
def fake() -> Iterator[Fake]:
    """Somebody who listens where rank 0 is expected, and does to each connection what a function says."""
    with ExitStack() as stack:
        yield lambda talk: stack.enter_context(closing(FakeRank0(talk)))  # type: ignore[arg-type]


@pytest.fixture
def horovod_scripts(tmp_path: Path) -> None:
    write_scripts(tmp_path)


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI may have set what the wrapper has to."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
