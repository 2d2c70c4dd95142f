"""`@pytest.mark.ranks`: tests in several ranks, with what pytest shows of them."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Run
from supervised import until

_TESTS = """
import os, time, pytest, distboot

@pytest.fixture
def rank():
    return int(os.environ["RANK"])

@pytest.mark.ranks(2)
def test_together(rank, tmp_path, shared_tmp_path):
    with distboot.init("none") as ctx:
        (shared_tmp_path / str(rank)).touch()
        (tmp_path / "own").touch()
        ctx.barrier()
        assert {path.name for path in shared_tmp_path.iterdir()} == {"0", "1"}
        assert [path.name for path in tmp_path.iterdir()] == ["own"]
        assert (ctx.rank, ctx.world_size) == (rank, 2)

@pytest.mark.ranks(4, as_="srun 2x2")
def test_as_slurm_starts_it(rank):
    with distboot.init("none") as ctx:
        assert (ctx.rank, ctx.node_rank, ctx.local_rank) == (rank, rank // 2, rank % 2)
        assert os.environ["SLURM_PROCID"] == str(rank)

@pytest.mark.ranks(2, as_="mpirun 2x1")
def test_fails_on_the_second_node(rank):
    ctx = distboot.init("none")
    assert ctx.node_rank == 0, "the other node"
    ctx.barrier()
    time.sleep(1000)

@pytest.mark.ranks(3)
@pytest.mark.parametrize("culprit", [0, 2])
def test_fails_in_one(rank, culprit):
    ctx = distboot.init("none")
    print("said by", rank)
    assert rank != culprit, "the culprit"
    ctx.barrier()
    time.sleep(1000)

@pytest.mark.ranks(2)
def test_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(1000)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("culprits", [[1], [0, 1]])
def test_leaves(rank, culprits):
    if rank in culprits:
        os._exit(0)

@pytest.mark.ranks(2, timeout=30)
def test_hangs(rank):
    ctx = distboot.init("none")
    if rank == 1:
        time.sleep(1000)
    ctx.barrier()

@pytest.mark.ranks(2)
@pytest.mark.skip(reason="not now")
def test_skipped():
    raise AssertionError

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known")
def test_expected(rank):
    ctx = distboot.init("none")
    assert rank != 1
    ctx.barrier()
    time.sleep(1000)

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, reason="known")
def test_expected_of_rank_1(rank):
    assert rank != 1

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, reason="known")
def test_expected_in_vain(rank):
    pass

@pytest.mark.ranks(2)
def test_broken_fixture(rank, no_such_fixture):
    pass

def test_without_ranks(tmp_path, shared_tmp_path):
    assert shared_tmp_path == tmp_path
    assert "RANK" not in os.environ
"""


@pytest.mark.all
def test_outcomes_are_those_of_the_ranks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    # No rank sleeps to its end, which would take longer
    out = run(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py", "-v", "-n", "2"),
        timeout=600,
    ).stdout
    found = {
        name: how
        for how, name in re.findall(r"(PASSED|FAILED|SKIPPED|XFAIL|ERROR)\s+test_it.py::(\S+)", out)
    }
    assert found == {
        "test_together": "PASSED",
        "test_fails_in_one[0]": "FAILED",
        "test_fails_in_one[2]": "FAILED",
        "test_killed": "FAILED",
        "test_leaves[culprits0]": "FAILED",
        "test_leaves[culprits1]": "FAILED",
        "test_as_slurm_starts_it": "PASSED",
        "test_fails_on_the_second_node": "FAILED",
        "test_hangs": "FAILED",
        "test_skipped": "SKIPPED",
        "test_expected": "XFAIL",
        "test_expected_of_rank_1": "XFAIL",
        "test_expected_in_vain": "FAILED",
        "test_broken_fixture": "ERROR",
        "test_without_ranks": "PASSED",
    }, out
    for rank in (0, 2):
        assert f"said by {rank}" in out
        assert f"rank {rank} of 3" in out
        assert f"culprit = {rank}" in out
    assert "AssertionError: the culprit" in out
    assert "AssertionError: the other node" in out
    assert "rank 1 failed first: killed by SIGKILL" in out
    for rank in (0, 1):
        assert f"rank {rank} ended with exit code 0 before the test did" in out
    assert "the ranks have not ended within 30 s: pytest stopped them with SIGTERM\n" in out
    assert "rank 1: test_hangs (test_it.py:" in out
    assert "fixture 'no_such_fixture' not found" in out


@pytest.mark.all
@pytest.mark.parametrize("closes", [True, False])
def test_setup_of_a_module_ends_with_it(run: Run, tmp_path: Path, closes: bool) -> None:
    script = """
