"""Which launcher owns the rank when several speak; nested runs of real launchers are in the captures."""

import pytest
from captured import ALL, one, refused, wrong_numbers
from documented import tf_config
from inside import LAUNCHERS, for_launcher, merged, variables

from distboot import detect

OPENMPI = "openmpi-5.0.11/uneven_3_1"
UNEVEN_STEP = "slurm-srun-22.05.8/uneven_3_1_default"
INTELMPI = "intelmpi-2021.19.0/2nodes_2procs"


def test_launcher_names_are_unique_and_documented() -> None:
    assert list(LAUNCHERS)[-1] == "single"
    for name, launcher in LAUNCHERS.items():
        assert launcher.name == name
        assert launcher.source
        assert launcher.title


_FIRST = {
    each.launcher: each
    for each in reversed(ALL)
    if len(each.processes) > 1 and "+" not in each.name
}


# Plain RANK and WORLD_SIZE may be left over from a shell: below these two a contradiction is refused.
_CONTRADICTED = [("slurm", "torch"), ("distboot", "torch")]


# An inner distboot says itself, in DISTBOOT_PLACEMENT, what was there before it: see test_per_node.py.
@pytest.mark.parametrize("inner", [name for name in _FIRST if name not in ("distboot", "single")])
@pytest.mark.parametrize("outer", [name for name in _FIRST if name != "single"])
def test_launcher_below_the_wrapper_owns_the_rank(outer: str, inner: str) -> None:
    environ = _FIRST[outer].processes[1].environ
    environ = merged(for_launcher(detect(environ), environ, together=False), environ)
    for process in _FIRST[inner].processes:
        if (outer, inner) in _CONTRADICTED:
            assert refused({**environ, **process.environ}).code == "conflicting-launchers"
            continue
        placement = detect({**environ, **process.environ})
        assert (placement.launcher, wrong_numbers(placement, process)) == (inner, {})


@pytest.mark.parametrize(
    "job", [(), ("SLURM_JOB_ID",), ("SLURM_STEP_ID",), ("SLURM_JOB_ID", "SLURM_STEP_ID")], ids=str
)
def test_step_of_daemons_is_normal_in_container(job: tuple[str, ...]) -> None:
    """It gets what the wrapper has exported, rank and size of mpirun, and some of what srun has set for the daemon."""
    environ = one("slurm-sbatch+openmpi5-22.05.8/mpirun_2nodes_2procs", 2)
    exported = merged(variables(detect(environ), environ, met=True), environ)
    passed = {
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        *job,
    }
    given = {
        name: value
        for name, value in exported.items()
        if name in passed or environ.get(name) != value
    }
    placement = detect(given)
    assert (placement.launcher, placement.rank, placement.world_size) == ("openmpi", 2, 4)


@pytest.mark.parametrize(
    "left_over", [{"WORLD_SIZE": "4"}, {"LOCAL_RANK": "7"}, {"RANK": "abc"}, {"TF_CONFIG": "{"}]
)
def test_half_a_plain_launcher_is_ignored_and_noted(
    left_over: dict[str, str],
) -> None:
    placement = detect({**one(OPENMPI, 3), **left_over})
    assert (placement.launcher, placement.rank, placement.local_rank) == ("openmpi", 3, 0)
    assert any(next(iter(left_over)) in note for note in placement.notes)


def test_named_launcher_wins_and_argument_beats_variable() -> None:
    both = {**one(OPENMPI, 3), "RANK": "0", "WORLD_SIZE": "2"}
    for environ, name in ((both, "torch"), ({**both, "DISTBOOT_LAUNCHER": "torch"}, None)):
        placement = detect(environ, launcher=name)
        assert (placement.launcher, placement.rank, placement.world_size) == ("torch", 0, 2)
        assert detect(environ, launcher="openmpi").rank == 3
        assert detect(environ, launcher="single").world_size == 1


def test_plain_rank_of_same_size_is_noted() -> None:
    # Exported once in a batch script: the same RANK for every task.
    placement = detect(
        {**one("slurm-srun-22.05.8/2nodes_2procs", 3), "RANK": "0", "WORLD_SIZE": "4"}
    )
    assert (placement.launcher, placement.rank) == ("slurm", 3)
    assert any(
        "RANK, WORLD_SIZE ignored: slurm owns the rank, and has 3" in note
        for note in placement.notes
    )


