"""`init("mpi")`: mpi4py on the MPI that started the job, which is another one in each of these tests."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import Run
from hosts import Hosts, Slurm
from launched import (
    DEBIAN,
    MPI_ENV,
    MPICH,
    MPIRUN,
    OPENMPI4,
    debians_mpi,
    json_lines,
    needs,
    needs_hosts,
    needs_slurm,
)
from ranks import RunRanks
from supervised import until

pytestmark = needs("mpi4py")

Start = Callable[..., tuple[list[str], dict[str, str]]]


def _needs_a_choice() -> None:
    """MPI4PY_LIBMPI chooses the library, but not in an mpi4py that was built for one MPI, as all were before 4.1."""
    if tuple(map(int, version("mpi4py").split(".")[:2])) < (4, 1):
        pytest.skip("mpi4py before 4.1 cannot use another MPI than the one that it was built with")


@pytest.fixture
def launched(tmp_path: Path) -> Start:
    """The command line of two ranks under a launcher, and the variables for mpi4py to use a library."""
    libraries = {
        launcher: debians_mpi(launcher, tmp_path)
        for launcher in ("Open MPI 5", "Open MPI 4", "MPICH")
    }
    launchers: dict[str, list[str | None]] = {
        "Open MPI 5": [MPIRUN, "--map-by", ":OVERSUBSCRIBE", "-n", "2"],
        "Open MPI 4": [OPENMPI4, "--oversubscribe", "-n", "2"],
        "MPICH": [MPICH, "-n", "2"],
        "torchrun": [
            *(
                f"{sys.executable} -m torch.distributed.run "
                "--standalone --nproc-per-node=2 --no-python"
            ).split()
        ],
    }
    files = {"Open MPI 4": "libmpi.so.40", "MPICH": "libmpich.so.12"}

    def command(launcher: str, library: str) -> tuple[list[str], dict[str, str]]:
        words = [word for word in launchers[launcher] if word is not None]
        if len(words) < len(launchers[launcher]):
            pytest.skip(f"no {launcher} here (see tests/cluster/packages.txt)")
        if library in files and not (DEBIAN / files[library]).exists():
            pytest.skip(f"no library of {library} here (see tests/cluster/packages.txt)")
        if library != "Open MPI 5":
            _needs_a_choice()
        return words, {**MPI_ENV, **libraries[library]}

    return command


@pytest.mark.parametrize(
    ("launcher", "library"),
    [
        ("Open MPI 5", "Open MPI 5"),
        ("Open MPI 4", "Open MPI 4"),
        ("Open MPI 4", "Open MPI 5"),
        ("MPICH", "MPICH"),
    ],
    ids=["openmpi5-wrapper", "openmpi4", "openmpi4-library5", "mpich"],
)
def test_communicators(
    run: Run, launched: Start, tmp_path: Path, launcher: str, library: str
) -> None:
    script = """
import code, json, os, sys
from pathlib import Path
import distboot
ctx = distboot.init("mpi", join_timeout=60)
from mpi4py import MPI
line = {"rank": ctx.rank, "total": ctx.comm.allreduce(ctx.rank + 1), "hosts": ctx.hosts,
        "comm": [ctx.comm.rank, ctx.comm.size], "local": [ctx.local_comm.rank, ctx.local_comm.size],
        "library": " ".join(MPI.Get_library_version().split()[:3])}
with ctx.main_first():
    if ctx.is_main:
        Path("first").touch()
    line["first"] = Path("first").exists()
try:
    ctx.comm.send(None, dest=99)
except MPI.Exception:
    line["error"] = "an exception"
ctx.barrier()
ctx.close()
line["freed"] = ctx.comm == MPI.COMM_NULL
again = distboot.init("mpi", join_timeout=60)
line["again"] = again.comm.allreduce(1)
try:
    sys.exit(5)
except SystemExit:  # which is not the end
    pass
