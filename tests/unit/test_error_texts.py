"""What a user reads when something is wrong, word for word: `error_texts/` has the text of each case.

After a change that is meant, write them again and read the difference aloud:
    DISTBOOT_WRITE_ERROR_TEXTS=1 make test ARGS=tests/unit/test_error_texts.py
"""

import os
import re
from pathlib import Path

import pytest
from captured import one
from conftest import Run
from documented import (
    AWSBATCH,
    AZUREML_NODE,
    PALS,
    PYTORCHJOB_4_A_POD,
    SAGEMAKER,
    TRAINJOB,
    VOLCANO,
    tf_config,
)

FOLDER = Path(__file__).parents[1] / "error_texts"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_ERROR_TEXTS"))

OPENMPI = one("openmpi-5.0.11/uneven_3_1", 3)
SEVERAL = {
    **OPENMPI,
    "MASTER_ADDR": "nodea",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_LOCAL_SIZE": "2",
}
MPICH = one("mpich-4.0.2/uneven_3_1", 3)
SLURM = one("slurm-srun-22.05.8/uneven_3_1_default", 3)
SLURM_ONE_TASK = one("slurm-sbatch-22.05.8/srun_override_1task", 0)
LIGHTNING_BY_HAND = {
    "NODE_RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "10002",
}
TORCHRUN = one("torchrun-2.13.0/2nodes_2procs_c10d", 3)

