"""Two jobs of one allocation on one host, at once: the launcher names none of them, and their ranks do not mix."""

import subprocess
import sys
from pathlib import Path

import pytest
from launched import BIN, MPICH, needs_deepspeed, needs_mpich
from supervised import until

# Rank 1 of the first job and rank 0 of the second one are late: what is there first must not be one job
_SCRIPT = """
import os, sys, time
from pathlib import Path
job = os.environ["JOB"]
rank = os.environ.get("PMI_RANK") or os.environ["RANK"]
while job + rank in ("A1", "B0") and not os.path.exists("go"):
    time.sleep(0.02)
import distboot
with distboot.init("none", join_timeout=60) as ctx:
    Path(job + rank).write_text(str(ctx.master_port))
    ctx.barrier()
"""
_LAUNCHERS = {
    "mpich": [str(MPICH), "-n", "2", sys.executable],
    "deepspeed": [str(BIN / "deepspeed"), "--hostfile", "/nonexistent", "--num_gpus", "2"],
}


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpich", marks=needs_mpich),
        pytest.param("deepspeed", marks=[needs_deepspeed, pytest.mark.all]),
    ],
)
@pytest.mark.parametrize("allocation", ["SLURM_JOB_ID", "LSB_JOBID"])
def test_jobs_of_one_allocation_do_not_mix(
    clean_env: dict[str, str], tmp_path: Path, launcher: str, allocation: str
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    jobs = []
    for name in "AB":
        with open(tmp_path / f"{name}.log", "w") as log:
            started = subprocess.Popen(
                [*_LAUNCHERS[launcher], "train.py"],
                cwd=tmp_path,
                env={**clean_env, allocation: "77", "JOB": name},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            jobs.append(started)

    def output() -> str:
        return (tmp_path / "A.log").read_text() + (tmp_path / "B.log").read_text()

    try:
        # Two launchers of DeepSpeed, each of which imports torch, on a machine that does other things
        until(lambda: "belongs to another job" in output() or (tmp_path / "A0").exists(), 180)
        (tmp_path / "go").touch()
        codes = [job.wait(120) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert codes == [0, 0], output()
    ports = {rank: (tmp_path / rank).read_text() for rank in ("A0", "A1", "B0", "B1")}
    assert ports["A0"] == ports["A1"] != ports["B0"] == ports["B1"]
