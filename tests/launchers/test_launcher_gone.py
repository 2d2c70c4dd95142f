"""A launcher that is killed outright: its ranks end, and say so; what only looks like that ends nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from horovods import needs_horovod
from inside import find, proc_stat
from launched import (
    BIN,
    MPI_ENV,
    MPICH,
    OPENMPI4,
    TWO_OF_MPIRUN,
    needs_mpich,
    needs_mpirun,
    needs_openmpi4,
    needs_torch,
)
from supervised import until
from wrappers import alive

_TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--no-python"]
_AGENT = [sys.executable, "-m", "torch.distributed.run", *_TORCHRUN[1:]]
# What starts two ranks, the signal that it does not survive, and how many processes below it is the one to kill.
KILLED = [
    pytest.param(TWO_OF_MPIRUN, signal.SIGKILL, 0, marks=needs_mpirun, id="mpirun"),
    pytest.param(
        [str(OPENMPI4), "--oversubscribe", "-n", "2"],
        signal.SIGKILL,
        0,
        marks=needs_openmpi4,
        id="mpirun 4",
    ),
    pytest.param(
        [str(MPICH), "-n", "2"], signal.SIGKILL, 1, marks=needs_mpich, id="proxy of mpiexec"
    ),
    pytest.param(_TORCHRUN, signal.SIGKILL, 0, marks=needs_torch, id="torchrun"),
    pytest.param(
        _AGENT, signal.SIGUSR1, 0, marks=[needs_torch, pytest.mark.all], id="torchrun, USR1"
    ),
    pytest.param(
        [str(BIN / "horovodrun"), "--gloo", "-np", "2"],
        signal.SIGKILL,
        0,
        marks=[needs_horovod, pytest.mark.all],
        id="horovodrun",
    ),
]
_SCRIPT = """
import os, sys, time
if {init}:
    import distboot
    rank = distboot.init("none").rank
else:
    rank = os.environ["RANK"]
open(f"pid-{{rank}}.part", "w").write(str(os.getpid()))
os.rename(f"pid-{{rank}}.part", f"pid-{{rank}}")
while not os.path.exists("end"):
    time.sleep(0.02)
