"""What the tests share: an environment without launchers, and running distboot as a user does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gates
import pytest
from captured import without_launchers
from horovods import write_scripts
from hosts import Hosts, Slurm
from launched import PLAIN, WHO
from lifelines import DEFAULT, Job, Start, job
from recorded import Get, machine
from relays import LARGE
from rollcalls import OURS, Rank0, record
from tensorflows import QUIET, ByHand, Ranks, by_rank, started

import distboot as package
from distboot.doctor.machine import Machine
from distboot.rollcall.wire import Membership

ROOT = Path(__file__).parent.parent  # of the repository, or of an sdist
PACKAGE = Path(package.__file__).parent  # what is tested: in ROOT, or where the wheel is installed (tests/dist.sh)


def pytest_configure() -> None:
    """Give the tests the signals of an ordinary shell: a background job of CI, or nohup, may have these ignored."""
    pairs = (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    )
    for number, handler in pairs:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def clean_env() -> dict[str, str]:
    """This process's environment without any launcher, set up for MPI and threads on a small machine."""
    env = without_launchers(os.environ)
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


@pytest.fixture
def port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    return number


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(clean_env: dict[str, str], tmp_path: Path) -> Run:
    """Run a command in an empty folder, with extra variables, bounded in time."""

    def run_it(
        *command: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**clean_env, **(env or {})}, cwd=tmp_path, capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    return run_it


@pytest.fixture
def distboot(run: Run) -> Run:
    """Run `python -m distboot …`."""

    def run_it(
        *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "-m", "distboot", *arguments, env=env, timeout=timeout)

    return run_it


@pytest.fixture
def get(tmp_path: Path) -> Get:
    """One of the machines in tests/machines, with changes."""

    def it(name: str = "laptop", **changes: object) -> Machine:
        return machine(name, tmp_path, **changes)  # type: ignore[arg-type]

    return it


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts.up() as up:
        (up.shared / "who.py").write_text(WHO)
        (up.shared / "plain.py").write_text(PLAIN)
        yield up


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    with Slurm.up(hosts) as up:
        yield up


@contextmanager
def _starter(env: dict[str, str], port: int, folder: Path, *, init: bool) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(
            script: str = DEFAULT,
            ranks: int = 3,
            stderr: int | None = None,
            before: Sequence[str] = (),
            **more: str,
        ) -> Job:
            return stack.enter_context(
                job({**env, **more}, port, folder, script, ranks, init=init, stderr=stderr, before=before)
            )

        yield begin


@pytest.fixture
def start(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[Start]:
    """Starts a job of unmodified scripts under the wrapper."""
    with _starter(clean_env, port, tmp_path, init=False) as begin:
        yield begin


@pytest.fixture
def start_init(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[Start]:
    """Starts a job of scripts that call `init`."""
    with _starter(clean_env, port, tmp_path, init=True) as begin:
        yield begin


@pytest.fixture
def by_hand(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[ByHand]:
    with ExitStack() as stack:

        def begin(
            script: str,
            ranks: int = 2,
            *,
            env: Mapping[str, str] = {},
            each: Sequence[Mapping[str, str]] = (),
            wrapper: Sequence[str] = (),
        ) -> Ranks:
            (tmp_path / "train.py").write_text(script)
            job = {**clean_env, **QUIET, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
            environs = [{**job, **own} for own in each or by_rank(ranks)]
            return stack.enter_context(started(Ranks(tmp_path, [sys.executable, *wrapper, "train.py"], environs)))

        yield begin


@pytest.fixture
def ranks(clean_env: dict[str, str], port: int, tmp_path: Path) -> gates.Ranks:
    """Runs a script as so many ranks, as `gates.runner` says."""
    return gates.runner(clean_env, port, tmp_path)


@pytest.fixture
def large(clean_env: dict[str, str], tmp_path: Path, port: int) -> dict[str, str]:
    """The environment of a job in which two ranks are many."""
    (tmp_path / "sitecustomize.py").write_text(LARGE)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    return {**clean_env, **address, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


@pytest.fixture
def rank0() -> Iterator[Callable[..., Rank0]]:
    """Rank 0 of a world of this size."""
    started: list[Rank0] = []

    def start(world_size: int, join_timeout: float = 20, membership: Membership = OURS, **more: Any) -> Rank0:
        started.append(Rank0(record(0, world_size, **more), join_timeout, membership))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def horovod_scripts(tmp_path: Path) -> None:
    """The scripts of Horovod's tests, in the folder where `run` runs."""
    write_scripts(tmp_path)


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI may have set what the wrapper has to."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
