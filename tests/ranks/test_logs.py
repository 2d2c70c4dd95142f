"""`--log-prefix` and `--log-dir` as a black box: what is shown and what is in the files, from real children."""

import json
import os
import select
import shlex
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run
from launched import MPI_ENV, MPIRUN, needs_mpirun, needs_torch
from supervised import until
from wrappers import HOST, PREFIX, PREFIXED, log_of, python, read_from, type_in, wrapped

pytestmark = pytest.mark.usefixtures("buffered")


def test_every_line_has_rank_host_and_stream(distboot: Run) -> None:
    text = (
        "print('loss 0.1'); print('careful', file=sys.stderr); print(); print('a\\r\\nb', end='')"
    )
    result = distboot("run", *PREFIXED, *python(text), env={"RANK": "0", "WORLD_SIZE": "1"})
    begin = PREFIX.decode()
    # \r\n read as one end of a line
    assert result.stdout == f"{begin}loss 0.1\n{begin}\n{begin}a\n{begin}b"
    assert result.stderr == f"{begin}careful\n"
    assert result.returncode == 0


def test_without_options_the_child_keeps_our_streams(
    clean_env: dict[str, str], tmp_path: Path
) -> None:
    text = "print(os.fstat(1).st_ino, os.environ.get('PYTHONUNBUFFERED'))"
    with wrapped(clean_env, tmp_path, "--", *python(text)) as wrapper:
        assert wrapper.stdout is not None
        ours = os.fstat(wrapper.stdout.fileno()).st_ino
        assert wrapper.stdout.read() == f"{ours} None\n".encode()


_PROMPT = (
    "print('first'); sys.stdin.readline(); name = input('name? '); print('hello', name); input()"
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # After "Ada" a terminal would show that, and its end of the line.
        (
            _PROMPT,
            [(PREFIX + b"first\n", "\n"), (PREFIX + b"name? ", "Ada\n"), (b"hello Ada\n", "\n")],
        ),
    ],
    ids=["prompt"],
)
def test_line_and_its_beginning_come_at_once(
    clean_env: dict[str, str], tmp_path: Path, text: str, shown: list[tuple[bytes, str]]
) -> None:
    with wrapped(clean_env, tmp_path, *PREFIXED, *python(text)) as wrapper:
        for expected, answer in shown:
            assert read_from(wrapper, len(expected)) == expected
            type_in(wrapper, answer)
        assert wrapper.stdout is not None
        assert (wrapper.stdout.read(), wrapper.wait(20)) == (b"", 0)


def test_bytes_pass_unchanged(clean_env: dict[str, str], tmp_path: Path) -> None:
    sent = bytes(byte for byte in range(256) if byte != ord("\r")) * 50
    text = f"sys.stdout.buffer.write(bytes.fromhex('{sent.hex()}'))"
    with wrapped(clean_env, tmp_path, "--log-dir=logs", *PREFIXED, *python(text)) as wrapper:
        assert wrapper.stdout is not None
        assert wrapper.stdout.read() == PREFIX + sent.replace(b"\n", b"\n" + PREFIX)
    _, _, rest = (tmp_path / "logs/rank-0.log").read_bytes().partition(b"\n")
    found, end, _ = rest.rpartition(b"\ndistboot: rank 0")
    assert (found, end) == (sent, b"\ndistboot: rank 0")


def test_line_of_10_mb_fits_in_memory(clean_env: dict[str, str], tmp_path: Path) -> None:
    text = "sys.stdout.buffer.write(b'x' * 10_000_000); input()"
    with wrapped(clean_env, tmp_path, "--log-dir=logs", *PREFIXED, *python(text)) as wrapper:
        size = len(PREFIX) + 10_000_000
        assert read_from(wrapper, size) == PREFIX + b"x" * 10_000_000
        status = Path(f"/proc/{wrapper.pid}/status").read_text()
        assert int(status.partition("VmHWM:")[2].split()[0]) < 30_000  # kB; Python alone has 16,000


_MANY_LINES = """
rank = os.environ["RANK"]
sys.stdout.write("".join(f"{rank} {n} {'x' * (n % 90)}\\n" for n in range(20_000)))
"""