code.InteractiveInterpreter().runsource("1/0")  # nor is what a console, or pytest, shows
sys.stdout.write(json.dumps(line) + "\\n")
"""
    (tmp_path / "use.py").write_text(script)
    command, env = launched(launcher, library)
    before = ["-m", "distboot"] if launcher == "Open MPI 5" else []
    done = run(*command, sys.executable, *before, "use.py", env=env)
    lines = json_lines(done)  # and all ended well
    assert "MPI_ABORT" not in done.stderr.upper()
    assert {str(line.pop("library"))[:5] for line in lines} == {library[:5]}
    same = {
        "total": 3,
        "hosts": [os.uname().nodename],
        "first": True,
        "error": "an exception",
        "freed": True,
    }
    assert lines == [
        {"rank": rank, "comm": [rank, 2], "local": [rank, 2], "again": 2, **same} for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("end", "code"), [("raise ValueError('the loss is NaN')", 1), ("sys.exit(3)", 3)]
)
def test_failure_of_one_rank_ends_the_job(run: Run, launched: Start, end: str, code: int) -> None:
    """Although rank 0 waits for it in C, and MPI's own end would wait for rank 0; without failure detection, too."""
    script = """
import sys
import distboot
ctx = distboot.init("mpi", join_timeout=60)
ctx.barrier()
if ctx.rank == 1:
    {end}
ctx.comm.Barrier()
"""
    command, env = launched("Open MPI 5", "Open MPI 5")
    done = run(
        *command,
        sys.executable,
        "-c",
        script.format(end=end),
        env={**env, "DISTBOOT_FAILURE_DETECTION": "0"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("ValueError: the loss is NaN\n" in done.stderr) == (code == 1)


_BEGINNINGS = {
    "init": "import distboot; comm = distboot.init('mpi', join_timeout=60).comm",
    "wrapper": "from mpi4py.MPI import COMM_WORLD as comm",
}


@pytest.mark.all
@pytest.mark.parametrize("way", _BEGINNINGS)
def test_rank_whose_end_waits_is_named(
    clean_env: dict[str, str], launched: Start, tmp_path: Path, way: str
) -> None:
    """MPI's end waits for rank 0, which waits for this rank: its exit code is not known yet."""
    script = f"""
import os, threading, time
from pathlib import Path
{_BEGINNINGS[way]}
def watch():
    while not Path("named").exists():
        time.sleep(0.1)
    os._exit(7)
threading.Thread(target=watch, daemon=True).start()
comm.Barrier()
if comm.rank == 1:
    raise SystemExit(3)
comm.Barrier()
"""
    (tmp_path / "train.py").write_text(script)
    command, env = launched("Open MPI 5", "Open MPI 5")
    before = ["-m", "distboot"] if way == "wrapper" else []
    said = tmp_path / "said.txt"
    place = f"waiting for rank 1 ({os.uname().nodename}) for "
    with (
        said.open("w") as file,
        subprocess.Popen(
            [*command, sys.executable, *before, "train.py"],
            env={**clean_env, **env, "DISTBOOT_LATE_AFTER": "11"},
            stderr=file,
            start_new_session=True,  # mpirun ends its process group
            cwd=tmp_path,
        ) as job,
    ):
        try:
            until(lambda: place in said.read_text())
        finally:
            (tmp_path / "named").touch()
        assert job.wait(timeout=60) != 0
    assert "it is at the end of its script" in said.read_text()
    assert "; rank 0 waits in Barrier (train.py:" in said.read_text()


_REFUSED = """
import os, sys
import distboot
try:
    ctx = distboot.init("mpi", join_timeout=60)
except distboot.DistbootError as error:
    sys.stdout.write(f"{error.code} {error.message}\\n")
"""


@pytest.mark.parametrize(
    ("launcher", "library", "uses"),
    [("MPICH", "Open MPI 5", "Open MPI v5"), ("Open MPI 5", "MPICH", "MPICH Version: 4")],
    ids=["mpich-openmpi", "openmpi-mpich"],
)
def test_launcher_and_library_that_differ(
    run: Run, launched: Start, launcher: str, library: str, uses: str
) -> None:
    command, env = launched(launcher, library)
    done = run(*command, sys.executable, "-c", _REFUSED, env=env)
    name = {"MPICH": "mpich"}.get(launcher, "openmpi")
    said = [
        f"mpi-mismatch launcher '{name}' says that this is rank {rank} of 2, and mpi4py that it is rank 0 of 1: "
        f"it uses {uses}"
        for rank in range(2)
    ]
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("mpi-mismatch"))
    assert [line[: len(text)] for line, text in zip(found, said, strict=True)] == said


def test_mpi_that_ends_the_process_is_named(run: Run, launched: Start) -> None:
    # The wheel's mpirun sends Debian's Open MPI 4 to look for its parts in the wheel.
    command, env = launched("Open MPI 5", "Open MPI 4")
    done = run(*command, sys.executable, "-c", _REFUSED, env=env)
    assert done.returncode != 0
    said = rf"error\[mpi-failed\]: rank [01] on {os.uname().nodename}: this process has ended while Open MPI v4\.1"
    assert re.search(said, done.stderr), done.stderr


@pytest.mark.all
def test_launchers_that_do_not_start_mpi(run: Run, launched: Start, run_ranks: RunRanks) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    command, env = launched("torchrun", "Open MPI 5")
    done = run(*command, sys.executable, "-c", _REFUSED, env=env)
    assert done.stdout.count("mpi-mismatch launcher 'torchrun' does not start MPI") == 2
    for rank in run_ranks(_REFUSED, **env):
        assert rank.out.startswith("mpi-mismatch launcher 'torch' says that this is rank")


@pytest.mark.parametrize(
    ("before", "env", "said"),
    [
        (
            "sys.modules['mpi4py'] = None",
            {},
            "framework-not-installed mpi4py is not installed in this Python",
        ),
        (
            "",
            {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"},
            "mpi-mismatch mpi4py finds no MPI that it can use: ",
        ),
        (
            "from mpi4py import MPI; MPI.Finalize()",
            MPI_ENV,
            "already-initialized MPI has been finalized in this process, and cannot start a second time",
        ),
    ],
    ids=["missing", "no-library", "finalized"],
)
def test_mpi4py_that_does_not_work(run: Run, before: str, env: dict[str, str], said: str) -> None:
    if "MPI4PY_LIBMPI" in env:
        _needs_a_choice()
    result = run(sys.executable, "-c", f"import sys\n{before}\n{_REFUSED}", env=env)
    assert result.stdout.startswith(said), result.stdout + result.stderr


_NODES = """
import json, sys
import distboot
with distboot.init("mpi", join_timeout=60) as ctx:
    line = {"rank": ctx.rank, "node": ctx.node_rank, "local": [ctx.local_comm.rank, ctx.local_comm.size],
            "ranks": ctx.local_comm.allgather(ctx.comm.rank)}
sys.stdout.write(json.dumps(line) + "\\n")
"""
_UNEVEN = [
    {"rank": 0, "node": 0, "local": [0, 2], "ranks": [0, 1]},
    {"rank": 1, "node": 0, "local": [1, 2], "ranks": [0, 1]},
    {"rank": 2, "node": 1, "local": [0, 1], "ranks": [2]},
]


@needs_hosts
def test_bare_mpirun_on_two_hosts(hosts: Hosts, launched: Start) -> None:
    (mpirun, *_), env = launched("Open MPI 5", "Open MPI 5")
    (hosts.shared / "nodes.py").write_text(_NODES)
    command = [
        mpirun,
        "--bind-to",
        "none",
        "-H",
        "nodea:2,nodeb:1",
        "-x",
        "PATH",
        sys.executable,
        "nodes.py",
    ]
    assert json_lines(hosts.run("nodea", command, env, 120)) == _UNEVEN


@needs_slurm
@needs_hosts
def test_in_a_slurm_step_on_two_hosts(slurm: Slurm) -> None:
    (slurm.hosts.shared / "nodes.py").write_text(_NODES)
    step = ["-N2", "-n3", "-m", "plane=2"]
    # PMIx in Open MPI 5.0.11 crashes in MPI_Init below Slurm 22.05, once in some dozen starts
    for _ in range(3):
        done = slurm.srun([*step, "--mpi=pmix", sys.executable, "nodes.py"], MPI_ENV, 120)
        if "killed by SIGSEGV" not in done.stderr:
            break
    assert json_lines(done) == _UNEVEN
    (slurm.hosts.shared / "refused.py").write_text(_REFUSED)
    done = slurm.srun([*step, "--mpi=none", sys.executable, "refused.py"], MPI_ENV, 120)
    assert done.stdout.count("mpi-mismatch launcher 'slurm' says that this is rank") == 3
