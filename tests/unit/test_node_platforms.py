"""The platforms that number nodes: each row's sample, subsets of it, contradictions, and ranks on two nodes."""

import itertools
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from captured import refused
from conftest import Run
from inside import (
    LAUNCHERS,
    NodePlatform,
    node_platforms,
    ranks_per_node,
    refuse_unless_rank,
)
from test_not_alone import DOCUMENTED

from distboot import DistbootError, Placement, detect

NODE_PLATFORMS = node_platforms(LAUNCHERS.values())
ROWS = {one.name: one for one in NODE_PLATFORMS}


def sample(platform: NodePlatform) -> dict[str, str]:
    return dict(word.split("=", 1) for word in platform.sample.split(" "))


# What the sample of each row says: ranks per node as --nproc-per-node auto takes them, and the address of node 0.
SAMPLES = {
    "kubeflow": (8, "digits-node-0-0.digits"),
    "modelarts": (8, "job-worker-0.job"),
    "volcano": (None, "job-master-0.job"),
    "pods": (8, "demo-master-0"),
    "skypilot": (8, "10.0.0.4"),
    "dstack": (8, "192.168.0.94"),
    "lepton": (8, "worker-0.env-job-98bw-job-svc"),
    "metaflow": (None, "10.0.0.4"),
    "lws": (None, "lws-0.lws.default"),
    "volcengine": (8, "10.128.0.4"),
    "baseten": (8, "10.0.0.4"),
    "ngc": (8, "launcher-svc-1234567"),
    "nsml": (None, "run-1-0"),
    "beaker": (8, "jupiter-101.example.com"),
    "htcondor": (None, None),
    "tpu": (1, "job-slice-0-0.svc"),
    "vertex": (None, "pool0-0"),
    "nodes": (8, "10.65.0.2"),
    "sagemaker": (8, "algo-1"),
    "awsbatch": (None, "10.0.0.4"),
}


def test_every_row_has_a_sample_and_a_page() -> None:
    assert SAMPLES.keys() == ROWS.keys()
    for platform in NODE_PLATFORMS:
        assert platform.source.startswith("https://")
        assert LAUNCHERS[platform.name].title == platform.title


@pytest.mark.parametrize("name", ROWS)
def test_sample_is_the_second_of_two_nodes(name: str) -> None:
    environ = sample(ROWS[name])
    placement = detect(environ)
    per_node, address = SAMPLES[name]
    assert (placement.launcher, placement.rank, placement.num_nodes) == (name, 1, 2)
    assert placement.master_addr == address
    assert (placement.node_level is None) == (per_node == 1)
    found = ranks_per_node(NODE_PLATFORMS, environ)
    assert (found and found[1]) == per_node


@pytest.mark.parametrize("name", ROWS)
def test_subset_with_index_and_count_is_not_wrong(name: str) -> None:
    platform = ROWS[name]
    environ = sample(platform)
    whole = detect(environ)
    kept = {*platform.markers, platform.index_variable, platform.count_variable}
    optional = [one for one in environ if one not in kept]
    for size in range(len(optional) + 1):
        for chosen in itertools.combinations(optional, size):
            part = {one: environ[one] for one in environ if one in kept or one in chosen}
            _check_part(whole, part)


def _check_part(whole: Placement, part: Mapping[str, str]) -> None:
    try:
        placement = detect(part)
    except DistbootError:
        return
    assert (placement.rank, placement.num_nodes) in ((1, 2), (1, None)), part
    assert placement.master_addr in (None, whole.master_addr), part


def test_one_node_of_a_platform_is_alone() -> None:
    for name in ("skypilot", "dstack", "lepton", "metaflow", "lws", "volcengine", "ngc", "baseten"):
        row = ROWS[name]
        environ = sample(row) | {row.index_variable: "0", row.count_variable: "1"}
        environ.pop(row.hosts, None)
        assert detect(environ).launcher == "single", name


