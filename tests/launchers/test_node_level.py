"""One process per node or pod: told apart from a rank, refused as one, and turned into ranks by the wrapper."""

import os
import sys
from pathlib import Path

import pytest
from captured import one
from conftest import Run
from documented import AZUREML_NODE, AZUREML_PYTORCH, FLUX, PYTORCHJOB_4_A_POD, TRAINJOB
from inside import of_all, refuse_idle_accelerators
from launched import (
    FILES,
    MPI_ENV,
    MPIRUN,
    OPENMPI4,
    json_lines,
    needs_mpirun,
    needs_openmpi4,
    needs_torch,
)
from process1 import Mode, in_modes, wrapped
from supervised import until
from wrappers import alive

from distboot import DistbootError, detect, init


@pytest.fixture
def who(tmp_path: Path) -> str:
    path = tmp_path / "who is it.py"
    path.write_text(FILES["where.py"])
    return str(path)


def test_show_describes_it_and_the_remedy(distboot: Run) -> None:
    result = distboot("show", env=PYTORCHJOB_4_A_POD)
    assert result.returncode == 0
    assert result.stdout.startswith(
        "Node 2 of 3, not a rank: PET_NPROC_PER_NODE=4 asks for 4 processes in each "
    )
    assert "python -m distboot --nproc-per-node N script.py" in result.stdout


@pytest.mark.parametrize("environ", [PYTORCHJOB_4_A_POD, TRAINJOB, AZUREML_NODE])
def test_init_refuses_before_it_waits_for_anybody(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with pytest.raises(DistbootError) as refusal:
        init(join_timeout=600)
    assert refusal.value.code == "node-level-launch"
    assert "--nproc-per-node" in refusal.value.hint
    assert dict(os.environ) == before


def test_variables_of_a_rank_skip_a_node(distboot: Run) -> None:
    result = distboot("env", env=TRAINJOB)  # for `run` see error_texts/trainjob.txt
    assert (result.returncode, result.stdout) == (78, "")
    assert "error[node-level-launch]: node 1 on " in result.stderr


def test_one_mpi_process_a_node_may_be_refused() -> None:
    placement = detect(one("openmpi-4.1.4/2nodes_1proc", 1))
    assert (placement.rank, placement.world_size, placement.node_level) == (1, 2, None)
    assert any("one process was started on each node" in note for note in placement.notes)
    refuse_idle_accelerators(placement, "cuda", 1)
    with pytest.raises(DistbootError) as refusal:
        refuse_idle_accelerators(placement, "cuda", 8)
    assert refusal.value.code == "node-level-launch"
    assert "sees 8 cuda devices" in refusal.value.message


def test_several_ranks_a_node_or_torchruns_are_kept() -> None:
    for name in ("openmpi-4.1.4/1node_4procs", "torchrun-2.13.0/2nodes_2procs_static"):
        refuse_idle_accelerators(detect(one(name, 0)), "cuda", 8)
    chosen = {
        "GROUP_WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "3",
        "LOCAL_RANK": "0",
    }
    refuse_idle_accelerators(
        detect({**one("torchrun-2.13.0/2nodes_2procs_static", 3), **chosen}), "cuda", 8
    )


def test_one_rank_that_was_asked_for_is_kept() -> None:
    placement = detect(one("openmpi-4.1.4/2nodes_1proc", 1))
    below_wrapper = placement._replace(launcher="distboot")  # --nproc-per-node 1
    refuse_idle_accelerators(below_wrapper, "cuda", 8)


# Options for torchrun are not for our agent.
STRAY = {"PET_NO_PYTHON": "1", "PET_MODULE": "1", "PET_TEE": "x", "PET_VIRTUAL_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**STRAY, "DISTBOOT_LAUNCHER": "none"},
        pytest.param({"DISTBOOT_LAUNCHER": "single"}, marks=pytest.mark.all),
    ],
    ids=str,
)
def test_on_a_laptop_the_wrapper_starts_the_ranks(
    distboot: Run, who: str, environ: dict[str, str]
) -> None:
    lines = json_lines(distboot("--nproc-per-node", "2", who, env=environ))
    found = [
        (line["launcher"], line["RANK"], line["LOCAL_RANK"], line["WORLD_SIZE"]) for line in lines
    ]
    assert found == [("distboot", 0, 0, 2), ("distboot", 1, 1, 2)]


def test_module_and_command_are_started_too(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        # One write a line
        "import os, sys\nos.write(1, f\"{os.environ['RANK']} {sys.argv[1:]}\\n\".encode())"
    )
    module = distboot("run", "--nproc-per-node=2", "-m", "module", "--epochs", "3")
    assert sorted(module.stdout.splitlines()) == ["0 ['--epochs', '3']", "1 ['--epochs', '3']"]
    command = distboot("run", "--nproc-per-node", "2", "--", "sh", "-c", "echo $RANK; exit 0")
    assert sorted(command.stdout.split()) == ["0", "1"]


