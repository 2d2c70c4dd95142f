"""A shell is the process of the rank, and the Python that trains is below it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Run
from launched import needs_torch
from supervised import until
from wrappers import HOST

TWO = ("run", "--nproc-per-node", "2", "--")
# Rank 1 ends as it is told; rank 0 waits for it, and is the victim.
TRAIN = """
import os, signal, sys
import distboot
with distboot.init("none", join_timeout=60) as ctx:
    if ctx.rank == 1:
        exec(sys.argv[1])
    ctx.barrier()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RAISES = "raise ValueError('loss is NaN')"
HIDDEN = "exit code 0, although Python below it failed: uncaught exception: ValueError: loss is NaN"


def _sh(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text.replace("python", sys.executable), "sh")


@pytest.mark.parametrize(
    "text",
    ['python train.py "$1"; echo bye', 'python train.py "$1" | cat'],
    ids=["command after it", "pipe"],
)
def test_failure_that_a_shell_hides_is_named(distboot: Run, text: str) -> None:
    done = distboot(*TWO, *_sh(text), RAISES, train=TRAIN)
    assert done.returncode == 0  # as the shell has it
    assert f"warning: {HIDDEN}, on {HOST}, in <module> (train.py:" in done.stderr
    assert "a shell passes its exit code on with set -e (bash: set -eo pipefail)" in done.stderr
    assert f": all ended, but rank 1: {HIDDEN}" in done.stderr


def test_report_has_the_failure_that_is_hidden(distboot: Run) -> None:
    command = _sh('python train.py "$1"; true')
    distboot(*TWO[:-1], "--report", "job.json", "--", *command, RAISES, train=TRAIN)
    assert f": all ended, but rank 1: {HIDDEN}" in distboot("report", "job.jsonl").stdout


def test_python_that_does_not_train_may_fail(distboot: Run) -> None:
    text = 'python -c "import nothing_of_that_name" 2>/dev/null || true; python train.py "$1"'
    done = distboot(*TWO, *_sh(text), "pass", train=TRAIN)
    assert (done.returncode, ": all ended well; " in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (KILL, "exit code 137 (SIGKILL: out of memory, or kill -9)"),
        ("os._exit(1)", "exit code 1"),
    ],
    ids=["killed", "exit"],
)
def test_python_that_does_not_train_explains_nothing(distboot: Run, end: str, said: str) -> None:
    text = 'python -c "import nothing_of_that_name" 2>/dev/null; python train.py "$1"; exit $?'
    done = distboot(*TWO, *_sh(text), end, train=TRAIN)
    assert f"rank 1 failed first: {said}, on {HOST}\n" in done.stderr
    assert "nothing_of_that_name" not in done.stderr


@pytest.mark.all
@needs_torch
def test_probe_of_torch_is_no_training(distboot: Run) -> None:
    probe = "import torch, nothing_of_that_name"
    text = f'python -c "{probe}" 2>/dev/null || true; python -c "pass"'
    done = distboot(*TWO, *_sh(text))
    assert (done.returncode, ": all ended well; " in done.stderr) == (0, True), done.stderr


def test_python_that_trains_after_a_failure_counts(distboot: Run) -> None:
    alone = "env -u DISTBOOT_AGENT DISTBOOT_LAUNCHER=none"
    text = f'{alone} python -c "import distboot; distboot.init(\\"none\\"); 1 / 0" 2>/dev/null; '
    done = distboot(*TWO, *_sh(text + 'python train.py "$1"'), "pass", train=TRAIN)
    assert (done.returncode, ": all ended well; " in done.stderr) == (0, True), done.stderr


def test_victim_below_a_shell_is_no_cause(distboot: Run) -> None:
    done = distboot(*TWO, *_sh('set -e; python train.py "$1"; true'), "sys.exit(0)", train=TRAIN)
    assert done.returncode == 1
    assert "rank 1 exited with code 0 while 1 other rank was still training" in done.stderr
    assert "rank 0 failed first" not in done.stderr


def test_victim_at_a_barrier_prints_no_traceback(distboot: Run) -> None:
    done = distboot(*TWO[:-1], "train.py", "sys.exit(0)", train=TRAIN)
    assert "rank 1 exited with code 0 while 1 other rank was still training" in done.stderr
    assert "Traceback" not in done.stderr


WAITS = """
import time
from pathlib import Path
import distboot
with distboot.init("none", join_timeout=60) as ctx:
    if ctx.rank == 1:
        while not Path("named").exists():
            time.sleep(0.05)
    ctx.barrier()
"""


@pytest.fixture
def waiting(clean_env: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job whose rank 1 is late at a barrier until there is a file `named`."""
    (tmp_path / "train.py").write_text(WAITS)
    with (tmp_path / "said").open("wb") as file:
        job = subprocess.Popen(
            [sys.executable, "-m", "distboot", *TWO, *_sh("python train.py; true")],
            cwd=tmp_path,
            env={**clean_env, "DISTBOOT_LATE_AFTER": "2"},
            stderr=file,
        )
    yield job
    job.terminate()
    job.wait(60)


def test_late_rank_below_a_shell_is_named(waiting: subprocess.Popen[bytes], tmp_path: Path) -> None:
    said = tmp_path / "said"
    until(lambda: "waiting for rank 1" in said.read_text())
    (tmp_path / "named").touch()
    assert waiting.wait(60) == 0
    assert "it is in <module> (train.py:8)" in said.read_text()
    assert "rank 0 waits in barrier (train.py:9)" in said.read_text()


def test_hang_below_a_shell_is_stopped(distboot: Run) -> None:
    environ = {"DISTBOOT_LATE_AFTER": "1", "DISTBOOT_HANG": "stop", "DISTBOOT_HANG_AFTER": "3"}
    done = distboot(*TWO, *_sh("python train.py; true"), train=WAITS, env=environ)
    assert done.returncode != 0
    assert "rank 1 (" in done.stderr
    assert "held up the job for" in done.stderr


def test_kill_below_a_shell_is_explained(distboot: Run) -> None:
    done = distboot(*TWO, *_sh('python train.py "$1"; exit $?'), KILL, train=TRAIN)
    assert done.returncode == 137
    said = "rank 1 failed first: exit code 137 (SIGKILL: out of memory, or kill -9)"
    assert said in done.stderr


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_sigint_reaches_python_below_a_shell(
    clean_env: dict[str, str], tmp_path: Path, shell: str
) -> None:
    waits = "import time; open('began', 'w').close(); time.sleep(300)"
    command = (shell, "-c", f'{sys.executable} -c "$1"; echo after', shell, waits)
    job = subprocess.Popen(
        [sys.executable, "-m", "distboot", "--", *command],
        cwd=tmp_path,
        env=clean_env,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    until((tmp_path / "began").exists)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    assert job.returncode == 130