open(f"end-{{rank}}", "w")
"""


class Launched:
    """Two ranks below a launcher, with what they print in a file: the pipe of a launcher that is killed is closed."""

    def __init__(
        self, folder: Path, env: dict[str, str], port: int, launcher: Sequence[str], *, init: bool
    ) -> None:
        self.folder = folder
        self.launcher = launcher
        self.init = init
        (folder / "train.py").write_text(_SCRIPT.format(init=init))
        self.env = {**env, **MPI_ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.env |= {"DISTBOOT_REPORT": str(folder / "report.json"), "DISTBOOT_GRACE": "5"}
        self.rank = [sys.executable, *([] if init else ["-m", "distboot"]), "train.py"]

    def start(self, shell: str = 'exec "$@"') -> None:
        """`shell`: what is between the launcher and a rank, a script that gets the command of the rank."""
        between = ["sh", "-c", f"exec >> output 2>&1; {shell}", "sh"]
        with (self.folder / "launcher").open("wb") as output:
            self.process = subprocess.Popen(
                [*self.launcher, *between, *self.rank],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        paths = [self.folder / f"pid-{rank}" for rank in (0, 1)]
        until(lambda: all(path.exists() for path in paths))
        return [int(path.read_text()) for path in paths]

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    def headline(self) -> str:
        path = self.folder / "report.json"
        until(path.exists, 20)
        return str(json.loads(path.read_text())["headline"])

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for path in self.folder.glob("pid-[01]"):
            with suppress(OSError):
                if os.readlink(f"/proc/{path.read_text()}/cwd") == str(self.folder.resolve()):
                    os.kill(int(path.read_text()), signal.SIGKILL)


Launch = Callable[..., Launched]


@pytest.fixture
def launch(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def make(launcher: Sequence[str], *, init: bool = False) -> Launched:
        started.append(Launched(tmp_path, clean_env, port, launcher, init=init))
        return started[-1]

    yield make
    for one in started:
        one.end()


def _below(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("init", [False, True], ids=["wrapper", "init"])
@pytest.mark.parametrize(("launcher", "number", "below"), KILLED)
def test_ranks_end_with_their_launcher(
    launch: Launch, launcher: list[str], number: int, below: int, init: bool
) -> None:
    job = launch(launcher, init=init)
    job.start()
    pids = job.pids()
    target = job.process.pid
    for _ in range(below):
        target = _below(target)
    os.kill(target, number)
    killed = time.monotonic()
    until(lambda: not any(map(alive, pids)), 10)
    assert time.monotonic() - killed < 2 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    with suppress(AssertionError):
        until(lambda: job.output().count("its launcher is gone: ") >= 2)
    assert job.output().count("its launcher is gone: ") >= 2, job.output()
    said = {line.partition("failed first: ")[2] for line in job.output().splitlines()} - {""}
    causes = {text for text in said if text.startswith("its launcher is gone: ")}
    assert len(causes) == 1, job.output()
    assert f"(process {target})" in causes.pop()
    assert "failed first: its launcher is gone: " in job.headline()


@pytest.mark.parametrize("init", [False, True], ids=["wrapper", "init"])
@needs_mpirun
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_launcher_that_ends_its_ranks_outlives_them(
    launch: Launch, init: bool, number: int
) -> None:
    job = launch(TWO_OF_MPIRUN, init=init)
    job.start()
    pids = job.pids()
    os.kill(job.process.pid, number)
    until(lambda: not any(map(alive, pids)), 10)
    # On a busy machine mpirun's SIGKILL may come first, 0.24 s later
    said = r"Stopped by an external SIGTERM: |Rank \d failed first: killed by SIGKILL \("
    assert re.match(said, job.headline()), job.output()
    assert "its launcher is gone" not in job.output()


@needs_mpirun
def test_rank_behind_a_shell_ends_with_its_launcher(launch: Launch) -> None:
    job = launch(TWO_OF_MPIRUN)
    job.start('"$@"; true')
    pids = job.pids()
    os.kill(job.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, pids)), 10)
    assert "its launcher is gone: " in job.output()


@needs_mpirun
def test_restarts_end_with_the_launcher(launch: Launch) -> None:
    job = launch(TWO_OF_MPIRUN)
    job.env["DISTBOOT_MAX_RESTARTS"] = "3"
    job.start()
    pids = job.pids()
    os.kill(job.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, pids)), 10)
    until(lambda: "no restart: the launcher of rank 0 is gone" in job.output())
    assert "its launcher is gone: " in job.headline()


@needs_mpirun
@pytest.mark.parametrize("detection", ["0", "1"])
def test_rank_alone_ends_with_its_launcher(launch: Launch, detection: str) -> None:
    """Without an agent, or with one that does not tell others of failures."""
    ranks = "2" if detection == "0" else "1"
    job = launch([*TWO_OF_MPIRUN[:-1], ranks])
    del job.env["DISTBOOT_REPORT"]
    job.env["DISTBOOT_FAILURE_DETECTION"] = detection
    job.start()
    path = job.folder / "pid-0"
    until(path.exists)
    os.kill(job.process.pid, signal.SIGKILL)
    until(lambda: not alive(int(path.read_text())), 10)
    until(lambda: "its launcher is gone: " in job.output())


@needs_mpirun
@pytest.mark.parametrize("init", [False, True], ids=["wrapper", "init"])
def test_rank_that_waits_ends_with_its_launcher(launch: Launch, init: bool) -> None:
    job = launch(TWO_OF_MPIRUN, init=init)
    # The other rank never comes
    job.start('[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec sleep 99; echo $$ > first; exec "$@"')
    until(lambda: "1/2 ranks joined" in job.output())
    os.kill(job.process.pid, signal.SIGKILL)
    first = int((job.folder / "first").read_text())
    until(lambda: not alive(first), 10)
    assert "error[launcher-gone]: rank 0 on " in job.output()


# What ends between the launcher and a rank, or stops, while the ranks go on.
_GOES_ON = {
    "a shell that leaves its job in the background": '"$@" & while [ ! -e gone ]; do sleep 0.1; done',
    "nohup": 'nohup "$@" & while [ ! -e gone ]; do sleep 0.1; done',
    "setsid": 'setsid "$@" & while [ ! -e gone ]; do sleep 0.1; done',
    "a double fork": '( ( "$@" & ) & ) ; while [ ! -e gone ]; do sleep 0.1; done',
}


@needs_mpirun
@pytest.mark.parametrize("init", [False, True], ids=["wrapper", "init"])
@pytest.mark.parametrize("how", _GOES_ON)
def test_launcher_that_released_a_rank_leaves_it(launch: Launch, how: str, init: bool) -> None:
    job = launch(TWO_OF_MPIRUN, init=init)
    # mpirun kills the group of what it has started, as it ends
    job.start(f"set -m; {_GOES_ON[how]}")
    pids = job.pids()
    (job.folder / "gone").touch()
    job.process.wait(20)
    (job.folder / "end").touch()
    until(lambda: not any(map(alive, pids)))
    assert all((job.folder / f"end-{rank}").exists() for rank in (0, 1)), job.output()
    assert "gone" not in job.output()


@needs_mpirun
def test_stopped_launcher_ends_nothing(launch: Launch) -> None:
    job = launch(TWO_OF_MPIRUN)
    job.start()
    pids = job.pids()
    os.kill(job.process.pid, signal.SIGSTOP)
    until(lambda: proc_stat(job.process.pid)[:1] == ["T"])
    (job.folder / "end").touch()
    until(lambda: not any(map(alive, pids)))
    os.kill(job.process.pid, signal.SIGCONT)
    assert job.process.wait(20) == 0
    assert "gone" not in job.output()


def test_only_a_program_of_the_launcher_is_watched() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 99; true"]) as shell:
        until(lambda: Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text())
        rank = _below(shell.pid)
        found = find(rank, ("sh",))
        assert found is not None
        assert not found.has_left_rank()
        assert find(rank, ("mpirun", "torchrun")) is None
        assert find(rank, ()) is None
        shell.kill()
        until(found.has_left_rank, 10)
        os.kill(rank, signal.SIGKILL)