def test_pod_of_a_pytorchjob_starts_its_ranks(distboot: Run, who: str, port: int) -> None:
    only_pod = {
        **PYTORCHJOB_4_A_POD,
        "PET_NNODES": "1",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "PET_NODE_RANK": "0",
    }
    only_pod |= {"PET_NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    lines = json_lines(distboot("--nproc-per-node", "2", who, env=only_pod))
    assert [(line["RANK"], line["WORLD_SIZE"], line["NODE_RANK"]) for line in lines] == [
        (0, 2, 0),
        (1, 2, 0),
    ]


SAYS_ITS_RANK = "import os\nos.write(1, os.environ['RANK'].encode())\n"


@pytest.mark.all
@needs_torch
def test_torchrun_starts_the_ranks_of_one_pod(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAYS_ITS_RANK)
    pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    command = ["run", "--", sys.executable, "-m", "torch.distributed.run", "train.py"]
    done = distboot(*command, env=pod)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout) == ["0", "1"]


@pytest.mark.all
@needs_torch
def test_torchrun_told_of_nodes_needs_no_rank(distboot: Run, tmp_path: Path, port: int) -> None:
    (tmp_path / "train.py").write_text(SAYS_ITS_RANK)
    elastic = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    environ = {"MASTER_ADDR": "192.0.2.7", "PET_NNODES": "1:2"}
    done = distboot("run", "--", *torchrun, *elastic, "train.py", env=environ)
    assert (done.returncode, done.stdout) == (0, "0"), done.stderr
    told_of_one = distboot("run", "--", *torchrun, "train.py", env={"MASTER_ADDR": "192.0.2.7"})
    assert told_of_one.returncode == 78
    assert "error[not-alone]" in told_of_one.stderr


def test_pod_of_one_process_keeps_its_rank(distboot: Run) -> None:
    pod = {
        **TRAINJOB,
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "DISTBOOT_RENDEZVOUS": "0",
    }
    result = distboot("run", "--", sys.executable, "-m", "distboot", "show", "--json", env=pod)
    (line,) = json_lines(result)
    assert (line["launcher"], line["rank"], line["world_size"]) == ("kubeflow", 1, 2)


@pytest.mark.parametrize("environ", [AZUREML_PYTORCH, one("mpich-4.0.2/2nodes_2procs", 0), FLUX])
def test_one_of_several_processes_starts_no_ranks(distboot: Run, environ: dict[str, str]) -> None:
    result = distboot(
        "run", "--nproc-per-node", "2", "--", "true", env={**environ, "MASTER_ADDR": "10.0.0.4"}
    )
    assert result.returncode == 2
    assert "needs one process per node" in result.stderr


def test_node_beside_one_with_several_processes_refuses(distboot: Run) -> None:
    """The only task of its node, in a step with three tasks on the other one, which refuse."""
    only = one("slurm-srun-22.05.8/uneven_3_1_default", 3)
    done = distboot("run", "--nproc-per-node", "2", "--", "true", env=only)
    assert done.returncode == 2
    assert "needs one process per node, but slurm started 4 processes on 2 nodes" in done.stderr


@pytest.mark.all
@needs_mpirun
@pytest.mark.skipif((of_all() or 1) < 2, reason="a single CPU: binding takes nothing away")
def test_launcher_that_bound_the_process_is_warned_of(run: Run) -> None:
    def said(binding: str) -> str:
        mpirun = [str(MPIRUN), "-n", "1", "--bind-to", binding, sys.executable, "-m", "distboot"]
        return run(*mpirun, "run", "--nproc-per-node=1", "--", "true", env=MPI_ENV).stderr

    warning = f"warning: openmpi has bound this process to 1 of {of_all()} CPUs"
    bound = said("core")
    assert warning in bound
    assert (
        "set in the environment of the job OMPI_MCA_hwloc_base_binding_policy=none and PRTE_MCA_"
        in bound
    )
    assert warning not in said("none")


@needs_openmpi4
@needs_mpirun
@pytest.mark.skipif((of_all() or 1) < 2, reason="a single CPU: binding takes nothing away")
def test_variables_in_that_hint_do_what_it_says(run: Run) -> None:
    show = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    hint = {
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    for mpirun in (OPENMPI4, MPIRUN):
        bound, free = (
            run(str(mpirun), "-n", "1", *show, env={**MPI_ENV, **env}).stdout for env in ({}, hint)
        )
        assert (int(bound), int(free)) == (1, of_all()), mpirun


@pytest.mark.parametrize("command", ["--help", "no-such-command", ""])
def test_command_that_does_not_exist_is_said_once(distboot: Run, command: str) -> None:
    result = distboot("run", "--nproc-per-node", "2", "--", command)
    assert (result.returncode, result.stdout) == (127, "")
    assert result.stderr.startswith("distboot: error[command-not-found]: ")


def test_failure_of_a_rank_fails_the_wrapper(distboot: Run) -> None:
    assert distboot("run", "--nproc-per-node", "2", "--", "sh", "-c", "exit 3").returncode == 3
    assert distboot("--nproc-per-node", "2", "run", "--", "true").returncode == 127, (
        "the script is named run"
    )


@pytest.mark.parametrize("name", ["TERM", pytest.param("USR1", marks=pytest.mark.all)])
@in_modes(Mode("ranks of a node", options=("--nproc-per-node", "2"), is_contained=False))
def test_signal_ends_the_agent_and_its_ranks(
    clean_env: dict[str, str], mode: Mode, name: str
) -> None:
    with wrapped(mode, clean_env, "sh", "-c", "echo $$; exec sleep 600") as wrapper:
        ranks = [int(wrapper.line()), int(wrapper.line())]
        wrapper.send(name)
        assert wrapper.code() != 0
        until(lambda: not any(map(alive, ranks)))  # the kernel may take a moment
