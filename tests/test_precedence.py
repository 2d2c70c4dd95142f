"""Which launcher owns the rank when several speak; the real nested runs are in test_nested_launchers.py."""

from __future__ import annotations

import pytest
from captured import one
from documented import tf_config

from distboot import DistbootError, detect
from distboot.exports import applied, variables
from distboot.launchers import INNERMOST_FIRST

OPENMPI = "openmpi-5.0.11/uneven_3_1"


def test_launcher_names_are_unique_and_documented() -> None:
    names = [launcher.name for launcher in INNERMOST_FIRST]
    assert len(set(names)) == len(names)
    assert names[-1] == "single"
    assert all(launcher.source and launcher.title for launcher in INNERMOST_FIRST)


@pytest.mark.parametrize(
    ("capture", "innermost"),
    [
        ("torchrun-in-openmpi-4.1.4/2nodes_2procs_c10d", "torchrun"),
        ("torchrun-in-openmpi-5.0.11/2nodes_2procs_static", "torchrun"),
        ("torchrun-in-intelmpi-2021.19.0/2nodes_2procs_static", "torchrun"),
        ("slurm-sbatch+torchrun-22.05.8/srun_torchrun_c10d_2nodes_2procs", "torchrun"),
        ("slurm-sbatch+openmpi4-22.05.8/mpirun_2nodes_2procs_bynode", "openmpi"),
        ("slurm-sbatch+openmpi5-22.05.8/mpirun_2nodes_2procs", "openmpi"),
    ],
)
def test_innermost_launcher_wins(capture: str, innermost: str) -> None:
    assert {detect(one(capture, rank)).launcher for rank in range(4)} == {innermost}


def test_plain_variables_that_disagree_with_a_launcher_are_refused() -> None:
    with pytest.raises(DistbootError) as refusal:
        detect({**one(OPENMPI, 3), "RANK": "0", "WORLD_SIZE": "1"})
    assert refusal.value.code == "conflicting-launchers"
    assert "rank 3 of 4" in refusal.value.message
    assert "rank 0 of 1" in refusal.value.message
    assert "DISTBOOT_LAUNCHER=openmpi" in refusal.value.hint


def test_plain_variables_that_agree_change_nothing() -> None:
    placement = detect({**one(OPENMPI, 3), "RANK": "3", "WORLD_SIZE": "4"})
    assert (placement.launcher, placement.rank, placement.notes) == ("openmpi", 3, ())


@pytest.mark.parametrize("left_over", [{"WORLD_SIZE": "4"}, {"LOCAL_RANK": "7"}, {"RANK": "abc"}, {"TF_CONFIG": "{"}])
def test_half_a_plain_launcher_beside_a_whole_one_is_ignored_and_noted(left_over: dict[str, str]) -> None:
    placement = detect({**one(OPENMPI, 3), **left_over})
    assert (placement.launcher, placement.rank, placement.local_rank) == ("openmpi", 3, 0)
    assert any(next(iter(left_over)) in note for note in placement.notes)


def test_tf_config_that_disagrees_is_refused() -> None:
    with pytest.raises(DistbootError) as refusal:
        detect({**one(OPENMPI, 3), **tf_config("worker", 0)})
    assert refusal.value.code == "conflicting-launchers"


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_named_launcher_wins(how: str) -> None:
    environ = {**one(OPENMPI, 3), "RANK": "0", "WORLD_SIZE": "2"}
    if how == "variable":
        environ["DISTBOOT_LAUNCHER"] = "torch"
    placement = detect(environ, launcher="torch" if how == "argument" else None)
    assert (placement.launcher, placement.rank, placement.world_size) == ("torch", 0, 2)
    assert detect(environ, launcher="openmpi").rank == 3
    assert detect(environ, launcher="single").world_size == 1


def test_named_launcher_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DistbootError) as refusal:
        detect(one(OPENMPI, 3), launcher="slurm")
    assert refusal.value.code == "launcher-mismatch"
    assert "SLURM_STEP_ID" in refusal.value.message


def test_named_launcher_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DistbootError) as refusal:
        detect({"DISTBOOT_LAUNCHER": "opnempi"})
    assert refusal.value.code == "unknown-launcher"
    assert "openmpi" in refusal.value.hint


def test_step_that_contradicts_itself_is_refused() -> None:
    environ = one("slurm-srun-22.05.8/uneven_3_1_default", 3)
    for variable, value in (("SLURM_GTIDS", "2"), ("SLURM_STEP_TASKS_PER_NODE", "2,1"), ("SLURM_NODEID", "2")):
        with pytest.raises(DistbootError) as refusal:
            detect({**environ, variable: value})
        assert variable in refusal.value.message


