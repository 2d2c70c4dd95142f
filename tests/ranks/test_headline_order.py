"""What a failed job prints, in which order: one headline a log, after the traceback, on a line of its own."""

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from fcntl import F_GETPIPE_SZ, fcntl, ioctl
from pathlib import Path

import pytest
from conftest import Run
from launched import MPI_ENV, MPIRUN, TWO_OF_MPIRUN, in_both_ways, needs_mpirun, needs_torch
from supervised import FAILING, Start, until

HOST = os.uname().nodename
WRAPPER = [sys.executable, "-m", "distboot"]
_MPIRUN = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "3"]
# The command of three ranks with one log, and how rank 0's agent begins its lines.
WAYS = {
    "wrapper": ([*WRAPPER, "--nproc-per-node", "3"], "node 0"),
    "prefix": ([*WRAPPER, "--nproc-per-node", "3", "--log-prefix"], "node 0"),
    "mpirun": ([*_MPIRUN, sys.executable], "rank 0"),
    "mpirun-wrapper": ([*_MPIRUN, *WRAPPER], "rank 0"),
    "torchrun": (["torchrun", "--standalone", "--nproc-per-node", "3"], "rank 0"),
}
_MARKS = {"mpirun": needs_mpirun, "mpirun-wrapper": needs_mpirun, "torchrun": needs_torch}


def in_all_ways(*slow: str) -> pytest.MarkDecorator:
    """In each of the ways; in the slow ones, for `make test-all`."""
    params = []
    for way in WAYS:
        marks = [_MARKS[way]] if way in _MARKS else []
        if way in slow:
            marks.append(pytest.mark.all)
        params.append(pytest.param(way, marks=marks))
    return pytest.mark.parametrize("way", params)


FAILS = """
import os, signal, sys, time
import distboot
ctx = distboot.init("none")
open(f"pid-{{ctx.rank}}", "w").write(str(os.getpid()))
def load():
    raise ValueError("no more licences")
ctx.barrier()
if ctx.rank == {rank}:
    {does}
time.sleep(60)
"""
BOOM = "ValueError: no more licences"


