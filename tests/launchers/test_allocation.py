"""A job that leaves tasks or hosts of its allocation unused is told so, once, and its summary says so."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from captured import ALL
from conftest import Run
from hosts import Slurm
from inside import LAUNCHERS, sample_of, surroundings
from launched import MPIRUN, needs_mpirun, needs_slurm, needs_torch

from distboot import detect

JOB = (
    "import distboot; context = distboot.init('none'); print('rank', context.rank, "
    "'of', context.world_size)"
)
ALONE = "warning: this process is alone, but the {} allocation has {}"

NODES = "PBS_NODEFILE='/PBS_NODEFILE'"
PBS = {"PBS_JOBID": "1.srv", "PBS_ENVIRONMENT": "PBS_BATCH"}
TORQUE = {**PBS, "PBS_NUM_NODES": "2", "PBS_NUM_PPN": "2", "PBS_NP": "4"}
LSF = {"LSB_JOBID": "42", "LSB_DJOB_NUMPROC": "3"}
SGE = {"SGE_ROOT": "/opt/sge", "JOB_ID": "8", "NSLOTS": "4"}
OAR = {"OAR_JOB_ID": "8"}


def _found(environ: Mapping[str, str], **files: str) -> str:
    """What a process that no launcher started leaves unused; `files` by the variable that names them."""
    named = {**environ, **{name: f"/{name}" for name in files}}
    texts = {f"/{name}": text for name, text in files.items()}
    unused = surroundings.find_possible_peers(
        detect(named), named, read=lambda path: texts.get(path, "")
    )
    return "" if unused is None else unused.found.partition("allocation has ")[2]


@pytest.mark.parametrize(
    ("environ", "files", "found"),
    [
        (PBS, {"PBS_NODEFILE": "a\na\nb\nb\n"}, f"4 tasks ({NODES}) and 2 hosts ({NODES})"),
        (PBS, {"PBS_NODEFILE": "a\na\n"}, f"2 tasks ({NODES})"),
        (PBS, {"PBS_NODEFILE": "a\n"}, ""),
        (PBS, {"PBS_NODEFILE": ""}, ""),
        (TORQUE, {"PBS_NODEFILE": "a\na\nb\nb\n"}, f"2 hosts ({NODES})"),
        (TORQUE, {}, "2 hosts (PBS_NUM_NODES='2')"),
        ({**TORQUE, "PBS_NUM_NODES": "1"}, {}, ""),
        ({**LSF, "LSB_MCPU_HOSTS": "h1 2 h2 1 "}, {}, "2 hosts (LSB_MCPU_HOSTS='h1 2 h2 1 ')"),
        ({**LSF, "LSB_HOSTS": "h1 h1 h2"}, {}, "2 hosts (LSB_HOSTS='h1 h1 h2')"),
        (
            LSF,
            {"LSB_DJOB_HOSTFILE": "h1\nh1\nh2\n"},
            "2 hosts (LSB_DJOB_HOSTFILE='/LSB_DJOB_HOSTFILE')",
        ),
        ({**LSF, "LSB_MCPU_HOSTS": "h1 3 "}, {}, ""),
        ({**SGE, "NHOSTS": "2"}, {}, "2 hosts (NHOSTS='2')"),
        (
            SGE,
            {"PE_HOSTFILE": "a 2 all.q@a <NULL>\nb 2 all.q@b <NULL>\n"},
            "2 hosts (PE_HOSTFILE='/PE_HOSTFILE')",
        ),
        ({**SGE, "NHOSTS": "1"}, {}, ""),
        (OAR, {"OAR_NODEFILE": "a\na\nb\nb\n"}, "2 hosts (OAR_NODEFILE='/OAR_NODEFILE')"),
        (OAR, {"OAR_NODEFILE": "a\na\n"}, ""),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, {}, "4 tasks (SLURM_NTASKS='4')"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "many", "SLURM_JOB_NUM_NODES": "-2"}, {}, ""),
        (
            {"FLUX_URI": "local:///run/flux/local-0", "FLUX_JOB_NNODES": "2"},
            {},
            "2 hosts (FLUX_JOB_NNODES='2')",
        ),
    ],
)
def test_tasks_and_hosts_of_batch_systems(
    environ: dict[str, str], files: dict[str, str], found: str
) -> None:
    assert _found(environ, **files) == found


@pytest.mark.parametrize(
    ("environ", "is_named"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}, True),
        ({"MASTER_ADDR": os.uname().nodename}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"DISTBOOT_LAUNCHER": "torch"}, False),
    ],
)
def test_rank_0_on_another_host_is_named(environ: dict[str, str], is_named: bool) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "29500"}
    found = surroundings.find_possible_peers(detect({**job, **environ}), {**job, **environ})
    said = "the address of rank 0 is not an address of this host (MASTER_ADDR='192.0.2.7')"
    assert (found and found.found) == (said if is_named else None)


def test_captures_of_launchers_are_not_warned_of() -> None:
    warned = set()
    for capture in ALL:
        for process in capture.processes:
            placement = detect(process.environ)
            if surroundings.find_possible_peers(placement, process.environ) is not None:
                warned.add(capture.name)
    assert warned == {
        "slurm-interactive-22.05.8/uis_salloc_shell_typed_python",
        "slurm-salloc-22.05.8/salloc_shell_python",
        "slurm-sbatch-22.05.8/batch_step_python_no_ntasks",
        # mpirun was told to use one of two hosts
        "slurm-sbatch+openmpi4-22.05.8/mpirun_subset_1node",
        "slurm-salloc+torchrun-22.05.8/torchrun_standalone_in_srun_n2--agent1",
    }


SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
TORCHRUN = sample_of(LAUNCHERS["torchrun"].sample, rank=1, nodes=1, per_node=2)
OF_2_NODES = sample_of(LAUNCHERS["torchrun"].sample, rank=1, nodes=2, per_node=2)
DEEPSPEED = sample_of(LAUNCHERS["deepspeed"].sample, rank=1, nodes=1, per_node=2)
ONE_TASK = sample_of(LAUNCHERS["slurm"].sample, rank=0, nodes=1, per_node=1) | {
    "SLURM_JOB_NUM_NODES": "2"
}


def _outer(name: str, nodes: int = 2) -> dict[str, str]:
    return sample_of(LAUNCHERS[name].sample, rank=0, nodes=nodes, per_node=1)


def _of_one_node(name: str) -> dict[str, str]:
    return sample_of(LAUNCHERS[name].sample, rank=1, nodes=1, per_node=2)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (_outer("openmpi") | TORCHRUN, "openmpi has 2 processes (OMPI_COMM_WORLD_SIZE='2')"),
        (_outer("slurm") | TORCHRUN, "srun has 2 processes (SLURM_STEP_NUM_TASKS='2')"),
        (_outer("slurm") | DEEPSPEED, "srun has 2 processes (SLURM_STEP_NUM_TASKS='2')"),
        (SKYPILOT | TORCHRUN, "skypilot has 2 nodes (SKYPILOT_NUM_NODES='2')"),
        ({"NODE_RANK": "1", "NUM_NODES": "2"} | TORCHRUN, "nodes has 2 nodes (NUM_NODES='2')"),
        (
            {"NODE_RANK": "1", "NUM_NODES": "2", "PRIMARY_ADDR": "10.65.0.2"} | DEEPSPEED,
            "nodes has 2 nodes (NUM_NODES='2')",
        ),
        (
            {"AZUREML_NODE_COUNT": "2", "AZ_BATCHAI_TASK_INDEX": "1"} | TORCHRUN,
            "the environment shows other nodes (AZUREML_NODE_COUNT='2')",
        ),
        (
            {"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"} | TORCHRUN,
            "the environment shows other nodes (ACME_NODE_RANK='1', ACME_NUM_NODES='2')",
        ),
        (SKYPILOT | _of_one_node("openmpi"), "skypilot has 2 nodes (SKYPILOT_NUM_NODES='2')"),
        (SKYPILOT | _of_one_node("mpich"), "skypilot has 2 nodes (SKYPILOT_NUM_NODES='2')"),
        (SKYPILOT | _of_one_node("horovodrun"), "skypilot has 2 nodes (SKYPILOT_NUM_NODES='2')"),
        (
            {"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"} | _of_one_node("intelmpi"),
            "the environment shows other nodes (ACME_NODE_RANK='1', ACME_NUM_NODES='2')",
        ),
        (SKYPILOT | sample_of(LAUNCHERS["openmpi"].sample, rank=1, nodes=2, per_node=2), ""),
        (SKYPILOT | sample_of(LAUNCHERS["mpich"].sample, rank=1, nodes=2, per_node=2), ""),
        (
            {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"} | _of_one_node("openmpi"),
            "jax has 2 processes (JAX_NUM_PROCESSES='2')",
        ),
        # A shell that starts a step of srun on each node
        (SKYPILOT | ONE_TASK, "skypilot has 2 nodes (SKYPILOT_NUM_NODES='2')"),
        ({"NODE_RANK": "1", "NUM_NODES": "2"} | ONE_TASK, "nodes has 2 nodes (NUM_NODES='2')"),
        (
            {"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"} | ONE_TASK,
            "the environment shows other nodes (ACME_NODE_RANK='1', ACME_NUM_NODES='2')",
        ),
        (ONE_TASK, ""),
        (_outer("slurm") | _of_one_node("openmpi"), ""),
        # jsrun sets some of Open MPI's variables
        (_of_one_node("lsf") | {"OMPI_COMM_WORLD_NODE_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ""),
        ({"NODE_RANK": "0", "NUM_NODES": "1"} | TORCHRUN, ""),
        # Settings of torchrun, of one that is elastic, of this job, of others
        ({"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"} | TORCHRUN, ""),
        ({"NNODES": "1:4"} | TORCHRUN, ""),
        ({"NUM_PROCESSES": "2", "MY_WORLD_SIZE": "2"} | TORCHRUN, ""),
        ({"NEURON_PJRT_PROCESSES_NUM_DEVICES": "1,1"} | TORCHRUN, ""),
        ({"GRAPH_NUM_NODES": "100"} | TORCHRUN, ""),
        ({"HYPEROPT_WORKER_ID": "2", "HYPEROPT_NUM_WORKERS": "4"} | TORCHRUN, ""),
        ({"TASK_INDEX": "1", "TASK_COUNT": "4"} | TORCHRUN, ""),
        ({"CI_NODE_INDEX": "1", "CI_NODE_TOTAL": "4"} | TORCHRUN, ""),
        (_outer("openmpi") | OF_2_NODES, ""),
        (_outer("openmpi", nodes=1) | TORCHRUN, ""),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"} | TORCHRUN, ""),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"} | TORCHRUN, ""),
        (_outer("slurm") | TORCHRUN | {"SLURM_PTY_PORT": "40001"}, ""),
        (
            _outer("openmpi") | TORCHRUN | {"DISTBOOT_LAUNCHER": ""},
            "openmpi has 2 processes (OMPI_COMM_WORLD_SIZE='2')",
        ),
        (_outer("openmpi") | TORCHRUN | {"DISTBOOT_LAUNCHER": "torchrun"}, ""),
    ],
)
def test_jobs_that_each_process_starts(environ: dict[str, str], found: str) -> None:
    unused = surroundings.find_possible_peers(detect(environ), environ)
    assert ("" if unused is None else unused.found) == found


def test_wrapper_in_a_step_of_one_task(run: Run) -> None:
    here = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURMD_NODENAME": "127.0.0.1"}
    environ = {**ONE_TASK, **here, "NODE_RANK": "1", "NUM_NODES": "2"}
    wrapper = [sys.executable, "-m", "distboot", "run", "--nproc-per-node", "2", "train.py"]
    ended = run(*wrapper, train=JOB, env=environ)
    assert sorted(ended.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert "the 2 ranks are on 1 host, but nodes has 2 nodes (NUM_NODES='2')" in ended.stderr
    assert "add --nnodes, --node-rank and --master-addr" in ended.stderr
    alone = run(*wrapper, train=JOB, env={**environ, "DISTBOOT_LAUNCHER": "none"})
    assert sorted(alone.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert "warning" not in alone.stderr


@pytest.mark.all
@needs_mpirun
@needs_torch
def test_torchrun_in_each_process_of_mpirun(run: Run) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "train.py"]
    mpirun = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable]
    ended = run(*mpirun, *torchrun, train=JOB)
    assert ended.stdout.count("rank 0 of 1\n") == 2
    said = "this process is alone, but openmpi has 2 processes (OMPI_COMM_WORLD_SIZE='2'): if each"
    assert ended.stderr.count(f"warning: {said} of them starts torchrun, these are 2 jobs") == 2


@pytest.mark.parametrize("command", [["train.py"], ["-m", "distboot", "train.py"]])
def test_one_warning_from_init_and_wrapper(run: Run, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "nodes").write_text("a\nb\n")
    environ = {**TORQUE, "PBS_NODEFILE": str(tmp_path / "nodes")}
    ended = run(sys.executable, *command, train=JOB, env=environ)
    assert (ended.returncode, ended.stdout) == (0, "rank 0 of 1\n")
    assert ended.stderr.count("warning:") == 1
    assert ALONE.format("PBS", "2 hosts") in ended.stderr
    assert "mpiexec -n 2 python train.py" in ended.stderr
    assert "DISTBOOT_LAUNCHER=none" in ended.stderr
    for named in (
        {"DISTBOOT_LAUNCHER": "none"},
        {"PBS_NODEFILE": "/nowhere", "PBS_NUM_NODES": "1"},
    ):
        assert not run(sys.executable, *command, env={**environ, **named}).stderr


def test_show_and_doctor_name_it(distboot: Run) -> None:
    environ = {**SGE, "NHOSTS": "2"}
    said = "this process is alone, but the Grid Engine allocation has 2 hosts (NHOSTS='2')"
    assert f"note: {said}: start a process" in distboot("show", env=environ).stdout
    report = json.loads(distboot("doctor", "--json", env=environ).stdout)
    (finding,) = [one for one in report["findings"] if one["name"] == "allocation"]
    assert (finding["status"], finding["seen"]) == ("warning", said)


def test_launcher_in_a_command_is_not_warned_of(distboot: Run) -> None:
    script = "import os; print(os.environ['NHOSTS'])"
    command = ["sh", "-c", f'{sys.executable} -c "{script}"']
    ended = distboot("run", "--", *command, env={**SGE, "NHOSTS": "2"})
    assert (ended.stdout, ended.stderr) == ("2\n", "")


@pytest.mark.parametrize(
    ("answer", "warns"), [("echo 2", True), ("echo 1", False), ("exit 1", False)]
)
def test_flux_is_asked_for_its_size(run: Run, tmp_path: Path, answer: str, *, warns: bool) -> None:
    # Its batch scripts have no variable with it: flux-environment(7).
    flux = tmp_path / "flux"
    flux.write_text(f'#!/bin/sh\n[ "$*" = "getattr size" ] || exit 2\n{answer}\n')
    flux.chmod(0o755)
    environ = {"FLUX_URI": "local:///x", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = run(sys.executable, "train.py", train=JOB, env=environ)
    assert (ALONE.format("Flux", "2 hosts") in ended.stderr) == warns
    assert ended.returncode == 0
    command = [sys.executable, "-m", "distboot", "--nproc-per-node", "2", "train.py"]
    ended = run(*command, env=environ)
    assert ("all ended, but the Flux allocation has 2 hosts" in ended.stderr) == warns


def test_summary_of_a_smaller_job(distboot: Run) -> None:
    ended = distboot("--nproc-per-node", "2", "train.py", train=JOB, env={**SGE, "NHOSTS": "2"})
    assert "the 2 ranks are on 1 host, but the Grid Engine allocation has 2 hosts" in ended.stderr
    assert (
        "s: all ended, but the Grid Engine allocation has 2 hosts (NHOSTS='2'); exit"
        in ended.stderr
    )
    assert "ended well" not in ended.stderr


@needs_mpirun
def test_hostfile_that_openmpi_5_ignores(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("node-0 slots=1\nnode-1 slots=1\n# node-2\n")
    name = "OMPI_MCA_orte_default_hostfile"
    environ = {name: str(tmp_path / "hostfile")}
    mpirun = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable]
    ended = run(*mpirun, "train.py", train=JOB, env=environ)
    said = (
        f"the file {name}='{tmp_path}/hostfile' names 2 hosts, and Open MPI 5 does "
        "not read that variable"
    )
    assert (
        f"warning: the 2 ranks are on 1 host, but {said}: name the file in PRTE_MCA" in ended.stderr
    )
    assert f"all ended, but the file {name}=" in ended.stderr
    assert ended.stderr.count("warning:") == 1
    found = run(*mpirun, "-m", "distboot", "doctor", "--job", env=environ).stdout
    assert f"warning  allocation: all ranks: the 2 ranks are on 1 host, but {said}" in found


@needs_slurm
def test_batch_script_without_srun(slurm: Slurm) -> None:
    folder = slurm.hosts.shared / "without-srun"
    folder.mkdir()
    (folder / "train.py").write_text(JOB)
    (folder / "job.sh").write_text(
        f"#!/bin/bash\nexport PATH={Path(sys.executable).parent}:$PATH\n"
        "python train.py\npython -m distboot train.py\n"
        "DISTBOOT_LAUNCHER=none python train.py\nsrun python train.py\n"
    )
    submit = f"sbatch --ntasks=4 --chdir={folder} --output={folder}/out {folder}/job.sh"
    wait = 'while [ -n "$(squeue --noheader)" ]; do sleep 0.1; done'
    done = slurm.run(["bash", "-c", f"{submit} && {wait}"], timeout=100)
    text = (folder / "out").read_text()
    assert done.returncode == 0, done.stderr
    assert text.count("rank 0 of 1") == 3, text
    assert text.count(" of 4\n") == 4, text
    assert text.count("warning:") == 2, text
    said = ALONE.format("Slurm", "4 tasks (SLURM_NTASKS='4')")
    typed = (
        "start a process for each task: srun python train.py …; or start the "
        "ranks here: python -m distboot"
    )
    assert (
        text.count(f"{said}: {typed} --nproc-per-node 4 train.py …; or set DISTBOOT_LAUNCHER=none")
        == 2
    )
