"""Files that a launcher or a shell has opened for a command reach it through the wrapper, under their numbers."""

import sys

import pytest
from conftest import Run
from launched import MPICH, needs_mpich

_INIT = """
import ctypes, sys
mpi = ctypes.CDLL("libmpich.so.12", mode=ctypes.RTLD_GLOBAL)
assert mpi.MPI_Init(None, None) == 0
rank, size = ctypes.c_int(-1), ctypes.c_int(-1)
world = 0x44000000  # MPI_COMM_WORLD of MPICH's ABI
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
sys.stdout.write(f"rank {rank.value} of {size.value}\\n")  # in one piece
sys.stdout.flush()
mpi.MPI_Finalize()
"""


@needs_mpich
def test_mpi_starts_by_the_socket_of_hydra(run: Run, port: int) -> None:
    """PMI_FD is its number; without it MPI_Init fails."""
    mpiexec = [str(MPICH), "-n", "2", "-genv", "MASTER_PORT", str(port)]
    ended = run(*mpiexec, sys.executable, "-m", "distboot", "train.py", train=_INIT)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("options", ["", "--nproc-per-node 1", "--report job.json"])
def test_file_of_a_shell_is_a_script(run: Run, options: str) -> None:
    ours = f"{sys.executable} -m distboot run {options}"
    ended = run("bash", "-c", f"{ours} <(echo 'print(7)')")
    assert (ended.returncode, ended.stdout) == (0, "7\n"), ended.stderr


@pytest.mark.parametrize("options", ["--nproc-per-node 2", "--max-restarts 1"])
@pytest.mark.parametrize(
    "words",
    ["<(echo 'print(7)')", "train.py --config=<(echo 7)", "/dev/stdin < <(echo 'print(7)')"],
)
def test_pipe_that_is_read_twice_is_refused(run: Run, options: str, words: str) -> None:
    """A rank that finds it empty would end well."""
    ours = f"{sys.executable} -m distboot run {options}"
    ended = run("bash", "-c", f"{ours} {words}", train="print('trained')")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "is a pipe, which can be read once, and each " in ended.stderr


@pytest.mark.parametrize("options", ["--nproc-per-node 2", "--max-restarts 1"])
@pytest.mark.parametrize("python", ["python3 -u - 7", "python3"])
def test_program_on_stdin_of_several_starts_is_refused(run: Run, options: str, python: str) -> None:
    ours = f"{sys.executable} -m distboot run {options} -- {python}"
    ended = run("bash", "-c", f"{ours} <<< 'print(7)'")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "the program of this Python is on stdin, which can be read once, and " in ended.stderr


@pytest.mark.parametrize("words", ["-m json.tool -", "-mjson.tool -", "-c print(7) -", "-V"])
def test_stdin_of_another_program_is_its_own(run: Run, words: str) -> None:
    ours = [sys.executable, "-m", "distboot", "run", "--max-restarts", "1", "--", "python3"]
    ended = run(*ours, *words.split())
    assert "is on stdin" not in ended.stderr


def test_empty_command_is_named(run: Run) -> None:
    ended = run(sys.executable, "-m", "distboot", "run", "--", "")
    assert ended.returncode == 127
    assert "error[command-not-found]: the command after '--' is empty" in ended.stderr


def test_files_of_the_wrapper_stay_its_own(run: Run) -> None:
    script = "import os; print(len(os.listdir('/proc/self/fd')))"
    alone = run(sys.executable, "train.py", train=script)
    wrapper = ["-m", "distboot", "run", "--report", "job.json"]
    below = run(sys.executable, *wrapper, "train.py")
    # Three more: the pipe for what the script reports of its end, and both ends of its own pipe for
    # its stack
    assert int(below.stdout) == int(alone.stdout) + 3
