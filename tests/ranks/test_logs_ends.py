"""`--log-prefix` and `--log-dir` when something ends: children are killed, readers stop or go away, disks fill up."""

import os
import select
import signal
import sys
from pathlib import Path

import pytest
from conftest import Run
from supervised import until
from wrappers import HOST, PREFIX, PREFIXED, alive, ends_of, log_of, python, read_from, wrapped

BY_WHOM = {"KILL": " (out of memory, or kill -9)"}
pytestmark = pytest.mark.usefixtures("buffered")


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("ABRT", 134), ("TERM", 143)])
def test_killed_child_leaves_its_last_output_and_code(
    distboot: Run, tmp_path: Path, name: str, code: int
) -> None:
    text = (
        "print('x' * 60000 + ' last words', end='', flush=True); "
        f"os.kill(os.getpid(), signal.SIG{name})"
    )
    result = distboot(
        "run", "--log-dir", "logs", "--", "bash", "-c", 'ulimit -c 0; exec "$@"', "-", *python(text)
    )
    assert (result.stdout, result.returncode) == ("x" * 60000 + " last words", code)
    assert log_of(tmp_path / "logs") == [result.stdout]
    assert ends_of(tmp_path / "logs") == [f"killed by SIG{name}{BY_WHOM.get(name, '')}"]


def test_file_says_how_each_attempt_ended(distboot: Run, tmp_path: Path) -> None:
    text = (
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '1' and os.environ['DISTBOOT_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.stdout.write('done')\n"
    )
    (tmp_path / "train.py").write_text(text)
    result = distboot("run", "--nproc-per-node=2", "--max-restarts=1", "--log-dir=logs", "train.py")
    assert result.returncode == 0
    killed = "killed by SIGKILL (out of memory, or kill -9)"
    assert ends_of(tmp_path / "logs", 1) == [killed, "exit code 0"]
    assert (tmp_path / "logs/rank-1.log").read_text().endswith("exit code 0\n")
    assert len(ends_of(tmp_path / "logs")) == 2


def test_file_blames_nobody_for_our_own_kill(distboot: Run, tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('ignores'):\n"
        "        time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        "open('ignores', 'w').close()\n"
        "time.sleep(300)\n"
    )
    (tmp_path / "train.py").write_text(text)
    distboot("run", "--nproc-per-node=2", "--grace=0.5", "--log-dir=logs", "train.py")
    assert ends_of(tmp_path / "logs") == ["killed by SIGKILL, as it was asked to end"]
    assert ends_of(tmp_path / "logs", 1) == ["exit code 3"]


def test_reader_that_leaves_ends_the_child_normally(
    clean_env: dict[str, str], tmp_path: Path
) -> None:
    with wrapped(clean_env, tmp_path, *PREFIXED, "yes") as wrapper:
        assert read_from(wrapper, len(PREFIX) + 2) == PREFIX + b"y\n"
        assert wrapper.stdout is not None
        wrapper.stdout.close()
        assert wrapper.wait(20) == 128 + signal.SIGPIPE
    assert (tmp_path / "stderr").read_bytes() == b""


def test_leftovers_of_the_child_do_not_keep_wrapper(
    clean_env: dict[str, str], tmp_path: Path
) -> None:
    with wrapped(
        clean_env, tmp_path, *PREFIXED, "sh", "-c", "sleep 600 & echo $!; exit 5"
    ) as wrapper:
        assert wrapper.wait(30) == 5
        assert wrapper.stdout is not None
        left_behind = int(wrapper.stdout.read().removeprefix(PREFIX))
        assert alive(left_behind)
        os.kill(left_behind, signal.SIGKILL)


def test_stalled_reader_blocks_only_the_child(clean_env: dict[str, str], tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGUSR1, lambda *_: open("got", "w"))
with open("pid.part", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid.part", "pid")
while True:
    print("x" * 999)
"""
    reader, writer = os.pipe()
    with wrapped(
        clean_env, tmp_path, "--log-dir=logs", *PREFIXED, *python(script), stdout=writer
    ) as wrapper:
        until((tmp_path / "pid").exists)
        until(lambda: not select.select([], [writer], [], 0)[1])  # it is full
        child = int((tmp_path / "pid").read_text())
        wrapper.send_signal(signal.SIGUSR1)
        until((tmp_path / "got").exists)
        wrapper.terminate()
        until(lambda: not alive(child))
        wrapper.terminate()  # else it would give the reader half a minute more
        assert wrapper.wait(20) == 128 + signal.SIGTERM
    os.close(writer)
    with open(reader, "rb") as late:
        shown = late.read().count(b"\n")
    said = (
        "warning: standard output is not read: the end of the command's output is "
        "in the log file only"
    )
    assert (tmp_path / "stderr").read_text() == f"distboot: {said}\n"
    lines = log_of(tmp_path / "logs")
    assert len(lines) > shown
    assert set(lines[:-1]) == {"x" * 999}


@pytest.mark.parametrize(
    "node", [[], ["--nproc-per-node=1", "--join-timeout=60"]], ids=["rank", "node"]
)
def test_unwritable_folder_is_an_error_on_all(
    clean_env: dict[str, str], tmp_path: Path, port: int, node: list[str]
) -> None:
    (tmp_path / "file").touch()
    job = {**clean_env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        wrapped(
            {**job, "RANK": "0"}, tmp_path, *node, "--log-dir=logs", "--", "touch", "started"
        ) as good,
        wrapped(
            {**job, "RANK": "1"}, tmp_path, *node, "--log-dir=file/logs", "--", "touch", "started"
        ) as bad,
    ):
        assert (good.wait(60), bad.wait(60)) == (74, 74)
    said = (
        "log files in 'file/logs' cannot"
        if node
        else "rank 1 on HOST: the log file 'file/logs/rank-1.log' cannot"
    )
    errors = (tmp_path / "stderr").read_text().replace(HOST, "HOST")
    assert errors.count(f"{said} be written: Not a directory") >= 1 + bool(node), errors
    assert errors.count("distboot: error[output-failed]: ") == 2, errors
    assert not (tmp_path / "started").exists()
    assert not node or os.listdir(tmp_path / "logs") == []


def test_full_disk_is_reported_once_and_command_continues(run: Run, tmp_path: Path) -> None:
    wrapper = (
        f"{sys.executable} -m distboot run --log-dir logs -- sh -c 'for n in "
        "$(seq 100); do seq 100; done'"
    )
    # Of a kB: beyond it the kernel says EFBIG
    result = run("bash", "-c", f"ulimit -f 1; exec {wrapper}")
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 101)) * 100
    said = "warning: nothing more is written to 'logs/rank-0.log': File too large"
    assert (result.stderr, result.returncode) == (f"distboot: {said}\n", 0)
    assert (tmp_path / "logs/rank-0.log").stat().st_size == 1024


def test_file_that_is_a_pipe_nobody_reads(distboot: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.log")
    result = distboot("run", "--log-dir", ".", "--", "true")
    assert (result.returncode, "error[output-failed]" in result.stderr) == (74, True), result.stderr