RUN = ("run", "--", "true")
CASES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "openmpi_rank_malformed": (RUN, {**OPENMPI, "OMPI_COMM_WORLD_RANK": "abc"}),
    "openmpi_three_problems": (
        RUN,
        {
            **OPENMPI,
            "OMPI_COMM_WORLD_SIZE": "",
            "OMPI_COMM_WORLD_LOCAL_RANK": "-1",
            "MASTER_PORT": "99999",
        },
    ),
    "openmpi_no_master_addr": (RUN, OPENMPI),
    "plain_no_master_addr": (RUN, {"RANK": "0", "WORLD_SIZE": "2"}),
    "plain_local_rank_no_master_addr": (RUN, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
    "plain_no_master_port": (RUN, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nodea"}),
    "plain_standalone": (
        ("run", "--standalone", "--nproc-per-node=2", "--", "true"),
        {"RANK": "0", "WORLD_SIZE": "2"},
    ),
    "openmpi_loopback_for_several_nodes": (RUN, {**OPENMPI, "MASTER_ADDR": "127.0.0.1"}),
    "openmpi_and_plain_disagree": (RUN, {**OPENMPI, "RANK": "0", "WORLD_SIZE": "1"}),
    "mpich_no_master_port": (RUN, {**MPICH, "MASTER_ADDR": "nodea"}),
    "mpich_size_missing": (
        RUN,
        {name: value for name, value in MPICH.items() if name != "PMI_SIZE"},
    ),
    "slurm_hostlist_malformed": (RUN, {**SLURM, "SLURM_STEP_NODELIST": "node[a-b]"}),
    "slurm_tasks_contradict": (RUN, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1"}),
    "torchrun_half": (
        RUN,
        {name: value for name, value in TORCHRUN.items() if name not in ("RANK", "MASTER_ADDR")},
    ),
    "plain_rank_without_world_size": (RUN, {"RANK": "0"}),
    "plain_rank_too_high": (
        RUN,
        {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "nodea", "MASTER_PORT": "29500"},
    ),
    "kubernetes_service_link": (
        RUN,
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "tcp://10.0.0.1:2222",
            "MASTER_PORT": "tcp://10.0.0.1:2222",
        },
    ),
    "port_out_of_range": (
        RUN,
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nodea", "MASTER_PORT": "70000"},
    ),
    "port_out_of_range_below_slurm": (RUN, {**SLURM, "MASTER_PORT": "70000"}),
    "address_and_port_below_slurm": (
        RUN,
        {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"},
    ),
    "address_beside_that_of_azureml": (
        RUN,
        {**OPENMPI, "MASTER_ADDR": "127.0.0.1", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
    ),
    "address_with_a_password": (
        RUN,
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "user:hunter2@nodea",
            "MASTER_PORT": "29500",
        },
    ),
    "tf_config_no_json": (RUN, {"TF_CONFIG": "{'cluster': {}}"}),
    "tf_config_master": (RUN, tf_config("master", 0, master=["a:1"], worker=["b:1"])),
    "tf_config_duplicate_and_loopback": (
        RUN,
        tf_config("worker", 0, worker=["localhost:1", "b:1", "b:1"]),
    ),
    "pytorchjob_four_a_pod": (RUN, PYTORCHJOB_4_A_POD),
    "azureml_one_process_a_node": (RUN, AZUREML_NODE),
    "azureml_number_of_nodes_missing": (
        ("run", "--nproc-per-node", "2", "--", "true"),
        {name: value for name, value in AZUREML_NODE.items() if name != "WORLD_SIZE"},
    ),
    "trainjob": (RUN, TRAINJOB),
    "trainjob_elastic": (RUN, {**TRAINJOB, "PET_NNODES": "1:3"}),
    "volcano": (RUN, VOLCANO),
    "volcano_pod_of_another_task": (
        RUN,
        {"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "1", "WORLD_SIZE": "3"},
    ),
    "lightning_by_hand": (RUN, LIGHTNING_BY_HAND),
    "awsbatch": (RUN, AWSBATCH),
    "not_alone": (
        RUN,
        {
            "ACME_NODE_RANK": "1",
            "ACME_NUM_NODES": "2",
            "ACME_WORLD_SIZE": "16",
            "ACME_NODE_IPS": "10.0.0.4,10.0.0.5",
        },
    ),
    "not_alone_address": (RUN, {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}),
    "not_alone_address_and_ranks": (
        ("run", "--nproc-per-node", "2", "--", "true"),
        {"MASTER_ADDR": "192.0.2.1"},
    ),
    "not_alone_address_by_option": (
        ("run", "--nproc-per-node", "2", "--master-addr", "192.0.2.1", "--", "true"),
        {},
    ),
    "world_size_of_one_and_signs": (
        RUN,
        {"RANK": "0", "WORLD_SIZE": "1", "ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"},
    ),
    "platforms_that_disagree": (
        RUN,
        {
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NUM_NODES": "2",
            "LWS_WORKER_INDEX": "1",
            "LWS_GROUP_SIZE": "3",
        },
    ),
    "platform_and_other_prefix_disagree": (
        RUN,
        {
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NUM_NODES": "2",
            "ACME_NODE_RANK": "1",
            "ACME_NUM_NODES": "3",
        },
    ),
    "number_of_nodes_malformed": (RUN, {"NNODES": "two"}),
    "sagemaker_eight_gpus": (RUN, {**SAGEMAKER, "SM_NUM_GPUS": "8"}),
    "pals_without_a_size": (
        RUN,
        {name: value for name, value in PALS.items() if name != "PMI_SIZE"},
    ),
    "slurm_task_0_of_a_container": (
        RUN,
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
    ),
    "slurm_one_task_and_world_size": (RUN, {**SLURM_ONE_TASK, "WORLD_SIZE": "8"}),
    "slurm_size_missing": (RUN, {"SLURM_PROCID": "3"}),
    "left_over_pmix": (RUN, {"PMIX_RANK": "3", "PMIX_NAMESPACE": "job"}),
    "launcher_misspelt": (RUN, {**OPENMPI, "DISTBOOT_LAUNCHER": "opnempi"}),
    "launcher_does_not_fit": (RUN, {**OPENMPI, "DISTBOOT_LAUNCHER": "slurm"}),
    "nproc_per_node_with_several": (("run", "--nproc-per-node", "4", "--", "true"), SEVERAL),
    "nnodes_with_several": (("run", "--nnodes", "4", "--", "true"), SEVERAL),
    "standalone_with_several": (
        ("run", "--standalone", "--nproc-per-node", "1", "--", "true"),
        SEVERAL,
    ),
    "nproc_per_node_malformed": (("run", "--nproc-per-node", "many", "--", "true"), {}),
    "failure_detection_word": (RUN, {**OPENMPI, "DISTBOOT_FAILURE_DETECTION": "false"}),
    "failure_detection_number": (RUN, {**OPENMPI, "DISTBOOT_FAILURE_DETECTION": "30"}),
    "files_that_are_folders": (
        RUN,
        {**OPENMPI, "DISTBOOT_REPORT": "r/", "DISTBOOT_METRICS": "/tmp/m/"},
    ),
    "join_timeout_malformed": (RUN, {**OPENMPI, "DISTBOOT_JOIN_TIMEOUT": "soon"}),
    "log_malformed": (RUN, {**OPENMPI, "DISTBOOT_LOG_FORMAT": "xml"}),
    "no_such_script": (("train.py",), {}),
    "no_such_option": (("show", "--jsno"), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_error_reads_as_written_down(distboot: Run, tmp_path: Path, name: str) -> None:
    arguments, env = CASES[name]
    result = distboot(*arguments, env=env)
    assert result.stdout == ""
    said = result.stderr.replace(str(tmp_path), "FOLDER").replace(os.uname().nodename, "HOST")
    said += f"exit code {result.returncode}\n"
    if WRITE:
        (FOLDER / f"{name}.txt").write_text(said)
    assert said == (FOLDER / f"{name}.txt").read_text()
    # In the log of 64 ranks each line of one stands alone; without a number the first line has the host.
    first, *others, _ = said.splitlines()
    assert not env or " on HOST: " in first
    who = re.search("(rank|node) [0-9]+ on HOST: ", first)
    assert who is None or all(who[0] in line for line in others)


def test_every_text_has_its_case() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == CASES.keys()