@pytest.mark.parametrize(
    ("inner", "launcher"),
    [
        ("horovodrun-0.28.1/gloo_2nodes_2procs", "horovodrun"),
        ("mpich-4.0.2/2nodes_2procs", "mpich"),
        ("intelmpi-2021.19.0/2nodes_2procs", "intelmpi"),
        ("mvapich2-2.3.7/2nodes_2procs", "mvapich"),
        ("deepspeed-0.19.8/pdsh_2nodes_2procs", "deepspeed"),
        ("openmpi-5.0.11/2nodes_2procs", "openmpi"),
        ("torchrun-2.13.0/2nodes_2procs_c10d", "torchrun"),
    ],
)
def test_launcher_inside_slurm_wins_and_notes_it(inner: str, launcher: str) -> None:
    # The step of one task per node with which these launchers' daemons are started.
    step = one("slurm-srun-22.05.8/2nodes_1proc", 1)
    placement = detect({**step, **one(inner, 3)})
    assert (placement.launcher, placement.rank, placement.world_size) == (launcher, 3, 4)
    assert any(
        "SLURM_STEP_ID" in note and "slurm is further out" in note for note in placement.notes
    )


@pytest.mark.parametrize(
    ("capture", "variables", "problem"),
    [
        (OPENMPI, {"OMPI_WORLD_SIZE": "8"}, "OMPI_WORLD_SIZE='8' contradicts OMPI_COMM_WORLD_SIZE"),
        (
            "slurm-srun-22.05.8/2nodes_2procs_pmi2",
            {"PMI_RANK": "0"},
            "PMI_RANK='0' contradicts SLURM_PROCID",
        ),
        (
            "slurm-srun-22.05.8/2nodes_2procs_pmi2",
            {"PMI_SIZE": "8"},
            "PMI_SIZE='8' contradicts SLURM_STEP_NUM_TASKS",
        ),
        (
            "deepspeed-0.19.8/pdsh_uneven_3_2",
            {"LOCAL_RANK": "0"},
            "LOCAL_RANK='0' contradicts RANK % LOCAL_SIZE='1'",
        ),
        (
            "slurm-srun-22.05.8/2nodes_2procs",
            {"SLURMD_NODENAME": "nodez"},
            "SLURMD_NODENAME='nodez' is not in",
        ),
        # sbatch called inside a step: the new job's own variables, and the step's of the old one.
        ("slurm-srun-22.05.8/2nodes_2procs", {"SLURM_NTASKS": "1"}, "left over from the step"),
        ("slurm-srun-22.05.8/2nodes_2procs", {"MASTER_ADDR": "127.0.0.1"}, "is a loopback address"),
        (UNEVEN_STEP, {"SLURM_GTIDS": "2"}, "SLURM_GTIDS"),
        (UNEVEN_STEP, {"SLURM_GTIDS": "9" * 5000}, "SLURM_GTIDS"),
        (UNEVEN_STEP, {"SLURM_NODEID": "2"}, "SLURM_NODEID"),
        (OPENMPI, {"PMIX_RANK": "1"}, "PMIX_RANK='1' contradicts OMPI_COMM_WORLD_RANK='3'"),
        (
            "mpich-4.0.2/1node_4procs",
            {"MPI_LOCALRANKID": "1"},
            "PMI_RANK='3' of PMI_SIZE='4' cannot be at",
        ),
        (INTELMPI, {"HYDRA_BSTRAP_NODE_ID": "4", "PMI_SIZE": "8"}, "cannot be at MPI_LOCALRANKID"),
        ("torchrun-2.13.0/2nodes_2procs_c10d", {"GROUP_WORLD_SIZE": "4"}, "do not fit together"),
    ],
)
def test_contradiction_of_a_launcher_is_refused(
    capture: str, variables: dict[str, str], problem: str
) -> None:
    assert problem in refused({**one(capture, 3), **variables}).message


@pytest.mark.parametrize(
    ("capture", "source", "local_ranks"),
    [
        ("openmpi-5.0.11/1node_4procs", "OMPI_COMM_WORLD_LOCAL_RANK", [0, 2, 1, 3]),
        ("deepspeed-0.19.8/pdsh_uneven_3_2", "LOCAL_RANK", [0, 1, 2, 1, 0]),
    ],
)
def test_local_rank_is_the_launchers_in_any_order(
    capture: str, source: str, local_ranks: list[int]
) -> None:
    placements = [detect(one(capture, rank)) for rank in range(len(local_ranks))]
    assert [placement.local_rank for placement in placements] == local_ranks
    assert {placement.sources["local_rank"] for placement in placements} == {source}


def test_heterogeneous_ranks_leave_rank_0_unknown() -> None:
    # The list of hosts is sorted by name, and the ranks need not be.
    assert detect(one("slurm-het-22.05.8/salloc_srun_colon_n", 0)).master_addr is None