def test_interactive_slurm_shell_is_single() -> None:
    environ = {**one("slurm-srun-22.05.8/1node_1proc", 0), "SLURM_STEP_ID": "4294967290"}
    assert detect(environ).launcher == "single"


def test_plain_rank_in_a_world_of_the_same_size_is_ignored_and_noted() -> None:
    # Exported once in a batch script: the same RANK for every task.
    placement = detect({**one("slurm-srun-22.05.8/2nodes_2procs", 3), "RANK": "0", "WORLD_SIZE": "4"})
    assert (placement.launcher, placement.rank) == ("slurm", 3)
    assert any("RANK, WORLD_SIZE ignored: slurm owns the rank, and says 3" in note for note in placement.notes)


def test_plain_variables_come_before_tf_config() -> None:
    plain = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    assert detect({**tf_config("worker", 0), **plain}).launcher == "torch"


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
def test_launcher_inside_a_slurm_step_wins_and_the_step_is_noted(inner: str, launcher: str) -> None:
    # The step of one task a node with which these launchers' daemons are started.
    step = one("slurm-srun-22.05.8/2nodes_1proc", 1)
    placement = detect({**step, **one(inner, 3)})
    assert (placement.launcher, placement.rank, placement.world_size) == (launcher, 3, 4)
    assert any("SLURM_STEP_ID" in note and "slurm is further out" in note for note in placement.notes)


@pytest.mark.parametrize(
    ("capture", "variables", "problem"),
    [
        (OPENMPI, {"OMPI_WORLD_SIZE": "8"}, "OMPI_WORLD_SIZE='8' contradicts OMPI_COMM_WORLD_SIZE"),
        ("slurm-srun-22.05.8/2nodes_2procs_pmi2", {"PMI_RANK": "0"}, "PMI_RANK='0' contradicts SLURM_PROCID"),
        ("slurm-srun-22.05.8/2nodes_2procs", {"SLURMD_NODENAME": "nodez"}, "SLURMD_NODENAME='nodez' is not in"),
        # sbatch called inside a step: the new job's own variables, and the step's of the old one.
        ("slurm-srun-22.05.8/2nodes_2procs", {"SLURM_NTASKS": "1"}, "left over from the step"),
        ("slurm-srun-22.05.8/2nodes_2procs", {"MASTER_ADDR": "127.0.0.1"}, "is a loopback address"),
        (OPENMPI, {"PMIX_RANK": "1"}, "PMIX_RANK='1' contradicts OMPI_COMM_WORLD_RANK='3'"),
        (
            "mpich-4.0.2/1node_4procs",
            {"MPI_LOCALRANKID": "1"},
            "PMI_RANK='3' of PMI_SIZE='4' cannot be at",
        ),
        (
            "intelmpi-2021.19.0/2nodes_2procs",
            {"HYDRA_BSTRAP_NODE_ID": "4", "PMI_SIZE": "8"},
            "cannot be at MPI_LOCALRANKID",
        ),
        ("torchrun-2.13.0/2nodes_2procs_c10d", {"GROUP_WORLD_SIZE": "4"}, "do not fit together"),
    ],
)
def test_what_contradicts_the_launchers_own_words_is_refused(
    capture: str, variables: dict[str, str], problem: str
) -> None:
    with pytest.raises(DistbootError) as refusal:
        detect({**one(capture, 3), **variables})
    assert problem in refusal.value.message


@pytest.mark.parametrize("variables", [{"OMPI_UNIVERSE_SIZE": "2"}, {"PRTE_MCA_rmaps_default_ranking_policy": "node"}])
def test_local_rank_of_open_mpi_is_not_taken_where_it_may_not_follow_the_ranks(variables: dict[str, str]) -> None:
    placements = [detect({**one("openmpi-5.0.11/2nodes_2procs", rank), **variables}) for rank in range(4)]
    assert {placement.local_rank for placement in placements} == {None}
    assert all(placement.notes for placement in placements)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("openmpi-5.0.11/2nodes_2procs", "mpich-4.0.2/2nodes_2procs"),
        ("mpich-4.0.2/2nodes_2procs", "openmpi-4.1.4/2nodes_2procs"),
        ("openmpi-4.1.4/2nodes_2procs", "mvapich2-2.3.7/2nodes_2procs"),
        ("horovodrun-0.28.1/gloo_2nodes_2procs", "mpich-4.0.2/2nodes_2procs"),
        # A step of one task a node is that of the daemons; one of two is not.
        ("mpich-4.0.2/2nodes_2procs", "slurm-srun-22.05.8/2nodes_2procs"),
        ("openmpi-4.1.4/2nodes_2procs", "slurm-srun-22.05.8/2nodes_2procs"),
        ("intelmpi-2021.19.0/2nodes_2procs", "slurm-srun-22.05.8/2nodes_2procs"),
    ],
)
def test_two_launchers_of_which_nothing_says_who_is_the_inner_one_are_refused(outer: str, inner: str) -> None:
    with pytest.raises(DistbootError) as refusal:
        detect({**one(outer, 0), **one(inner, 3)})
    assert refusal.value.code == "conflicting-launchers"
    assert "rank 0 of 4" in refusal.value.message
    assert "rank 3 of 4" in refusal.value.message