@pytest.mark.parametrize(
    ("environ", "nodes", "source"),
    [
        ({"NUM_NODES": "2", "NUM_TRAINERS": "8", "WORLD_SIZE": "16"}, 2, "NUM_NODES"),
        ({"NNODES": "2", "WORLD_SIZE": "16"}, 2, "NNODES"),
        ({"NODE_COUNT": "2"}, 2, "NODE_COUNT"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2, "WORLD_SIZE / LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "16", "NUM_TRAINERS": "8"}, 2, "WORLD_SIZE / NUM_TRAINERS"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, 2, "WORLD_SIZE, taken for"),
        ({"WORLD_SIZE": "16"}, 16, "WORLD_SIZE, taken for the number of nodes"),
    ],
)
def test_number_of_nodes_and_its_source(environ: dict[str, str], nodes: int, source: str) -> None:
    placement = detect({"NODE_RANK": "1", **environ})
    assert (placement.rank, placement.num_nodes) == (1, nodes)
    assert placement.sources["num_nodes"].startswith(source)
    assert any("taken for" in note for note in placement.notes) == ("taken for" in source)


def test_one_node_of_several_ranks_is_no_rank() -> None:
    environ = {"NODE_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    assert (
        detect(environ).node_level
        == "LOCAL_WORLD_SIZE='8', and one process was started on each node"
    )
    alone = detect({"NODE_RANK": "0", "WORLD_SIZE": "1", "NNODES": "1", "NPROC_PER_NODE": "8"})
    assert (alone.world_size, alone.node_level) == (1, None)


_SKYPILOT = sample(ROWS["skypilot"])
_LWS = sample(ROWS["lws"])


def _spec(task: object, **cluster: list[str | None]) -> dict[str, str]:
    spec = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]} | cluster, "task": task}
    return {"CLUSTER_SPEC": json.dumps(spec)}


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (_SKYPILOT | {"SKYPILOT_NUM_NODES": "0"}, "SKYPILOT_NUM_NODES='0'"),
        (_SKYPILOT | {"SKYPILOT_NUM_NODES": "-2"}, "SKYPILOT_NUM_NODES='-2' is not a whole"),
        (_SKYPILOT | {"SKYPILOT_NUM_NODES": " 2"}, "SKYPILOT_NUM_NODES=' 2' is not a whole"),
        (_SKYPILOT | {"SKYPILOT_NUM_NODES": "0x2"}, "SKYPILOT_NUM_NODES='0x2' is not a whole"),
        (_SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK='2' is not below"),
        (_SKYPILOT | {"SKYPILOT_NODE_IPS": "a,b,c"}, "does not name SKYPILOT_NUM_NODES=2 hosts"),
        (_SKYPILOT | {"SKYPILOT_NODE_IPS": "a\na"}, "names a host twice: a"),
        (_SKYPILOT | {"SKYPILOT_NODE_IPS": "a,[fd00::"}, "is not a list of hosts"),
        (_SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, "is empty"),
        (_SKYPILOT | {"SKYPILOT_NODE_IPS": "a," * 600_000}, "has 1200000 characters"),
        (_SKYPILOT | {"WORLD_SIZE": "15"}, "WORLD_SIZE='15' is not a multiple of the 2 nodes"),
        (_SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "8x"}, "SKYPILOT_NUM_GPUS_PER_NODE='8x'"),
        ({"NODE_RANK": "1", "NUM_NODES": "2", "NNODES": "3"}, "NNODES='3' contradicts NUM_NODES="),
        ({"NODE_RANK": "1", "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "8"}, "not a multiple of LOCAL"),
        ({"NODE_RANK": "1"}, "NUM_NODES is missing"),
        (
            {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "\n"},
            "TPU_WORKER_HOSTNAMES='\\n' is empty",
        ),
        ({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a," * 600_000}, "has 1200000 characters"),
        (_SKYPILOT | {"SKYPILOT_NODE_IPS": "node,NODE"}, "names a host twice: NODE"),
        ({"CLUSTER_SPEC": "cluster"}, "CLUSTER_SPEC, 7 characters, is not a JSON object"),
        ({"CLUSTER_SPEC": "[" * 100_000}, "is not a JSON object"),
        ({"CLUSTER_SPEC": " " * 1_000_001}, "CLUSTER_SPEC, 1000001 characters, is too long"),
        ({"CLUSTER_SPEC": "{}"}, "has no 'cluster' and 'task' objects"),
        (_spec({"type": "workerpool3", "index": 0}), "which is not a node of the training job"),
        (_spec({"type": "workerpool0", "index": 0}, workerpool1=[None]), "has None for a host in"),
        (
            _spec({"type": "workerpool0", "index": 0}, workerpool1=["b c"]),
            "has 'b c' for a host in",
        ),
        (_spec({"type": "workerpool1", "index": 1}), "which is not in its pool"),
        (_spec({"type": "workerpool1", "index": True}), "which is not in its pool"),
        (_spec({"type": "workerpool1", "index": 0}, workerpool1=["a:2"]), "names a host twice"),
        ({"TPU_WORKER_ID": "1"}, "TPU_WORKER_HOSTNAMES is missing"),
        ({"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID='2' is not below"),
        ({"TPU_WORKER_ID": "x", "TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID='x'"),
        ({"JAX_NUM_PROCESSES": "3"}, "JAX_PROCESS_ID is missing"),
        ({"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "3"}, "JAX_PROCESS_ID='3' is not below"),
    ],
)
def test_malformed_numbers_of_nodes_are_named(environ: dict[str, str], problem: str) -> None:
    start = time.process_time()
    refusal = refused(environ)
    assert refusal.code == "broken-environment"
    assert problem in refusal.message
    assert len(refusal.message) < 2000
    assert time.process_time() - start < 2  # also for a value of 1 MB


_CUT = json.dumps({"cluster": {}, "job": {"args": ["--key=hunter2"]}})[:-1]


@pytest.mark.parametrize(
    "spec",
    [
        _CUT,
        _CUT + "}",
        '["--key=hunter2"]',
        json.dumps({"job": "hunter2", "cluster": {"workerpool0": ["a b"]}}),
        json.dumps({"job": "hunter2", "cluster": {"workerpool0": ["a"]}, "task": {}}),
        "hunter2" + " " * 1_000_000,
    ],
)
def test_arguments_in_cluster_spec_are_not_shown(spec: str) -> None:
    refusal = refused({"CLUSTER_SPEC": spec})
    assert refusal.message.startswith(f"launcher 'vertex': CLUSTER_SPEC, {len(spec)} characters, ")
    assert "hunter2" not in str(refusal)


@pytest.mark.parametrize("hosts", ["a,b", "a b", "a\nb", "a\nb\n", "a, b", "a:1,b:2"])
def test_list_of_hosts_in_any_spelling(hosts: str) -> None:
    assert detect(_SKYPILOT | {"SKYPILOT_NODE_IPS": hosts}).master_addr == "a"
    v6 = hosts.replace("a", "[fd00::4]").replace("b", "[fd00::5]")
    assert detect(_SKYPILOT | {"SKYPILOT_NODE_IPS": v6}).master_addr == "fd00::4"


def test_long_list_of_hosts_is_read_at_once() -> None:
    hosts = ",".join(f"host{number}" for number in range(50_000))
    start = time.monotonic()
    placement = detect({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": hosts})
    assert placement.num_nodes == 50_000
    assert time.monotonic() - start < 20  # with a time that grows with the square it was 50 s


def test_list_alone_counts_nodes() -> None:
    old = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "a\nb\nc"}
    placement = detect(old)
    assert (placement.rank, placement.num_nodes, placement.master_addr) == (1, 3, "a")


def test_platforms_that_disagree_are_both_named() -> None:
    assert detect(_SKYPILOT | _LWS).launcher == "skypilot"
    refusal = refused(_SKYPILOT | _LWS | {"LWS_GROUP_SIZE": "3"})
    assert refusal.code == "conflicting-launchers"
    assert "skypilot has rank 1 of 2 (SKYPILOT_NODE_RANK), but lws has rank 1 of 3" in str(refusal)
    assert detect(_SKYPILOT | {"RANK": "9", "WORLD_SIZE": "16"}).rank == 9
    refusal = refused(_SKYPILOT | {"RANK": "0", "WORLD_SIZE": "1"})
    assert "torch has rank 0 of 1 (RANK), but skypilot has rank 1 of 2" in refusal.message
    fewer = {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2", "TPU_WORKER_ID": "1"}
    fewer["TPU_WORKER_HOSTNAMES"] = "a,b,c"
    assert "jax has rank 0 of 2" in refused(fewer).message


def test_inner_launcher_wins_over_a_platform() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    placement = detect(_SKYPILOT | mpi)
    assert (placement.launcher, placement.rank) == ("openmpi", 3)
    assert any("skypilot is further out" in note for note in placement.notes)


def test_jaxjob_needs_all_four_names() -> None:
    (record,) = (one for one in DOCUMENTED if one["name"] == "jaxjob")
    environ = record["environ"]
    placement = detect(environ)
    assert (placement.rank, placement.world_size) == (1, 3)
    assert (placement.master_addr, placement.master_port) == ("jaxjob-worker-0", 6666)
    for name in ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "PROCESS_ID"):
        rest = {one: value for one, value in environ.items() if one != name}
        assert refused(rest).code == "not-alone", name


def test_tpu_slices_are_numbered_as_jax_does() -> None:
    slices = {
        "TPU_WORKER_HOSTNAMES": "js-1-0,js-1-1",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_COORDINATOR_ADDRESS": "js-0-0:8080",
    }
    found = [
        detect({**slices, "TPU_WORKER_ID": worker, "MEGASCALE_SLICE_ID": own})
        for own in ("0", "1")
        for worker in ("0", "1")
    ]
    assert [placement.rank for placement in found] == [0, 1, 2, 3]
    assert {(one.world_size, one.master_addr, one.node_level) for one in found} == {
        (4, "js-0-0", None)
    }


_TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "lws-0.lws.default,lws-0-1.lws.default"}


@pytest.mark.parametrize("launcher", [None, "lws"])
def test_tpu_pod_of_a_leaderworkerset_is_a_rank(launcher: str | None) -> None:
    placement = detect(_LWS | _TPU, launcher=launcher)
    assert (placement.launcher, placement.rank, placement.world_size) == ("lws", 1, 2)
    assert (placement.local_rank, placement.local_world_size) == (0, 1)
    assert (placement.master_addr, placement.node_level) == ("lws-0.lws.default", None)


@pytest.mark.parametrize(
    ("tpu", "code"),
    [
        ({}, "node-level-launch"),
        ({"TPU_WORKER_ID": "", "TPU_WORKER_HOSTNAMES": ""}, "node-level-launch"),
        # The leader has no chips.
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "lws-0-1.lws"}, "node-level-launch"),
        (_TPU | {"TPU_WORKER_ID": "0"}, "conflicting-launchers"),
        (_TPU | {"TPU_WORKER_HOSTNAMES": "a,b,c"}, "conflicting-launchers"),
        # Of another platform the number of GPUs counts.
        (_TPU | _SKYPILOT, "node-level-launch"),
    ],
)
def test_tpu_with_other_numbers_makes_no_rank(tpu: dict[str, str], code: str) -> None:
    with pytest.raises(DistbootError) as caught:
        refuse_unless_rank(detect(_LWS | tpu))
    assert caught.value.code == code


# -- the wrapper

# Platforms whose two nodes can be two processes of this host: only what differs from the sample.
_HERE = {
    "skypilot": {"SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_NODE_IPS": "127.0.0.1,127.0.0.1"},
    "dstack": {
        "DSTACK_GPUS_PER_NODE": "2",
        "DSTACK_MASTER_NODE_IP": "127.0.0.1",
        "DSTACK_NODES_IPS": "127.0.0.1\n127.0.0.1",
    },
    "lepton": {"LEPTON_RESOURCE_ACCELERATOR_NUM": "2", "MASTER_ADDR": "127.0.0.1"},
    "metaflow": {"MF_PARALLEL_MAIN_IP": "127.0.0.1"},
    "lws": {"LWS_LEADER_ADDRESS": "127.0.0.1"},
    "volcengine": {
        "MLP_WORKER_GPU": "2",
        "MLP_WORKER_0_HOST": "127.0.0.1",
        "MLP_WORKER_ALL_HOSTS": "127.0.0.1,127.0.0.1",
    },
    "baseten": {"BT_NUM_GPUS": "2", "BT_LEADER_ADDR": "127.0.0.1"},
    "ngc": {"NGC_GPUS_PER_NODE": "2", "NGC_MASTER_ADDR": "127.0.0.1"},
    "nsml": {"NSML_HOST_RANK0": "127.0.0.1"},
    "beaker": {"BEAKER_ASSIGNED_GPU_COUNT": "2", "BEAKER_LEADER_REPLICA_HOSTNAME": "127.0.0.1"},
    "htcondor": {"MASTER_ADDR": "127.0.0.1"},
    "modelarts": {"MA_NUM_GPUS": "2", "VC_WORKER_HOSTS": "127.0.0.1,127.0.0.1"},
    "pods": {"NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"},
    "kubeflow": {"PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1"},
    "volcano": {"MASTER_ADDR": "127.0.0.1"},
    "nodes": {
        "NUM_TRAINERS": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "PRIMARY_ADDR": "127.0.0.1",
    },
}
_WHO = "echo $RANK $WORLD_SIZE $LOCAL_RANK $NODE_RANK"


@pytest.mark.parametrize("each", [2, pytest.param(1, marks=pytest.mark.all)])
@pytest.mark.parametrize("name", _HERE)
def test_two_nodes_start_their_ranks(distboot: Run, port: int, name: str, each: int) -> None:
    row = ROWS[name]
    environ = sample(row) | _HERE[name] | {"MASTER_PORT": str(port)}
    says_how_many = SAMPLES[name][0] is not None
    if each == 1 and says_how_many:
        environ |= {one: "1" for one in row.per_node if one in environ}
        if name == "nodes":
            environ["WORLD_SIZE"] = "2"
    wanted = "auto" if says_how_many else str(each)
    if name == "pods" and each == 1:
        return  # plain RANK and WORLD_SIZE

    def node(index: int) -> str:
        own = {"DISTBOOT_HOST": f"node-{index}", row.index_variable: str(index)}
        words = ["run", "--framework", "none", "--nproc-per-node", wanted, "--", "sh", "-c", _WHO]
        done = distboot(*words, env=environ | own)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        lines = sorted("".join(pool.map(node, range(2))).splitlines())
    size = 2 * each
    assert lines == [f"{rank} {size} {rank % each} {rank // each}" for rank in range(size)]


def test_size_taken_for_nodes_is_reported_with_missing(distboot: Run, port: int) -> None:
    environ = {"NODE_RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1"}
    words = ["run", "--nproc-per-node", "2", "--join-timeout", "1", "--", "true"]
    result = distboot(*words, env=environ | {"MASTER_PORT": str(port)})
    assert result.returncode == 75
    assert "1 of 16 nodes joined" in result.stderr
    assert "WORLD_SIZE=16 was taken for the number of nodes" in result.stderr
    assert "set NUM_NODES to the number of nodes" in result.stderr