ONE_TASK_A_NODE = "slurm-srun-22.05.8/2nodes_1proc"
STEP = "slurm-srun-22.05.8/2nodes_2procs"
MPICH = one("mpich-4.0.2/2nodes_2procs", 0)
MPICH_ALONE = one("mpich-4.0.2/1node_1proc", 0)
MPI_5 = one("openmpi-5.0.11/2nodes_2procs", 0)
MPI_5_ALONE = one("openmpi-5.0.11/1node_1proc", 0)
MPI_4 = one("openmpi-4.1.4/2nodes_2procs", 0)
INTELMPI_0 = one(INTELMPI, 0)


@pytest.mark.parametrize(
    ("environ", "others", "ranks"),
    [
        (MPI_5, one("mpich-4.0.2/2nodes_2procs", 3), "0 of 4, 3 of 4"),
        (MPICH, one("openmpi-4.1.4/2nodes_2procs", 3), "0 of 4, 3 of 4"),
        (MPI_4, one("mvapich2-2.3.7/2nodes_2procs", 3), "0 of 4, 3 of 4"),
        (
            one("horovodrun-0.28.1/gloo_2nodes_2procs", 0),
            one("mpich-4.0.2/2nodes_2procs", 3),
            "0 of 4, 3 of 4",
        ),
        (MPI_5, {"PMI_RANK": "3", "PMI_SIZE": "4"}, "0 of 4, 3 of 4"),
        (MPI_5, tf_config("worker", 0), "0 of 4, 1 of 3"),
        # A step of one task per node is that of the daemons; one of two is not, and one of which nothing says it.
        (MPICH, one(STEP, 3), "0 of 4, 3 of 4"),
        (MPI_4, one(STEP, 3), "0 of 4, 3 of 4"),
        (INTELMPI_0, one(STEP, 3), "0 of 4, 3 of 4"),
        (MPICH, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "0 of 4, 1 of 2"),
        # A world of one that is left over in a shell is not believed in a step of several tasks.
        (one(ONE_TASK_A_NODE, 1), MPICH_ALONE, "0 of 1, 1 of 2"),
        (one(STEP, 1), MPICH_ALONE, "0 of 1, 1 of 4"),
        (one(ONE_TASK_A_NODE, 1), MPI_5_ALONE, "0 of 1, 1 of 2"),
        (one(STEP, 1), MPI_5_ALONE, "0 of 1, 1 of 4"),
    ],
)
def test_launchers_without_a_known_order_are_refused(
    environ: dict[str, str], others: dict[str, str], ranks: str
) -> None:
    refusal = refused({**environ, **others})
    assert refusal.code == "conflicting-launchers"
    assert all(f"rank {rank}" in refusal.message for rank in ranks.split(", "))


PYXIS = "slurm-pyxis-22.05.8+0.24.0/2nodes_2procs_both_hooks_pmi2"


def test_pmi_rank_that_pyxis_copied_is_ignored() -> None:
    environ = one(PYXIS, 2)
    assert (environ["PMI_RANK"], environ["SLURM_GTIDS"]) == ("3", "2,3")
    placement = detect(environ)
    assert (placement.launcher, placement.rank, placement.local_rank) == ("slurm", 2, 0)
    assert "PMI_RANK='3' ignored: it is another task's of this node" in "\n".join(placement.notes)


@pytest.mark.parametrize("others", [{"PMI_RANK": "1"}, {"PMI_JOBID": "7.0"}])
def test_pmi_rank_of_elsewhere_contradicts_srun(others: dict[str, str]) -> None:
    """That of a task of another node, or of another step."""
    assert "contradicts SLURM_PROCID='2'" in refused({**one(PYXIS, 2), **others}).message


def test_foreign_local_rank_shows_a_foreign_rank() -> None:
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE again, next to what is left over of Intel MPI.
    left_over = {
        "I_MPI_HYDRA_UUID": "u",
        "HYDRA_BSTRAP_NODE_ID": "1",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "1",
    }
    assert (
        refused({**one("slurm-srun-22.05.8/2nodes_2procs_pmi2", 3), **left_over}).code
        == "conflicting-launchers"
    )