def test_ranks_that_share_a_pipe_write_whole_lines(
    clean_env: dict[str, str], tmp_path: Path, port: int
) -> None:
    job = {**clean_env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    reader, writer = os.pipe()
    with (
        wrapped({**job, "RANK": "0"}, tmp_path, *PREFIXED, *python(_MANY_LINES), stdout=writer),
        wrapped({**job, "RANK": "1"}, tmp_path, *PREFIXED, *python(_MANY_LINES), stdout=writer),
    ):
        # It is full, and each line has to wait for its turn
        until(lambda: not select.select([], [writer], [], 0)[1])
        os.close(writer)
        with open(reader) as shared:
            shown = shared.read().splitlines()
    for rank in range(2):
        begin = f"[rank {rank} {HOST}] "
        mine = [line.removeprefix(begin) for line in shown if line.startswith(begin)]
        assert mine == [f"{rank} {n} {'x' * (n % 90)}" for n in range(20_000)]


_BARS = """
for n in range(101):
    print(f"\\r{n:3}%", end="", file=sys.stderr, flush=True)
    if n % 25 == 0:
        print("loss", n, flush=True)
print("\\r100% done", file=sys.stderr)
"""


def test_progress_bars_of_two_ranks_end_as_lines(run: Run) -> None:
    options = ("--nproc-per-node", "2", "--framework", "none", *PREFIXED)
    command = [sys.executable, "-m", "distboot", "run", *options, *python(_BARS)]
    result = run("bash", "-c", f"{shlex.join(command)} 2>&1")
    shown = [line for line in result.stdout.splitlines() if not line.startswith("distboot: ")]
    expected = ["100% done", *(f"loss {n}" for n in range(0, 101, 25))]
    begins = [f"[rank {rank} {HOST}] " for rank in range(2)]
    assert sorted(shown) == sorted(begin + line for begin in begins for line in expected)


def test_file_of_a_rank_has_streams_and_attempts(distboot: Run, tmp_path: Path) -> None:
    text = (
        "print('loss'); time.sleep(0.05); print('warning', file=sys.stderr); "
        "sys.exit(int(sys.argv[1]))"
    )
    begin = PREFIX.decode()
    for code in (3, 0):
        result = distboot("run", "--log-dir", "deep/logs", *PREFIXED, *python(text), str(code))
        assert (result.stdout, result.stderr, result.returncode) == (
            f"{begin}loss\n",
            f"{begin}warning\n",
            code,
        )
    assert log_of(tmp_path / "deep/logs") == ["loss", "warning", "", "loss", "warning"]


def test_lines_of_two_streams_do_not_mix(clean_env: dict[str, str], tmp_path: Path) -> None:
    text = "sys.stderr.write('50 %'); input(); print('epoch 1'); input(); sys.stderr.write(' done')"
    with wrapped(clean_env, tmp_path, "--log-dir=logs", "--", *python(text)) as wrapper:
        until(lambda: (tmp_path / "stderr").read_bytes() == b"50 %")
        type_in(wrapper)
        assert read_from(wrapper, 8) == b"epoch 1\n"
        type_in(wrapper)
        assert wrapper.wait(20) == 0
    assert log_of(tmp_path / "logs") == ["50 %", "epoch 1", " done"]
    assert (tmp_path / "stderr").read_bytes() == b"50 % done"


def test_streams_that_are_closed_still_reach_the_file(run: Run, tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -m distboot run --log-dir logs -- sh -c 'echo out; "
        "echo err >&2; exit 7' >&- 2>&-"
    )
    assert run("bash", "-c", command).returncode == 7
    assert sorted(log_of(tmp_path / "logs")) == ["err", "out"]


@needs_torch
def test_ranks_that_torchrun_starts_have_them_too(distboot: Run, tmp_path: Path) -> None:
    # And what --framework exports, which the wrapper of the rank itself has to do as well.
    text = "import json; print('$RANK is', json.loads(os.environ['TF_CONFIG'])['task']['index'])"
    options = ("--nproc-per-node", "2", "--framework", "tensorflow", "--log-dir", "logs", *PREFIXED)
    result = distboot("run", *options, *python(text), timeout=120)
    assert sorted(result.stdout.splitlines()) == [
        f"[rank {rank} {HOST}] $RANK is {rank}" for rank in range(2)
    ]
    assert [log_of(tmp_path / "logs", rank) for rank in range(2)] == [
        ["$RANK is 0"],
        ["$RANK is 1"],
    ]
    assert result.returncode == 0


@pytest.mark.all
@needs_mpirun
@needs_torch
def test_mlflow_hears_of_a_metric_once(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    wrapper = [sys.executable, "-m", "distboot", "--log-prefix", "--log-dir", "logs"]
    script = [str(ROOT / "examples/mlflow_rank0.py"), "--epochs", "8", "--store", "runs"]
    result = run(
        str(MPIRUN),
        "--map-by",
        ":OVERSUBSCRIBE",
        "-n",
        "2",
        *wrapper,
        *script,
        env=MPI_ENV,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    said, _, found = log_of(tmp_path / "logs")[-1].partition(" ")
    assert (said, json.loads(found)["ranks"]) == ("result", 2)
    assert json.loads(found)["accuracy"] >= 0.93
    assert f"[rank 0 {HOST}] result {found}" in result.stdout.splitlines()
    assert log_of(tmp_path / "logs", 1) == []
    (metric,) = (tmp_path / "runs").glob("*/*/metrics/accuracy")  # of one run
    assert len(metric.read_text().splitlines()) == 8
