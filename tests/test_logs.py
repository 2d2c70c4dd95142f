"""`--log-prefix` and `--log-dir` as a black box: real children, real pipes, readers that stop or go away."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import ROOT, Run
from launched import MPI_ENV, MPIRUN, needs_mpirun, needs_torch
from lifelines import until

HOST = os.uname().nodename
PREFIX = f"[rank 0 {HOST}] ".encode()
PREFIXED = ["--log-prefix", "--"]


@pytest.fixture(autouse=True)
def _buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI may have set what the wrapper has to."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@contextmanager
def _wrapped(
    env: dict[str, str], folder: Path, *arguments: str, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """The wrapper, with its standard error in a file; ended with its child when the block ends."""
    with open(folder / "stderr", "ab") as stderr:
        wrapper = subprocess.Popen(
            [sys.executable, "-m", "distboot", "run", *arguments], env=env, cwd=folder, stdin=subprocess.PIPE,
            stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip
    try:
        yield wrapper
    finally:
        wrapper.kill()
        wrapper.wait(20)
        for stream in (wrapper.stdin, wrapper.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _python(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\n{text}"]


def _read(wrapper: subprocess.Popen[bytes], size: int, seconds: float = 60) -> bytes:
    """So many bytes of standard output, bounded in time."""
    assert wrapper.stdout is not None
    data, end = b"", time.monotonic() + seconds
    while len(data) < size:
        ready, _, _ = select.select([wrapper.stdout], [], [], max(end - time.monotonic(), 0))
        assert ready, f"only {data[-200:]!r}"
        more = os.read(wrapper.stdout.fileno(), size - len(data))
        assert more, f"ended after {data[-200:]!r}"
        data += more
    return data


def _answer(wrapper: subprocess.Popen[bytes], text: str = "\n") -> None:
    assert wrapper.stdin is not None
    wrapper.stdin.write(text.encode())
    wrapper.stdin.flush()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _log(folder: Path, rank: int = 0) -> list[str]:
    """The lines of a log file, without those that begin an attempt."""
    lines = (folder / f"rank-{rank}.log").read_text().splitlines()
    return [line for line in lines if not line.startswith(f"distboot: rank {rank} on {HOST}, started at 20")]


def test_every_line_says_its_rank_and_host_and_keeps_its_stream(distboot: Run) -> None:
    text = "print('loss 0.1'); print('careful', file=sys.stderr); print(); print('a\\r\\nb', end='')"
    result = distboot("run", *PREFIXED, *_python(text), env={"RANK": "0", "WORLD_SIZE": "1"})
    begin = PREFIX.decode()
    assert result.stdout == f"{begin}loss 0.1\n{begin}\n{begin}a\n{begin}b"  # \r\n read as one end of a line
    assert result.stderr == f"{begin}careful\n"
    assert result.returncode == 0


def test_without_the_options_the_child_has_our_own_streams(clean_env: dict[str, str], tmp_path: Path) -> None:
    text = "print(os.fstat(1).st_ino, os.environ.get('PYTHONUNBUFFERED'))"
    with _wrapped(clean_env, tmp_path, "--", *_python(text)) as wrapper:
        assert wrapper.stdout is not None
        ours = os.fstat(wrapper.stdout.fileno()).st_ino
        assert wrapper.stdout.read() == f"{ours} None\n".encode()


def test_line_comes_when_it_is_printed_and_a_prompt_without_its_end(clean_env: dict[str, str], tmp_path: Path) -> None:
    text = "print('first'); sys.stdin.readline(); name = input('name? '); print('hello', name); input()"
    with _wrapped(clean_env, tmp_path, *PREFIXED, *_python(text)) as wrapper:
        for expected, answer in (
            (PREFIX + b"first\n", "\n"),
            (PREFIX + b"name? ", "Ada\n"),  # a terminal would show that, and its end of the line
            (b"hello Ada\n", ""),
        ):
            assert _read(wrapper, len(expected)) == expected
            _answer(wrapper, answer)
        _answer(wrapper)
        assert wrapper.wait(20) == 0


def test_progress_bar_is_shown_step_by_step_and_not_over_the_prefix(clean_env: dict[str, str], tmp_path: Path) -> None:
    text = "for n in range(3): print(f'\\r{n}0 %', end=''); sys.stdin.readline()\nprint('\\rall ')"
    with _wrapped(clean_env, tmp_path, *PREFIXED, *_python(text)) as wrapper:
        for shown in (b"00 %", b"10 %", b"20 %"):
            expected = b"\r" + PREFIX + shown
            assert _read(wrapper, len(expected)) == expected
            _answer(wrapper)
        assert wrapper.stdout is not None
        assert wrapper.stdout.read() == b"\r" + PREFIX + b"all \n"


def test_bytes_pass_unchanged(clean_env: dict[str, str], tmp_path: Path) -> None:
    sent = bytes(byte for byte in range(256) if byte != ord("\r")) * 50
    text = f"sys.stdout.buffer.write(bytes.fromhex('{sent.hex()}'))"
    with _wrapped(clean_env, tmp_path, "--log-dir=logs", *PREFIXED, *_python(text)) as wrapper:
        assert wrapper.stdout is not None
        assert wrapper.stdout.read() == PREFIX + sent.replace(b"\n", b"\n" + PREFIX)
    assert (tmp_path / "logs/rank-0.log").read_bytes().partition(b"\n")[2] == sent


def test_line_of_10_mb_does_not_fill_the_memory(clean_env: dict[str, str], tmp_path: Path) -> None:
    text = "sys.stdout.buffer.write(b'x' * 10_000_000); input()"
    with _wrapped(clean_env, tmp_path, "--log-dir=logs", *PREFIXED, *_python(text)) as wrapper:
        size = len(PREFIX) + 10_000_000
        assert _read(wrapper, size) == PREFIX + b"x" * 10_000_000
        status = Path(f"/proc/{wrapper.pid}/status").read_text()
        assert int(status.partition("VmHWM:")[2].split()[0]) < 30_000  # kB; Python alone has 16,000


_MANY_LINES = """
rank = os.environ["RANK"]
sys.stdout.write("".join(f"{rank} {n} {'x' * (n % 90)}\\n" for n in range(20_000)))
"""


def test_ranks_that_share_a_pipe_write_whole_lines(clean_env: dict[str, str], tmp_path: Path, port: int) -> None:
    job = {**clean_env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    reader, writer = os.pipe()
    with (
        _wrapped({**job, "RANK": "0"}, tmp_path, *PREFIXED, *_python(_MANY_LINES), stdout=writer),
        _wrapped({**job, "RANK": "1"}, tmp_path, *PREFIXED, *_python(_MANY_LINES), stdout=writer),
    ):
        until(lambda: not select.select([], [writer], [], 0)[1])  # it is full, and each line has to wait for its turn
        os.close(writer)
        with open(reader) as shared:
            shown = shared.read().splitlines()
    for rank in range(2):
        begin = f"[rank {rank} {HOST}] "
        mine = [line.removeprefix(begin) for line in shown if line.startswith(begin)]
        assert mine == [f"{rank} {n} {'x' * (n % 90)}" for n in range(20_000)]


def test_file_of_a_rank_has_both_streams_without_prefix_and_every_attempt(distboot: Run, tmp_path: Path) -> None:
    text = "print('loss'); time.sleep(0.05); print('warning', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    begin = PREFIX.decode()
    for code in (3, 0):
        result = distboot("run", "--log-dir", "deep/logs", *PREFIXED, *_python(text), str(code))
        assert (result.stdout, result.stderr, result.returncode) == (f"{begin}loss\n", f"{begin}warning\n", code)
    assert _log(tmp_path / "deep/logs") == ["loss", "warning", "", "loss", "warning"]


def test_lines_of_the_two_streams_do_not_mix_in_the_file(clean_env: dict[str, str], tmp_path: Path) -> None:
    text = "sys.stderr.write('50 %'); input(); print('epoch 1'); input(); sys.stderr.write(' done')"
    with _wrapped(clean_env, tmp_path, "--log-dir=logs", "--", *_python(text)) as wrapper:
        until(lambda: (tmp_path / "stderr").read_bytes() == b"50 %")
        _answer(wrapper)
        assert _read(wrapper, 8) == b"epoch 1\n"
        _answer(wrapper)
        assert wrapper.wait(20) == 0
    assert _log(tmp_path / "logs") == ["50 %", "epoch 1", " done"]
    assert (tmp_path / "stderr").read_bytes() == b"50 % done"


def test_streams_that_are_closed_still_reach_the_file(run: Run, tmp_path: Path) -> None:
    command = f"{sys.executable} -m distboot run --log-dir logs -- sh -c 'echo out; echo err >&2; exit 7' >&- 2>&-"
    assert run("bash", "-c", command).returncode == 7
    assert sorted(_log(tmp_path / "logs")) == ["err", "out"]


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("ABRT", 134), ("TERM", 143)])
def test_last_output_and_code_of_a_child_that_is_killed(distboot: Run, tmp_path: Path, name: str, code: int) -> None:
    text = f"print('x' * 60000 + ' last words', end='', flush=True); os.kill(os.getpid(), signal.SIG{name})"
    result = distboot("run", "--log-dir", "logs", "--", "bash", "-c", 'ulimit -c 0; exec "$@"', "-", *_python(text))
    assert (result.stdout, result.returncode) == ("x" * 60000 + " last words", code)
    assert _log(tmp_path / "logs") == [result.stdout]


def test_reader_that_goes_away_ends_the_child_as_without_us(clean_env: dict[str, str], tmp_path: Path) -> None:
    with _wrapped(clean_env, tmp_path, *PREFIXED, "yes") as wrapper:
        assert _read(wrapper, len(PREFIX) + 2) == PREFIX + b"y\n"
        assert wrapper.stdout is not None
        wrapper.stdout.close()
        assert wrapper.wait(20) == 128 + signal.SIGPIPE
    assert (tmp_path / "stderr").read_bytes() == b""


def test_what_the_child_leaves_behind_does_not_keep_the_wrapper(clean_env: dict[str, str], tmp_path: Path) -> None:
    with _wrapped(clean_env, tmp_path, *PREFIXED, "sh", "-c", "sleep 600 & echo $!; exit 5") as wrapper:
        assert wrapper.wait(30) == 5
        assert wrapper.stdout is not None
        left_behind = int(wrapper.stdout.read().removeprefix(PREFIX))
        assert _alive(left_behind)
        os.kill(left_behind, signal.SIGKILL)


_FLOOD = """
signal.signal(signal.SIGUSR1, lambda *_: open("got", "w"))
with open("pid.part", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid.part", "pid")
while True:
    print("x" * 999)
"""


def test_reader_that_stops_blocks_the_child_and_not_its_supervision(clean_env: dict[str, str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with _wrapped(clean_env, tmp_path, "--log-dir=logs", *PREFIXED, *_python(_FLOOD), stdout=writer) as wrapper:
        until((tmp_path / "pid").exists)
        until(lambda: not select.select([], [writer], [], 0)[1])  # it is full
        child = int((tmp_path / "pid").read_text())
        wrapper.send_signal(signal.SIGUSR1)
        until((tmp_path / "got").exists)
        wrapper.terminate()
        until(lambda: not _alive(child))
        wrapper.terminate()  # else it would give the reader half a minute more
        assert wrapper.wait(20) == 128 + signal.SIGTERM
    os.close(writer)
    with open(reader, "rb") as late:
        shown = late.read().count(b"\n")
    said = "warning: nobody reads standard output: the end of the command's output is in the log file only"
    assert (tmp_path / "stderr").read_text() == f"distboot: {said}\n"
    lines = _log(tmp_path / "logs")
    assert len(lines) > shown
    assert set(lines[:-1]) == {"x" * 999}


def test_folder_that_cannot_be_written_is_an_error_on_all_ranks(
    clean_env: dict[str, str], tmp_path: Path, port: int
) -> None:
    (tmp_path / "file").touch()
    job = {**clean_env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        _wrapped({**job, "RANK": "0"}, tmp_path, "--log-dir=logs", "--", "touch", "started") as good,
        _wrapped({**job, "RANK": "1"}, tmp_path, "--log-dir=file/logs", "--", "touch", "started") as bad,
    ):
        assert (good.wait(60), bad.wait(60)) == (74, 74)
    said = (
        "error[output-failed]: rank 1 on HOST: the log file 'file/logs/rank-1.log' cannot be written: Not a directory"
    )
    errors = (tmp_path / "stderr").read_text().replace(HOST, "HOST")
    assert f"distboot: {said}" in errors
    assert "rank 0 on HOST" in errors
    assert not (tmp_path / "started").exists()


def test_disk_that_fills_up_is_said_once_and_the_command_goes_on(run: Run, tmp_path: Path) -> None:
    wrapper = f"{sys.executable} -m distboot run --log-dir logs -- sh -c 'for n in $(seq 100); do seq 100; done'"
    result = run("bash", "-c", f"ulimit -f 1; exec {wrapper}")  # of a kB: beyond it the kernel says EFBIG
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 101)) * 100
    said = "warning: nothing more is written to 'logs/rank-0.log': File too large"
    assert (result.stderr, result.returncode) == (f"distboot: {said}\n", 0)
    assert (tmp_path / "logs/rank-0.log").stat().st_size == 1024


def test_lifeline_ends_a_rank_whose_reader_has_stopped(clean_env: dict[str, str], tmp_path: Path, port: int) -> None:
    job = {**clean_env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    fails = "while not os.path.exists('fail'): time.sleep(0.02)\nraise ValueError('boom')"
    reader, writer = os.pipe()
    with (
        _wrapped({**job, "RANK": "0"}, tmp_path, "--log-dir=logs", *PREFIXED, *_python(fails)) as culprit,
        _wrapped({**job, "RANK": "1"}, tmp_path, *PREFIXED, *_python(_FLOOD), stdout=writer) as survivor,
    ):
        until((tmp_path / "pid").exists)
        until(lambda: not select.select([], [writer], [], 0)[1])
        (tmp_path / "fail").touch()
        child = int((tmp_path / "pid").read_text())
        until(lambda: not _alive(child))
        survivor.terminate()
        assert (survivor.wait(20), culprit.wait(20)) == (128 + signal.SIGTERM, 1)
    os.close(reader)
    os.close(writer)
    said = f"rank 1 on {HOST}: rank 0 failed first: uncaught exception: ValueError: boom"
    assert said in (tmp_path / "stderr").read_text()
    assert _log(tmp_path / "logs")[-1] == "ValueError: boom"


@needs_torch
def test_ranks_that_torchrun_starts_have_them_too(distboot: Run, tmp_path: Path) -> None:
    # And what --framework exports, which the wrapper of the rank itself has to do as well.
    text = "import json; print('$RANK is', json.loads(os.environ['TF_CONFIG'])['task']['index'])"
    options = ("--nproc-per-node", "2", "--framework", "tensorflow", "--log-dir", "logs", *PREFIXED)
    result = distboot("run", *options, *_python(text), timeout=120)
    assert sorted(result.stdout.splitlines()) == [f"[rank {rank} {HOST}] $RANK is {rank}" for rank in range(2)]
    assert [_log(tmp_path / "logs", rank) for rank in range(2)] == [["$RANK is 0"], ["$RANK is 1"]]
    assert result.returncode == 0


@needs_mpirun
@needs_torch
def test_mlflow_hears_of_a_metric_once(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    wrapper = [sys.executable, "-m", "distboot", "--log-prefix", "--log-dir", "logs"]
    script = [str(ROOT / "examples/mlflow_rank0.py"), "--epochs", "8", "--store", "runs"]
    result = run(str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2", *wrapper, *script, env=MPI_ENV, timeout=180)
    assert result.returncode == 0, result.stderr
    said, _, found = _log(tmp_path / "logs")[-1].partition(" ")
    assert (said, json.loads(found)["ranks"]) == ("result", 2)
    assert json.loads(found)["accuracy"] >= 0.93
    assert f"[rank 0 {HOST}] result {found}" in result.stdout.splitlines()
    assert _log(tmp_path / "logs", 1) == []
    (metric,) = (tmp_path / "runs").glob("*/*/metrics/accuracy")  # of one run
    assert len(metric.read_text().splitlines()) == 8


def test_file_that_is_a_pipe_nobody_reads(distboot: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.log")
    result = distboot("run", "--log-dir", ".", "--", "true")
    assert (result.returncode, "error[output-failed]" in result.stderr) == (74, True), result.stderr


@pytest.mark.parametrize("options", [["--log-dir"], ["--log-dir", "", "--", "true"], ["--log-prefix=1", "--", "true"]])
def test_misuse(distboot: Run, options: Sequence[str]) -> None:
    result = distboot("run", *options)
    assert result.stderr.startswith("distboot: error[usage]: ")
    assert result.returncode == 2