def _lines(
    run: Run, way: str, port: int, rank: int, does: str, *, code: int | None = 1
) -> list[str]:
    """All that a job of three ranks prints, in the order in which it comes."""
    command, _ = WAYS[way]
    env = {**MPI_ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # stdout and stderr are one stream, as on a terminal.
    script = FAILS.format(rank=rank, does=does)
    done = run("sh", "-c", 'exec "$@" 2>&1', "sh", *command, "train.py", train=script, env=env)
    assert code in (None, done.returncode), done.stdout
    return [line for line in done.stdout.splitlines() if line.strip()]


def _said(lines: Sequence[str], text: str) -> list[str]:
    return [line for line in lines if line.startswith("distboot: ") and text in line]


@in_all_ways("torchrun")
@pytest.mark.parametrize("rank", [0, 1])
def test_one_headline_follows_the_traceback(run: Run, port: int, way: str, rank: int) -> None:
    lines = _lines(run, way, port, rank, "load()")
    prefix = re.compile(rf"^\[rank {rank} {HOST}\] ")
    plain = [prefix.sub("", line) for line in lines]
    begin = plain.index("Traceback (most recent call last):")
    end = plain.index(BOOM)
    assert not [line for line in lines[begin:end] if "distboot:" in line]
    who = WAYS[way][1]
    whose = "" if who == f"rank {rank}" else f"rank {rank} "
    (headline,) = _said(lines, "failed first: ")
    what = f"failed first: uncaught exception: {BOOM}, on {HOST}, in load (train.py:7)"
    assert headline == f"distboot: {who} on {HOST}: {whose}{what}"
    assert lines.index(headline) > end
    assert not [line for line in lines if line.startswith("  | ")]


@in_all_ways("torchrun")
@pytest.mark.parametrize(
    "end",
    [
        ("sys.exit(3)", "failed first: exit code 3, on ", 3),
        ("os.kill(os.getpid(), 9)", "failed first: killed by SIGKILL (", None),
        ("os.kill(os.getpid(), 15)", "stopped by an external SIGTERM", None),
    ],
    ids=["exit code", "killed", "stopped"],
)
def test_one_rank_speaks_for_its_host(
    run: Run, port: int, way: str, end: tuple[str, str, int | None]
) -> None:
    does, text, code = end
    lines = _lines(run, way, port, 1, does, code=None if way == "torchrun" else code)
    found = [line for line in _said(lines, text) if ": summary: " not in line]
    assert len(found) == 1, "\n".join(lines)
    assert found[0].startswith(f"distboot: {WAYS[way][1]} on {HOST}: ")


KILLS_AGENT = """
for process in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\\0")
        if b"distboot.agent.sidecar" in words and Path("pid-0").read_bytes() in words:
            os.kill(int(process), 9)
"""


@needs_mpirun
def test_another_rank_speaks_where_rank_0_is_lost(run: Run, port: int) -> None:
    does = f"import contextlib; from pathlib import Path; exec({KILLS_AGENT!r})"
    lines = _lines(run, "mpirun", port, 1, does, code=None)
    (headline,) = _said(lines, "became unreachable first")
    assert re.match(rf"distboot: rank [12] on {HOST}: rank 0 became unreachable first: ", headline)


# The libraries of rank 1 end slowly, after the exit code of the script is known, as on a busy host
ENDS_SLOWLY = """
import ctypes, os, sys
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    for _ in range(2):
        ctypes.CDLL(None).__cxa_atexit(ctypes.CDLL(None).sleep, 1, 0)
import distboot
ctx = distboot.init("none")
if ctx.rank == 1:
    sys.exit(3)
raise ConnectionResetError(104, "Connection reset by peer")
"""


@needs_mpirun
def test_summary_comes_before_mpirun_ends(run: Run, port: int) -> None:
    env = {**MPI_ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = run(*TWO_OF_MPIRUN, sys.executable, "train.py", train=ENDS_SLOWLY, env=env)
    assert done.returncode == 3
    said = done.stderr.splitlines()
    (summary,) = _said(said, "summary: ")
    assert summary.endswith("; exit codes: 3 (job), 1 (rank 0), 3 (rank 1)")


WATCHES_ITS_WRAPPER = """
import os, time
import distboot
parent = os.getppid()
open(f"ready-{distboot.init('none').rank}", "w").close()
while os.getppid() == parent:
    time.sleep(0.05)
"""


def test_one_wrapper_speaks_where_rank_0_is_lost(
    clean_env: dict[str, str], tmp_path: Path, port: int
) -> None:
    (tmp_path / "train.py").write_text(WATCHES_ITS_WRAPPER)
    log = tmp_path / "log"
    environ = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack, log.open("ab") as stderr:
        wrappers = []
        for rank in ("0", "1", "2"):
            wrapper = subprocess.Popen(
                [*WRAPPER, "train.py"],
                env={**clean_env, **environ, "RANK": rank, "LOCAL_RANK": rank},
                cwd=tmp_path,
                stderr=stderr,
            )
            stack.callback(wrapper.wait, 60)
            stack.callback(wrapper.kill)
            wrappers.append(wrapper)
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
        wrappers[2].send_signal(signal.SIGSTOP)  # it learns of it once rank 1 has printed it
        wrappers[0].kill()
        until(lambda: "rank 0 became unreachable first" in log.read_text())
        with suppress(subprocess.TimeoutExpired):  # it stays, so that nobody repeats it
            wrappers[1].wait(0.5)
        wrappers[2].send_signal(signal.SIGCONT)
        for wrapper in wrappers[1:]:
            wrapper.wait(60)
    assert log.read_text().count("rank 0 became unreachable first") == 1


@pytest.mark.parametrize("way", ["wrapper", "prefix"])
def test_text_of_exit_keeps_its_line(run: Run, port: int, way: str) -> None:
    lines = _lines(run, way, port, 1, 'sys.exit("no more licences")')
    (at,) = [number for number, line in enumerate(lines) if line.endswith("no more licences")]
    assert "distboot: " not in lines[at]
    assert f": rank 1 failed first: exited: no more licences, on {HOST}" in lines[at + 1]


def test_line_begins_anew_after_an_open_one(run: Run, port: int) -> None:
    does = 'sys.stderr.write("loading"); sys.stderr.flush(); os._exit(4)'
    lines = _lines(run, "prefix", port, 1, does, code=4)
    assert f"[rank 1 {HOST}] loading" in lines
    assert _said(lines, "rank 1 failed first: exit code 4")


# Bad input: what the script does to the stream on which all is printed


def test_megabyte_without_newline_hides_no_headline(run: Run, port: int) -> None:
    for way in ("wrapper", "prefix"):
        does = 'sys.stderr.write("x" * (1 << 20)); sys.stderr.flush(); os._exit(4)'
        lines = _lines(run, way, port, 1, does, code=4)
        text = next(line for line in lines if "rank 1 failed first: exit code 4" in line)
        assert way == "wrapper" or text.startswith("distboot: node 0")
        lines = _lines(run, way, port, 1, 'sys.stderr.write("x" * (1 << 20)); load()')
        assert len(_said(lines, f"failed first: uncaught exception: {BOOM}, on ")) == 1


@pytest.mark.parametrize(
    "does",
    ["os.close(2); load()", "sys.stderr.close(); load()", "sys.stderr = None; load()"],
)
def test_closed_stderr_delays_no_headline(run: Run, port: int, does: str) -> None:
    lines = _lines(run, "wrapper", port, 1, does)
    (headline,) = _said(lines, "failed first: uncaught")
    assert headline.endswith(", in load (train.py:7)")


def test_progress_bar_without_end_hides_no_headline(run: Run, port: int) -> None:
    bar = 'for i in range(20000): sys.stderr.write(f"\\r{i} of ever")'
    for way in ("wrapper", "prefix"):
        lines = _lines(run, way, port, 1, f"exec({bar!r}); load()")
        assert len(_said(lines, f"failed first: uncaught exception: {BOOM}, on ")) == 1


def _start(env: Mapping[str, str], folder: Path, stderr: int) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(FAILS.format(rank=1, does="load()"))
    return subprocess.Popen(
        [*WAYS["wrapper"][0], "train.py"],
        env={**env, "DISTBOOT_GRACE": "2"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )


@in_both_ways
def test_stderr_that_nobody_reads_ends_no_later(start: Start, init: bool) -> None:
    reading, writing = os.pipe()
    with open(reading), open(writing):
        os.write(writing, b"x" * fcntl(writing, F_GETPIPE_SZ))
        job = start(FAILING % "raise ValueError", init=init, stderr=writing, CULPRIT="1")
        job.all_ready()
        job.touch("fail")
        # Seconds: 5 for a rank that cannot print why it fails, and half a second a line of ours
        codes = job.codes(15)
    assert codes == ([143] * 3 if init else [1] * 3)


def test_file_as_stderr_has_it_in_order(clean_env: dict[str, str], tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        assert _start(clean_env, tmp_path, log.fileno()).wait(60) == 1
    lines = (tmp_path / "log").read_text().splitlines()
    (headline,) = _said(lines, "rank 1 failed first: uncaught exception: ")
    assert lines[lines.index(headline) - 1] == BOOM


def test_terminal_of_40_columns_gets_whole_lines(clean_env: dict[str, str], tmp_path: Path) -> None:
    ours, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    process = _start(clean_env, tmp_path, terminal)
    os.close(terminal)
    shown = b""
    # OSError: all that had it open have ended
    with suppress(OSError), open(ours, "rb", buffering=0) as screen:
        while select.select([screen], [], [], 60)[0]:
            shown += screen.read(4096)
    assert process.wait(20) == 1
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).split("\r\n")
    (headline,) = _said(lines, "rank 1 failed first: uncaught exception: ")
    assert headline.endswith(f"{BOOM}, on {HOST}, in load (train.py:7)")
    assert lines[lines.index(headline) - 1] == BOOM


def test_each_log_file_has_the_headline(start: Start) -> None:
    # Ranks that were started by hand, each with its own log
    job = start("ready()\nuntil('fail')\nif rank == 2: sys.exit(3)\nuntil('end')\n", init=True)
    job.fail()
    assert {job.first(rank) for rank in (0, 1)} == {f"rank 2 failed first: exit code 3, on {HOST}"}
    assert job.first(2) == f"failed first: exit code 3, on {HOST}"


def test_report_precedes_a_signal_that_answers_it(start: Start) -> None:
    # A launcher may end the wrapper as soon as it has read the traceback.
    script = """
class Slow:
    def write(self, text): Path("printing").touch(); time.sleep(60)
    def flush(self): pass
ready()
until("fail")
if rank == 1:
    sys.stderr = Slow()
    raise ValueError("no more licences")
until("end")
"""
    job = start(script, 2, DISTBOOT_GRACE="1")
    job.all_ready()
    job.touch("fail")
    until((job.folder / "printing").exists)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.codes() == [1, 1], job.output(0) + job.output(1)
    assert f"failed first: uncaught exception: {BOOM}, on " in job.first(0)
