"""Launchers started below the wrapper, for real: their ranks have numbers of their own, and N jobs are called that."""

import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
from horovods import needs_horovod
from hosts import Slurm
from launched import (
    BIN,
    MPI_ENV,
    MPICH,
    MPIRUN,
    OPENMPI4,
    needs_deepspeed,
    needs_mpich,
    needs_mpirun,
    needs_openmpi4,
    needs_slurm,
    needs_torch,
)
from ranks import SAY_PLACE, WRAPPER, Rank, RunRanks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DEEPSPEED = [str(BIN / "deepspeed"), "--hostfile", "/nonexistent", "--num_gpus", "2"]
HOROVODRUN = [str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable]
TWO_NODES = [{"LOCAL_RANK": "0", "NODE_RANK": str(node)} for node in range(2)]


Start = Callable[..., list[Rank]]


@pytest.fixture
def start(clean_env: dict[str, str], run_ranks: RunRanks) -> Start:
    """Runs a script in a job of one process on each of two nodes, as Azure ML starts them, with what is before it."""
    own = {"DS_ACCELERATOR": "cpu", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    env = {**MPI_ENV, **own, "PATH": f"{BIN}:{clean_env['PATH']}"}

    def run(*before: str, script: str = SAY_PLACE) -> list[Rank]:
        return run_ranks(script, before=before, places=TWO_NODES, **env)

    return run


def _lines(ended: list[Rank]) -> list[dict[str, Any]]:
    assert [rank.code for rank in ended] == [0] * len(ended), "".join(
        rank.out + rank.err for rank in ended
    )
    texts = [line for rank in ended for line in rank.out.splitlines() if '{"' in line]
    return sorted(
        (json.loads(text[text.index("{") :]) for text in texts), key=lambda line: str(line["place"])
    )


def _job_of(ranks: int) -> list[list[int]]:
    return [[rank, ranks, rank, ranks, 0, 1] for rank in range(ranks)]


def _below(
    name: str,
    command: list[str],
    launcher: str,
    ranks: int,
    mark: pytest.MarkDecorator,
    *options: str,
) -> Any:
    """With options it is a framework's launcher, for `make test-all`, and so is torchrun."""
    marks = [mark, pytest.mark.all] if options or name == "torchrun" else mark
    return pytest.param([*WRAPPER, *options, "--", *command], launcher, ranks, marks=marks, id=name)


@pytest.mark.all
@pytest.mark.parametrize(
    ("command", "launcher", "ranks"),
    [
        _below(
            "torchrun",
            [*TORCHRUN, "--standalone", "--nproc-per-node", "1"],
            "torchrun",
            1,
            needs_torch,
        ),
        _below("mpirun", [str(MPIRUN), "-n", "3", sys.executable], "openmpi", 3, needs_mpirun),
        _below(
            "mpirun",
            [str(OPENMPI4), "--oversubscribe", "-n", "3", sys.executable],
            "openmpi",
            3,
            needs_openmpi4,
        ),
        _below("mpiexec", [str(MPICH), "-n", "1", sys.executable], "mpich", 1, needs_mpich),
        _below("horovodrun", HOROVODRUN, "horovodrun", 2, needs_horovod, "--framework", "horovod"),
        _below("deepspeed", DEEPSPEED, "deepspeed", 2, needs_deepspeed, "--framework", "deepspeed"),
    ],
)
def test_each_rank_starts_a_job_of_its_own(
    start: Start, request: pytest.FixtureRequest, command: list[str], launcher: str, ranks: int
) -> None:
    """Also two `deepspeed` at once, which both want port 29500. MPICH has one rank per job: for two it needs a port."""
    ended = start(*command)
    lines = _lines(ended)
    assert [
        [rank, size, nodes] for rank, size, _, _, *nodes in (line["place"] for line in lines)
    ] == [[rank, ranks, [0, 1]] for rank in range(ranks) for _ in range(2)]
    # Open MPI 5 may give rank 1 the local rank 2, where it has more ranks than cores.
    assert sorted(line["place"][2] for line in lines) == sorted([*range(ranks)] * 2)
    assert {line["place"][3] for line in lines} == {ranks}
    assert {(line["launcher"], line["NODE_RANK"]) for line in lines} == {(launcher, "0")}
    name = request.node.callspec.id.rstrip("01")
    warning = (
        f"warning: each of the 2 ranks starts {name}, which starts a job of its "
        "own: 2 jobs that train separately"
    )
    assert [warning in rank.err for rank in ended] == [True, False]
    summary = (
        f"each rank ran {name} for a job of its own, and none joined the "
        "others; exit codes: 0 (ranks 0-1)"
    )
    assert summary in ended[0].err


@pytest.mark.all
@needs_torch
@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param(WRAPPER, id="one"),
        pytest.param([*WRAPPER, "--", *WRAPPER], id="in another"),
        pytest.param(
            ["env", "-u", "RANK", "-u", "LOCAL_RANK", *WRAPPER],
            id="of a node",
        ),
    ],
)
def test_launcher_given_all_nodes_starts_one_job(start: Start, wrapper: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    of_all = (
        f"--use-env --nnodes 2 --node-rank $NODE_RANK --master-addr 127.0.0.1 --master-port {port}"
    )
    launch = f"{sys.executable} -m torch.distributed.launch {of_all} --nproc-per-node 2"
    # A shell around the wrapper replaces NODE_RANK, as in a command of Azure ML.
    ended = start("sh", "-c", f'exec {" ".join(wrapper)} -- {launch} "$0"')
    lines = _lines(ended)
    assert [line["place"] for line in lines] == [
        [rank, 4, rank % 2, 2, rank // 2, 2] for rank in range(4)
    ]
    assert [line["NODE_RANK"] for line in lines] == ["0", "0", "1", "1"]
    assert not any("of its own" in rank.err for rank in ended)


@pytest.mark.all
@needs_torch
def test_launcher_in_a_shell_below_the_wrapper(start: Start) -> None:
    """The wrapper exports all that it exports for a script, as the shell's other words may be about this rank."""
    shell = " ".join([*TORCHRUN, "--standalone", "--nproc-per-node", "2", '"$0"'])
    ended = start(*WRAPPER, "--", "sh", "-c", shell)
    lines = _lines(ended)
    assert (
        "warning: each of the 2 ranks starts torchrun, which starts a job of its own"
        in ended[0].err
    )
    assert "each rank ran torchrun for a job of its own, and none joined the others" in ended[0].err
    assert [line["place"] for line in lines] == sorted(_job_of(2) * 2, key=str)
    assert {(line["launcher"], line["NODE_RANK"]) for line in lines} == {("torchrun", "0")}


@needs_mpirun
def test_script_below_inner_launcher_lacks_outer_variables(
    start: Start,
) -> None:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "GROUP_RANK")
    script = f"import os; print([name for name in {names} if name in os.environ])"
    ended = start(*WRAPPER, "--", str(MPIRUN), "-n", "1", sys.executable, script=script)
    assert [rank.out for rank in ended] == ["[]\n", "[]\n"], ended


@needs_slurm
@pytest.mark.parametrize("outer", [["-n1"], ["-N2", "-n2"]], ids=["1 task", "2 nodes"])
def test_steps_inside_a_step(slurm: Slurm, outer: list[str]) -> None:
    step = [
        "srun",
        "-Q",
        "--overlap",
        "-N1",
        "-n2",
        sys.executable,
        str(slurm.hosts.shared / "say.py"),
    ]
    (slurm.hosts.shared / "say.py").write_text(SAY_PLACE)
    done = slurm.run(
        ["salloc", "-Q", "-N2", "-n4", "srun", "-Q", "--overlap", *outer, *WRAPPER, "--", *step]
    )
    places = sorted(
        (line["place"] for line in _lines([Rank(done.returncode, done.stdout, done.stderr)])),
        key=str,
    )
    assert places == sorted(_job_of(2) * (1 if outer == ["-n1"] else 2), key=str)
