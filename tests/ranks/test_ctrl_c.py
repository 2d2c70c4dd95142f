"""Ctrl-C of a job with restarts: what a script that catches, outlives or ignores it makes of the job."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from supervised import until

Interrupt = Callable[..., "tuple[subprocess.Popen[str], list[Path]]"]
_WRAPPER = (sys.executable, "-m", "distboot")


@pytest.fixture
def interrupt(clean_env: dict[str, str], tmp_path: Path) -> Interrupt:
    """Start a script, and send SIGINT to its wrapper once each rank has written its file."""

    def begin(
        script: str, options: Sequence[str], began: Sequence[str], before: Sequence[str] = ()
    ) -> tuple[subprocess.Popen[str], list[Path]]:
        (tmp_path / "train.py").write_text(script)
        job = subprocess.Popen(
            [*before, *_WRAPPER, *options, "train.py"],
            cwd=tmp_path,
            env=clean_env,
            stderr=subprocess.PIPE,
            text=True,
        )
        files = [tmp_path / name for name in began]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        job.send_signal(signal.SIGINT)
        return job, files

    return begin


_CAUGHT = """
import os, sys, time
try:
    open("began-" + os.environ["RANK"], "a").write("began\\n")
    time.sleep(60)
except KeyboardInterrupt:
    %s
"""


@pytest.mark.parametrize("options", [["--nproc-per-node", "2"], []], ids=["node", "alone"])
@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(1)", 1), ("raise RuntimeError('a worker is gone')", 1), ("os._exit(8)", 8)],
    ids=["exit", "exception", "_exit"],
)
def test_ctrl_c_that_a_script_catches_restarts_nothing(
    interrupt: Interrupt, options: list[str], end: str, code: int
) -> None:
    names = [f"began-{rank}" for rank in range(len(options) or 1)]
    job, began = interrupt(_CAUGHT % end, [*options, "--max-restarts", "3"], names)
    _, said = job.communicate(timeout=60)
    assert job.returncode == code, said
    assert [file.read_text() for file in began] == ["began\n"] * len(began)
    assert "stopped by an external SIGINT" in said
    assert "failed first" not in said


def test_ctrl_c_that_is_outlived_changes_nothing(interrupt: Interrupt, tmp_path: Path) -> None:
    """A rank is killed after it, and the other one loses its peer."""
    script = (
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "signal.signal(signal.SIGINT, lambda *_: open(f'handled-{rank}', 'w').close())\n"
        "open(f'began-{rank}', 'a').write('began\\n')\n"
        "if os.environ['DISTBOOT_RESTART_COUNT'] != '0':\n"
        "    sys.exit(0)\n"
        "while not os.path.exists('go'):\n"
        "    time.sleep(0.01)\n"
        "if rank == '1':\n"
        "    time.sleep(1)  # it is seen after the peer that has lost it\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "raise ConnectionResetError(104, 'Connection reset by peer')\n"
    )
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    job, began = interrupt(script, options, ["began-0", "began-1"])
    until(lambda: all((tmp_path / f"handled-{rank}").exists() for rank in range(2)))
    (tmp_path / "go").touch()
    _, said = job.communicate(timeout=60)
    assert job.returncode == 0, said
    assert [file.read_text() for file in began] == ["began\n" * 2] * 2


def test_ctrl_c_that_is_ignored_changes_nothing(interrupt: Interrupt, tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "is_first = os.environ['DISTBOOT_RESTART_COUNT'] == '0'\n"
        "open('began', 'a').write('began\\n')\n"
        "while is_first and not os.path.exists('go'):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3 * is_first)\n"
    )
    ignoring = ["sh", "-c", 'trap "" INT; exec "$0" "$@"']
    job, (began,) = interrupt(script, ["--max-restarts", "1"], ["began"], before=ignoring)
    (tmp_path / "go").touch()
    _, said = job.communicate(timeout=60)
    assert (job.returncode, began.read_text()) == (0, "began\n" * 2), said