import os, pytest

@pytest.fixture(scope="module")
def database():
    yield
    print("database", "closed")
    assert not os.path.exists("cannot-close")

def test_alone(database): pass

@pytest.mark.ranks(1)
def test_in_ranks(): pass
"""
    (tmp_path / "test_one.py").write_text(script)
    (tmp_path / "test_two.py").write_text("def test_next(): pass\n")
    if not closes:
        (tmp_path / "cannot-close").touch()
    done = run(
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-s",
        "-p",
        "no:cacheprovider",
        "test_one.py",
        "test_two.py",
    )
    out = done.stdout
    assert (
        out.index("test_one.py::test_in_ranks")
        < out.index("database closed")
        < out.index("test_two.py::test_next")
    )
    assert ("3 passed in" in out, "3 passed, 1 error in" in out, done.returncode) == (
        closes,
        not closes,
        not closes,
    )


@pytest.mark.all
def test_option_that_reaches_no_rank_skips_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("""
import pytest
def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true")
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--runslow"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason="need --runslow"))
""")
    test = "import pytest\n@pytest.mark.ranks(2)\ndef test_slow(): assert False\n"
    (tmp_path / "test_it.py").write_text(test)
    pytest_ = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    done = run(*pytest_, "--runslow")
    assert "its ranks skip it: options of this pytest do not reach them" in done.stdout
    assert "1 failed in" in done.stdout
    assert "1 skipped in" in run(*pytest_).stdout


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("0", "a number of ranks is needed, at least 1"),
        ("3, as_='mpirun 2x2'", "the two do not agree on the number of ranks"),
        ("4, as_='mpirnu 2x2'", "did you mean 'mpirun'?"),
        ("2, as_=5", "as_ is not a str, as in ranks(count"),
        ("2, timeout=None", "timeout=None is not a valid number of seconds; use a number"),
        ("2, timeout=0, as_='srun 1x2'", "timeout=0 is not a valid number of seconds"),
        ("", "@pytest.mark.ranks needs a number, as in ranks(count"),
        ("2, tiemout=3", "has no argument 'tiemout': did you mean 'timeout'? as in ranks(count"),
        ("2, gpus=1", "@pytest.mark.ranks has no argument 'gpus': as in ranks(count"),
        (
            "2, 3",
            "ranks takes one number; timeout= and as_= by name, as in ranks(count, *, timeout=300, ",
        ),
        ("2, as_='slurm 1x2'", ": as_='slurm 1x2': unknown launcher; one of mpirun, srun"),
        ("2, as_='mpirun'", "lacks the number of nodes and ranks; as_='mpirun 2x4' is two nodes"),
    ],
)
def test_mark_that_cannot_be(run: Run, tmp_path: Path, mark: str, said: str) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import pytest\ndef test_before(): pass\n@pytest.mark.ranks({mark})\ndef test(): pass\n"
    )
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test: @pytest.mark.ranks" in done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "1 passed" not in done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_signal_ends_the_ranks_of_a_test(clean_env: dict[str, str], tmp_path: Path) -> None:
    script = """
import os, pathlib, time, pytest

@pytest.mark.ranks(2, as_="srun 1x2")
def test_sleeps(shared_tmp_path):
    rank = os.environ["RANK"]
    pathlib.Path(f"pid-{rank}.part").write_text(str(os.getpid()))
    os.rename(f"pid-{rank}.part", f"pid-{rank}")
    time.sleep(300)
"""
    (tmp_path / "test_it.py").write_text(script)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    session = subprocess.Popen(
        command, cwd=tmp_path, env=clean_env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    pids: list[int] = []
    try:
        until(lambda: all(file.exists() for file in files))
        pids += [int(file.read_text()) for file in files]
        session.terminate()
        output, _ = session.communicate(timeout=60)
        assert session.returncode == 128 + signal.SIGTERM
        assert b"stopped by SIGTERM in test_it.py::test_sleeps" in output
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        session.kill()
        session.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