OUTER = [
    ("plain-python-3.11/nothing", 0),
    ("openmpi-5.0.11/1node_4procs", 0),
    ("openmpi-4.1.4/2nodes_1proc", 1),
    ("mpich-4.0.2/1node_4procs", 0),
    ("slurm-srun-22.05.8/2nodes_1proc", 0),
    ("horovodrun-0.28.1/gloo_1node_4procs", 0),
]
INNER = [
    "torchrun-2.13.0/1node_4procs",
    "torchrun-2.13.0/2nodes_2procs_c10d",
    "deepspeed-0.19.8/1node_4procs",
    "horovodrun-0.28.1/gloo_1node_4procs",
    "openmpi-5.0.11/1node_4procs",
    "openmpi-4.1.4/1node_4procs",
    "mpich-4.0.2/1node_4procs",
    "slurm-srun-22.05.8/2nodes_2procs",
]
_OF_HOROVOD = {
    "HOROVOD_RANK": "0",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "4",
}
OF_FRAMEWORKS: dict[str, dict[str, str]] = {
    "none": {},
    "torch": {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
    "deepspeed": {"CROSS_RANK": "0", "CROSS_SIZE": "1"},
    "horovod": {
        **_OF_HOROVOD,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "61234",
    },
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("outer", "rank"), OUTER, ids=[name for name, _ in OUTER])
def test_any_launcher_below_any_wrapper_owns_ranks(outer: str, rank: int, inner: str) -> None:
    """With whatever the wrapper has exported for the outer rank, which is often the same number."""
    if outer == inner or (outer.startswith("mpich") and inner.startswith("slurm")):
        # The very same process; and MPICH's PMI_RANK, which stays there and contradicts srun, is an error
        return
    job = {"SLURM_JOB_ID": one(inner, 0)["SLURM_JOB_ID"]} if inner.startswith("slurm") else {}
    environ = {"MASTER_ADDR": "nodea", **job, **one(outer, rank)}
    for others in OF_FRAMEWORKS.values():
        child = merged(variables(detect(environ), environ, others=others), environ)
        for index, process in enumerate(
            next(capture for capture in ALL if capture.name == inner).processes
        ):
            below = {**child, **process.environ}
            placement = detect(below)
            assert placement.launcher == inner.partition("-")[0], (index, others)
            assert wrong_numbers(placement, process) == {}, (index, others)
            # The wrapper once more, below that
            deeper = detect(merged(variables(placement, below), below))
            assert deeper[:8] == placement[:8]


def test_variables_of_a_foreign_launcher_are_noted() -> None:
    placement = detect(
        {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto", "RANK": "2", "WORLD_SIZE": "3"}
    )
    assert placement.launcher == "torch"
    assert any(
        note.startswith("PET_NNODES, PET_NPROC_PER_NODE ignored") for note in placement.notes
    )


def test_inner_open_mpi_5_ignores_outer_4_nodes() -> None:
    assert detect({**MPI_5, "OMPI_MCA_orte_num_nodes": "4"}).num_nodes is None


PTY = {"SLURM_PTY_PORT": "45663"}
FLUX = {
    "FLUX_TASK_RANK": "0",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_SIZE": "1",
    "FLUX_JOB_NNODES": "1",
}
ODD_STEP = {"SLURM_PROCID": "²", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank"),
    [
        ({**one(OPENMPI, 3), "RANK": "3", "WORLD_SIZE": "4"}, "openmpi", 3),
        # An interactive shell; and srun in one, which inherits its terminal (seen with 22.05.8).
        ({**one("slurm-srun-22.05.8/1node_1proc", 0), "SLURM_STEP_ID": "4294967290"}, "single", 0),
        ({**one(STEP, 3), **PTY}, "slurm", 3),
        ({**one(STEP, 0), **PTY, **one("openmpi-4.1.4/1node_4procs", 3)}, "openmpi", 3),
        ({**MPICH, **ODD_STEP}, "mpich", 0),
        (
            {
                **MPICH,
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NUM_NODES": "2",
            },
            "mpich",
            0,
        ),
        ({**FLUX, **one("openmpi-4.1.4/1node_4procs", 3)}, "openmpi", 3),
        ({**tf_config("worker", 0), "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, "torch", 1),
        # DeepSpeed's names alone are somebody else's
        ({**one(OPENMPI, 3), "CROSS_SIZE": "2"}, "openmpi", 3),
        ({**one(OPENMPI, 3), "CROSS_RANK": "0"}, "openmpi", 3),
        ({**one(OPENMPI, 3), "CROSS_RANK": "0", "CROSS_SIZE": "2"}, "openmpi", 3),
    ],
)
def test_owner_of_the_rank(environ: dict[str, str], launcher: str, rank: int) -> None:
    placement = detect(environ)
    assert (placement.launcher, placement.rank, placement.notes if "RANK" in environ else ()) == (
        launcher,
        rank,
        (),
    )


@pytest.mark.parametrize(
    "capture", ["slurm-sbatch-22.05.8/srun_override_1task", "openmpi-5.0.11/1node_1proc"]
)
def test_one_process_beside_a_larger_world_size(capture: str) -> None:
    environ = one(capture, 0)
    refusal = refused({**environ, "WORLD_SIZE": "8"})
    assert (refusal.code, "but WORLD_SIZE=8" in refusal.message) == ("conflicting-launchers", True)
    launcher = detect(environ).launcher
    assert detect({**environ, "WORLD_SIZE": "8"}, launcher=launcher).world_size == 1
    for size in ("1", "", "many"):
        assert detect({**environ, "WORLD_SIZE": size}).world_size == 1