@pytest.mark.parametrize(
    "inner",
    [
        {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
        {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "LOCAL_RANK"), "00", strict=True)}
        | {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")},
    ],
    ids=["mpich", "openmpi"],
)
def test_world_of_one_left_over_in_a_shell_is_not_believed_in_a_step_of_several_tasks(inner: dict[str, str]) -> None:
    for step in ("slurm-srun-22.05.8/2nodes_1proc", "slurm-srun-22.05.8/2nodes_2procs"):
        with pytest.raises(DistbootError) as refusal:
            detect({**one(step, 1), **inner})
        assert refusal.value.code == "conflicting-launchers"


def test_local_rank_of_another_launcher_shows_that_the_rank_is_not_its_own() -> None:
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE anew, next to what is left over of Intel MPI.
    step = one("slurm-srun-22.05.8/2nodes_2procs_pmi2", 3)
    left_over = {"I_MPI_HYDRA_UUID": "u", "HYDRA_BSTRAP_NODE_ID": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    with pytest.raises(DistbootError):
        detect({**step, **left_over})


def test_digit_of_another_script_in_a_step_beside_mpi_is_no_traceback() -> None:
    step = {"SLURM_PROCID": "²", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    assert detect({**one("mpich-4.0.2/2nodes_2procs", 3), **step}).rank == 3


def test_mpirun_inside_one_task_of_flux_owns_the_rank() -> None:
    task = {"FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1"}
    assert detect({**task, **one("openmpi-4.1.4/1node_4procs", 3)}).launcher == "openmpi"


def test_launcher_started_under_the_wrapper_owns_its_ranks() -> None:
    outer = one("openmpi-4.1.4/1node_1proc", 0)
    wrapped = applied(variables(detect(outer), outer), outer)
    placement = detect({**wrapped, **one("mpich-4.0.2/1node_4procs", 3)})
    assert (placement.launcher, placement.rank, placement.world_size) == ("mpich", 3, 4)


def test_mpirun_typed_into_an_interactive_step_of_several_tasks_owns_the_rank() -> None:
    shell = {**one("slurm-srun-22.05.8/2nodes_2procs", 0), "SLURM_PTY_PORT": "45663"}
    assert detect({**shell, **one("openmpi-4.1.4/1node_4procs", 3)}).rank == 3


def test_variables_of_a_launcher_that_did_not_start_this_process_are_noted() -> None:
    placement = detect({"PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto", "RANK": "2", "WORLD_SIZE": "3"})
    assert placement.launcher == "torch"
    assert any(note.startswith("PET_NNODES, PET_NPROC_PER_NODE ignored") for note in placement.notes)


@pytest.mark.parametrize(
    "left_over", [{"CROSS_SIZE": "2"}, {"CROSS_RANK": "0"}, {"CROSS_RANK": "0", "CROSS_SIZE": "2"}]
)
def test_names_of_deepspeed_alone_are_somebody_elses(left_over: dict[str, str]) -> None:
    assert detect({**one(OPENMPI, 3), **left_over}).launcher == "openmpi"


def test_number_of_nodes_of_an_outer_open_mpi_4_is_not_that_of_an_inner_5() -> None:
    assert detect({**one("openmpi-5.0.11/2nodes_2procs", 3), "OMPI_MCA_orte_num_nodes": "4"}).num_nodes is None


def test_step_of_several_tasks_with_a_terminal_is_a_step() -> None:
    # srun inside an interactive shell inherits SLURM_PTY_PORT (seen with 22.05.8).
    assert detect({**one("slurm-srun-22.05.8/2nodes_2procs", 3), "SLURM_PTY_PORT": "45663"}).rank == 3
