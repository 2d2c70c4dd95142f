"""A process is alone only where nothing in its environment shows other processes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from captured import ALL, Capture, Process, refused
from conftest import Run
from inside import LAUNCHERS, detect_here, node_platforms

from distboot import (
    DistbootError,
    Placement,
    detect,
    init,
)

FOLDER = Path(__file__).parents[1] / "signs"


def _records(name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return records


ALONE, DOCUMENTED, REPORTED = map(_records, ("alone", "documented", "reported"))
UNKNOWN = {"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"}


def _elsewhere(environ: Mapping[str, str]) -> Placement:
    """What is found where no address but loopback is this host's, and no name resolves."""

    def look_up(_: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    return detect_here(environ, look_up=look_up, is_own=lambda _: False)


def _refusal(environ: Mapping[str, str]) -> DistbootError:
    with pytest.raises(DistbootError) as refusal:
        _elsewhere(environ)
    return refusal.value


def _outcome(environ: Mapping[str, str]) -> dict[str, object]:
    try:
        placement = _elsewhere(environ)
    except DistbootError as error:
        return {"refused": error.code}
    return {
        "launcher": placement.launcher,
        "rank": placement.rank,
        "world_size": placement.world_size,
        "address": placement.master_addr,
        "stands_for_a_node": placement.node_level is not None,
    }


@pytest.mark.parametrize("record", ALONE, ids=lambda record: record["name"])
def test_independent_job_stays_alone(record: dict[str, Any]) -> None:
    placement = _elsewhere(record["environ"])
    assert (placement.rank, placement.world_size, placement.node_level) == (0, 1, None)


@pytest.mark.parametrize("record", [*DOCUMENTED, *REPORTED], ids=lambda record: record["name"])
def test_documented_environment_is_read_or_refused(record: dict[str, Any]) -> None:
    assert _outcome(record["environ"]) == record["expected"]


# -- every sign


@pytest.mark.parametrize(
    "environ",
    [
        UNKNOWN,
        {"ACME_WORKER_INDEX": "0", "ACME_GROUP_SIZE": "4"},
        {"ACME_JOB_WORKER_INDEX": "3", "ACME_JOB_TOTAL_WORKERS": "4"},
        {"ACME_TASK_INDEX": "0", "ACME_TASK_COUNT": "2"},
        {"ACME_RANK": "0", "ACME_SIZE": "2"},
        {"ACME_PROCESS_ID": "0", "ACME_NUM_PROCESSES": "2"},
        {"ACME_INDEX": "0", "ACME_NUM_NODES": "2"},
        {"ACME_POD_INDEX": "0", "ACME_REPLICAS_COUNT": "2"},
        {"ACME_NODE_ID": "0", "ACME_NODES_NUM": "2"},
        {"ACME_MACHINE_RANK": "0", "ACME_NMACHINES": "2"},
        {"ACME_NODE_RANK": "abc", "ACME_NUM_NODES": "2"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": "two"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": " 2"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": "0x2"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": "-2"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": "0"},
        {"ACME_NODE_RANK": "5", "ACME_NUM_NODES": "1"},
        {"ACME_NODE_RANK": "1"},
        {"NNODES": "2"},
        {"NUM_NODES": "2"},
        {"NUM_PROCESSES": "4"},
        {"ACME_WORLD_SIZE": "8"},
        {"ACME_WORKER_HOSTNAMES": "10.0.0.4,10.0.0.5"},
        {"ACME_NODE_IPS": "10.0.0.4\n10.0.0.5"},
        {"ACME_WORKER_ADDRS": "[fd00::4]:1 [fd00::5]:1"},
        {"MASTER_ADDR": "10.0.0.4"},
        {"MASTER_ADDR": "job-0.svc", "MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "1"},
        {"MASTER_ADDR": "[fd00::4]:29500"},
        {"MASTER_ADDR": "["},
        {"COORDINATOR_ADDRESS": "job-0.svc:1234"},
        {"JAX_COORDINATOR_ADDRESS": "job-0.svc:1234"},
        {"ACME_LEADER_ADDRESS": "10.0.0.4"},
        {"ACME_INIT_METHOD": "tcp://10.0.0.4:23456"},
        {"AZ_BATCHAI_TASK_INDEX": "1"},
        {"ACME_RANK": "0", "ACME_WORLD": "4"},
        {"ACME_RANK": "0", "ACME_RANKS": "4"},
        {"ACME_NODE_ID": "0", "ACME_NODES": "2"},
        {"ACME_NODE_IDX": "0", "ACME_NODE_CNT": "2"},
        {"RANK_ID": "0", "RANK_SIZE": "8"},
        {"node_rank": "0", "num_nodes": "2"},
        {"ACME_WORLDSIZE": "2"},
        {"NNODES": "02"},
        {"NNODES": "2.0"},
        {"NNODES": "1:3"},
        {"ACME_REPLICA_INDEX": "1", "ACME_REPLICAS": "4"},
        {"ACME_NODE_NUMBER": "1", "ACME_NUMBER_OF_NODES": "2"},
        {"ACME_NODE_NO": "1", "ACME_TOTAL_NODES": "2"},
        {"ACME_VM_INDEX": "1", "ACME_VM_COUNT": "2"},
        {"ACME_CHIEF_ADDRESS": "10.0.0.4"},
        {"ACME_RANK0_IP": "10.0.0.4"},
        {"NNODES": " 2"},
        {"NUM_NODES": "0x2"},
        {"NRANKS": "9" * 30},
        {"TOTAL_NODES": "2"},
        {"WORKER_HOSTS": "a:1,b:1"},
        {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.4:6170,10.0.0.5:6170"},
        {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "32,32"},
        {"NEURON_RT_ROOT_COMM_ID": "10.0.0.4:62182"},
        {"NCCL_COMM_ID": "10.0.0.4:1234"},
        {"PET_RDZV_ENDPOINT": "job-master-0:29400"},
        {"MAIN_PROCESS_IP": "10.0.0.4"},
        {"PRIMARY_ADDR": "10.0.0.4"},
        {"DIST_URL": "tcp://10.0.0.4:23456"},
        {"DMLC_PS_ROOT_URI": "10.0.0.4"},
        {"master_addr": "10.0.0.4"},
    ],
    ids=" ".join,
)
def test_every_sign_is_named_with_its_value(environ: dict[str, str]) -> None:
    refusal = _refusal(environ)
    assert (refusal.code, refusal.exit_code) == ("not-alone", 78)
    for name, value in environ.items():
        if name not in ("MASTER_PORT", "JOB_COMPLETION_INDEX"):
            assert f"{name}={value!r}" in refusal.message
    for way_out in ("--nproc-per-node", "RANK, WORLD_SIZE", "DISTBOOT_LAUNCHER=none"):
        assert way_out in refusal.hint
    assert detect_here({**environ, "DISTBOOT_LAUNCHER": "none"}).world_size == 1
    assert detect_here(environ, launcher="none").world_size == 1


def test_hint_has_the_variables_to_type() -> None:
    refusal = _refusal({**UNKNOWN, "ACME_LEADER_ADDRESS": "10.0.0.4"})
    typed_words = (
        "NODE_RANK=$ACME_NODE_RANK NUM_NODES=$ACME_NUM_NODES MASTER_ADDR=$ACME_LEADER_ADDRESS"
    )
    assert typed_words in refusal.hint
    assert "ACME_LEADER_ADDRESS='10.0.0.4': the address of rank 0" in refusal.message
    typed = {"NODE_RANK": "1", "NUM_NODES": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}
    placement = detect({**UNKNOWN, **typed})
    assert (placement.rank, placement.num_nodes, placement.launcher) == (1, 2, "nodes")


@pytest.mark.parametrize(
    "environ",
    [
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": "1"},
        {"ACME_NODE_INDEX": "1", "ACME_NODE_COUNT": "1"},
        {"ACME_JOB_INDEX": "1", "ACME_JOB_COUNT": "4"},
        {"ACME_SHARD_INDEX": "1", "ACME_SHARD_COUNT": "4"},
        {"NUM_WORKERS": "8"},
        {"ACME_WORKER_ID": "web.1", "ACME_WORKER_COUNT": "4"},
        {"ACME_WORKER_HOSTNAMES": "10.0.0.4,10.0.0.4"},
        {"ACME_WORKER_HOSTNAMES": "localhost,127.0.0.1"},
        {"POD_IPS": "10.244.1.5,fd00:10:244:1::5"},
        {"LORA_RANK": "16"},
        {"PROJECTION_RANK": "64"},
        {"TASK_ID": "5", "TASK_SIZE": "7", "GROUP_SIZE": "128"},
        {"INSTANCE_ID": "12345", "INSTANCE_COUNT": "3"},
        {"INSTANCE_ID": "9" * 5000, "INSTANCE_COUNT": "3"},
        {"NXF_TASK_INDEX": "4", "NXF_TASK_COUNT": "8"},
        {"CASSANDRA_HOST_IPS": "10.0.0.4,10.0.0.5"},
        {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "32"},
        {"WORLD_SIZE": "1"},
        {"TF_CONFIG": "{}"},
        {"NNODES": "01"},
        {"NNODES": "1.0"},
        {"NNODES": "1:1"},
        {"NUM_NODES": ""},
        {"NUM_PROCESSES": "auto"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": " 1"},
        {"DIST_URL": "env://"},
        {"MASTER_ADDR": ""},
        {"ACME_INIT_METHOD": "file:///tmp/shared"},
    ],
    ids=" ".join,
)
def test_what_is_no_sign_refuses_nothing(environ: dict[str, str]) -> None:
    assert _elsewhere(environ).world_size == 1


def test_hint_has_the_host_of_a_url() -> None:
    refusal = _refusal({"ACME_INIT_METHOD": "tcp://job-master-0:23456"})
    assert "MASTER_ADDR=job-master-0 MASTER_PORT=29500" in refusal.hint


def test_hint_never_has_the_password_of_a_url() -> None:
    for value in ("https://user:hunter2@etcd:2379", "https://user:hunter2@et\x1bcd/a?b=c"):
        refusal = _refusal({"PET_RDZV_ENDPOINT": value})
        assert "hunter2" not in str(refusal)
        assert "\x1b" not in str(refusal)
    refusal = _refusal({"INIT_METHOD": "tcp://:hunter2@10.9.9.9:2379"})
    assert "MASTER_ADDR=10.9.9.9 " in refusal.hint


@pytest.mark.parametrize(
    "environ",
    [
        {"ACME_NODE_INDEX": "2", "ACME_NODE_COUNT": "2"},  # from 1
        {"ACME_NODE_INDEX": "1", "ACME_NODES": "a,b"},
        {"ACME_NODE_RANK": "1", "ACME_WORLD_SIZE": "16"},
    ],
    ids=" ".join,
)
def test_hint_has_numbers_of_nodes_only(environ: dict[str, str]) -> None:
    assert "NODE_RANK=<number of this node> NUM_NODES=<nodes>" in _refusal(environ).hint


def test_count_of_nodes_is_found_in_any_order() -> None:
    several = {"ACME_WORLD_SIZE": "16", **UNKNOWN}
    assert "NODE_RANK=$ACME_NODE_RANK NUM_NODES=$ACME_NUM_NODES" in _refusal(several).hint
    of_platform = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", **several}
    assert _elsewhere(of_platform).num_nodes == 2
    of_workers = {"ACME_WORLD_SIZE": "16", "ACME_WORKER_INDEX": "1", "ACME_NUM_WORKERS": "4"}
    assert "ACME_NUM_WORKERS='4' disagree" in str(_refusal({**of_platform, **of_workers}))


@pytest.mark.parametrize("value", ["two", "0", "-2", "all"])
@pytest.mark.parametrize(
    "name", ["NNODES", "NUM_NODES", "NODE_COUNT", "NUM_MACHINES", "WORLD_SIZE"]
)
def test_malformed_size_is_named_with_its_value(name: str, value: str) -> None:
    refusal = _refusal({name: value})
    assert refusal.code == "broken-environment"
    assert f"{name}={value!r}" in refusal.message
    assert name in refusal.hint


# -- prefixes that disagree

SKYPILOT = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}


@pytest.mark.parametrize(
    "environ",
    [
        {"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "3"},
        {"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"},
        {"ACME_WORKER_INDEX": "0", "ACME_GROUP_SIZE": "4"},
        {"ACME_WORKER_INDEX": "2", "ACME_GROUP_SIZE": "2"},
        {"ACME_RANK": "1", "ACME_WORLD_SIZE": "3"},
        {"ACME_WORKER_INDEX": "0", "ACME_NUM_WORKERS": "4"},
        {"DATAPROC_NODE_RANK": "0", "DATAPROC_NUM_NODES": "4"},
    ],
    ids=" ".join,
)
def test_platform_and_other_prefix_that_disagree_are_named(environ: dict[str, str]) -> None:
    refusal = _refusal({**SKYPILOT, **environ})
    assert refusal.code == "conflicting-launchers"
    assert "skypilot has node 0 of 2 (SKYPILOT_NODE_RANK)" in refusal.message
    for name, value in environ.items():
        assert f"{name}={value!r}" in refusal.message
    believed = detect({**SKYPILOT, **environ, "DISTBOOT_LAUNCHER": "skypilot"})
    assert (believed.rank, believed.num_nodes) == (0, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": "2"},
        {"ACME_NODE_INDEX": "1", "ACME_NODE_COUNT": "2"},
        {"ACME_RANK": "5", "ACME_WORLD_SIZE": "16"},
        {"ACME_NODE_RANK": "0", "ACME_WORLD_SIZE": "16"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_PROCESSES": "16"},
        {"ACME_NODE_RANK": "0", "ACME_NUM_NODES": "two"},
        {"CI_NODE_INDEX": "3", "CI_NODE_TOTAL": "4"},
        {"RAY_NODE_ID": "3", "RAY_NUM_NODES": "4"},
        {"SKYPILOT_WORKER_INDEX": "3", "SKYPILOT_WORKER_COUNT": "4"},
    ],
    ids=" ".join,
)
def test_platform_and_other_prefix_that_agree_are_read(environ: dict[str, str]) -> None:
    placement = _elsewhere({**SKYPILOT, **environ})
    assert (placement.launcher, placement.rank, placement.num_nodes) == ("skypilot", 0, 2)


def test_two_unknown_prefixes_that_disagree_are_both_named() -> None:
    refusal = _refusal({**UNKNOWN, "BETA_NODE_RANK": "0", "BETA_NUM_NODES": "3"})
    assert refusal.code == "not-alone"
    assert "ACME_NODE_RANK='1', ACME_NUM_NODES='2'" in refusal.message
    assert "BETA_NODE_RANK='0', BETA_NUM_NODES='3'" in refusal.message
    assert "NODE_RANK=<number of this node> NUM_NODES=<nodes>" in refusal.hint


def test_rank_0_of_1_outweighs_no_signs() -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1"}
    refusal = refused({**one, **UNKNOWN})
    assert refusal.code == "not-alone"
    assert "launcher 'torch' has rank 0 of 1 (RANK)" in refusal.message
    assert "-u LOCAL_WORLD_SIZE NODE_RANK=$ACME_NODE_RANK" in refusal.hint
    refusal = refused({**one, "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"})
    assert refusal.code == "conflicting-launchers"
    assert "SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES" in refusal.hint


# -- what only this host can tell


def test_own_address_in_any_spelling_is_alone() -> None:
    for host in (
        "localhost",
        "LOCALHOST.",
        "127.0.0.1",
        "127.1.2.3",
        "[::1]:29500",
        "0.0.0.0",
        "::",
    ):
        assert detect_here({"MASTER_ADDR": host}).world_size == 1, host


@pytest.mark.parametrize(
    ("found", "is_alone"),
    [
        (["10.0.0.4"], True),
        (["127.0.1.1"], True),
        (["10.0.0.4", "10.0.1.4", "::1"], True),
        (["10.0.0.5"], False),
        (["10.0.0.4", "10.0.0.5"], False),
    ],
)
def test_name_is_own_if_all_addresses_are(found: list[str], *, is_alone: bool) -> None:
    own = {"10.0.0.4", "10.0.1.4"}

    def place() -> Placement:
        environ = {"MASTER_ADDR": "job-0.svc"}
        return detect_here(environ, look_up=lambda _: found, is_own=own.__contains__)

    if is_alone:
        assert place().world_size == 1
        return
    with pytest.raises(DistbootError, match=r"resolves to another host, 10\.0\.0\.5"):
        place()


def test_pure_detect_asks_no_host() -> None:
    assert detect({"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}).launcher == "single"


# -- all ways in


@pytest.mark.parametrize(
    "environ", [UNKNOWN, {"MASTER_ADDR": "192.0.2.1"}], ids=["index", "address"]
)
@pytest.mark.parametrize(
    "words",
    [["show"], ["show", "--json"], ["env"], ["run", "--", "true"], ["try", "--", "true"]],
    ids=" ".join,
)
def test_every_command_refuses_alike(
    distboot: Run, words: list[str], environ: dict[str, str]
) -> None:
    result = distboot(*words, env=environ)
    assert (result.returncode, result.stdout) == (78, "")
    assert result.stderr.startswith("distboot: error[not-alone]: on ")
    for name, value in environ.items():
        assert f"{name}={value!r}" in result.stderr
    assert "DISTBOOT_LAUNCHER=none" in result.stderr


@pytest.mark.parametrize(
    "environ", [UNKNOWN, {"MASTER_ADDR": "192.0.2.1"}], ids=["index", "address"]
)
def test_doctor_is_not_ready(distboot: Run, environ: dict[str, str]) -> None:
    result = distboot("doctor", env=environ)
    assert result.returncode == 78
    assert "its environment shows other processes" in result.stdout


def test_init_refuses_and_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNKNOWN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistbootError) as refusal:
        init("none")
    assert refusal.value.code == "not-alone"


def test_process_told_that_it_is_alone_runs(distboot: Run) -> None:
    told = {**UNKNOWN, "DISTBOOT_LAUNCHER": "none"}
    assert distboot("run", "--", "true", env=told).returncode == 0


# -- no variable that is lost or damaged makes a rank alone

_DAMAGES = (None, "abc", "", "-1", "1e3", "9" * 30, " 2", "0x2")


def _silently_alone(environ: Mapping[str, str]) -> set[str]:
    """The variables without which, or with which damaged, a process of several is taken for one that is alone."""
    found = set()
    for name in environ:
        rest = {other: value for other, value in environ.items() if other != name}
        for damage in _DAMAGES:
            try:
                placement = _elsewhere(rest if damage is None else {**rest, name: damage})
            except DistbootError:
                continue
            if placement.world_size == 1:
                found.add(name)
    return found


_SEVERAL = [capture for capture in ALL if capture.processes[0].expected["size"] != 1]


@pytest.mark.parametrize("capture", _SEVERAL, ids=lambda capture: capture.name)
def test_damaged_rank_is_never_alone(capture: Capture) -> None:
    def is_new(process: Process) -> bool:
        return process in (capture.processes[0], capture.processes[-1])

    for process in filter(is_new, capture.processes):
        assert _silently_alone(process.environ) == set()


# What is left then says nothing of others: variable by variable.
_NOTHING_LEFT = {
    "vertex": {"CLUSTER_SPEC"},
    "determined": {"DET_KUBERNETES_JOB_PARALLELISM"},
    "vertex, primary": {"CLUSTER_SPEC"},
    "tpu, a process for each chip of a host": {"TPU_PROCESS_ADDRESSES"},
}
_OF_SEVERAL = {record["name"]: record["environ"] for record in [*DOCUMENTED, *REPORTED]}
_OF_SEVERAL = {
    name: environ
    for name, environ in _OF_SEVERAL.items()
    if _outcome(environ).get("launcher") != "single"
}
_OF_SEVERAL |= {
    one.name: dict(word.split("=", 1) for word in one.sample.split(" "))
    for one in node_platforms(LAUNCHERS.values())
}


@pytest.mark.parametrize("name", _OF_SEVERAL)
def test_damaged_node_is_never_alone(name: str) -> None:
    assert _silently_alone(_OF_SEVERAL[name]) == _NOTHING_LEFT.get(name, set())
