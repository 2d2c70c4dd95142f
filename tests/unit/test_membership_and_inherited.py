"""The membership that all ranks together yield, and what an outer distboot hands to an inner one."""

import itertools
import json
import socket
import sys
import time
from collections.abc import Sequence

import pytest
from captured import ALL, Capture, one, refused
from conftest import Run
from rendezvous_peers import record

from distboot import DistbootError, detect
from distboot.base.text import with_nodes
from distboot.detection.export import for_launcher, variables
from distboot.detection.inherited import VARIABLE, merged, restored
from distboot.rendezvous.earlier import describe_earlier
from distboot.rendezvous.membership import EarlierAgent, build_membership
from distboot.rendezvous.messages import WorkerInfo
from distboot.rendezvous.plan import plan_of


def _placed(records: Sequence[WorkerInfo]) -> dict[str, list[int]]:
    """The numbers of all ranks, by field."""
    membership = build_membership(records)
    places = [membership.place(rank) for rank in range(len(records))]
    return {field: [place[field] for place in places] for field in places[0]}


def _records(nodes: str, **known: Sequence[int | None]) -> list[WorkerInfo]:
    """One record a rank; `nodes` has the node of each rank as a letter."""
    return [
        record(rank, len(nodes), node, **{field: numbers[rank] for field, numbers in known.items()})
        for rank, node in enumerate(nodes)
    ]


def test_local_ranks_that_are_known_stay() -> None:
    whole = _placed(_records("aabb", local_rank=[1, 0, 0, 1], local_world_size=[2, 2, 2, 2]))
    some = _placed(_records("aaab", local_rank=[None, 2, 0, None]))
    assert (whole["local_rank"], some["local_rank"]) == ([1, 0, 0, 1], [1, 2, 0, 0])


def test_two_agents_on_a_host_may_be_nodes() -> None:
    placed = _placed(_records("aaaa", local_rank=[0, 1, 0, 1], node_rank=[0, 0, 1, 1]))
    assert (placed["node_rank"], placed["local_world_size"], placed["num_nodes"]) == (
        [0, 0, 1, 1],
        [2] * 4,
        [2] * 4,
    )


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (_records("aab", local_rank=[0, 0, 0]), "local ranks 0, 0"),
        (_records("aab", local_world_size=[3, 3, 1]), "told of 3 processes on its node"),
        (_records("aab", num_nodes=[3, 3, 3]), "told of 3 nodes"),
        (_records("ab", node_rank=[0, 0]), "2 nodes have the node ranks 0, 0"),
        (_records("aa", node_rank=[0, 2]), "2 nodes have the node ranks 0, 2"),
        (
            _records(
                "aa", local_rank=[0, 0], local_world_size=[2, 2], node_rank=[0, 0], num_nodes=[1, 1]
            ),
            "ranks 0, 0",
        ),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(
    records: list[WorkerInfo], problem: str
) -> None:
    with pytest.raises(DistbootError) as refusal:
        build_membership(records)
    assert refusal.value.code == "membership-mismatch"
    assert problem in refusal.value.message


def _exported(environ: dict[str, str]) -> dict[str, str]:
    return merged(variables(detect(environ), environ), environ)


def test_port_that_the_wrapper_found_reaches_the_child() -> None:
    environ = {**_exported({}), "MASTER_PORT": "61234"}
    found = environ[VARIABLE].replace("master_addr=", "master_port=61234,master_addr=")
    environ[VARIABLE] = found.replace("exported=", "exported=MASTER_PORT+")
    placement = detect(environ)
    assert (placement.launcher, placement.master_port, placement.sources["master_port"]) == (
        "single",
        61234,
        VARIABLE,
    )


def test_stale_variables_do_not_reach_the_child() -> None:
    environ = {
        **one("openmpi-5.0.11/2nodes_x_master", 3),
        "NODE_RANK": "7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    child = _exported(environ)
    assert "NODE_RANK" not in child, "not known: no number is better than somebody else's"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in child
    assert (child["RANK"], child["WORLD_SIZE"], child["LOCAL_RANK"]) == ("3", "4", "1")


_STALE = {
    "NO_PROXY": "10.0.0.0/8, größer",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_inner_distboot_detects_in_same_environment(capture: Capture) -> None:
    if capture.launcher == "distboot":
        pytest.skip("an outer distboot has exported its placement already")
    for process in capture.processes:
        outer = {**_STALE, **process.environ}
        if capture.launcher != "single":  # which it would contradict
            outer.setdefault("NODE_RANK", "7")
        placement = detect(outer)
        exports = variables(placement, outer, others={"NO_PROXY": "nodea", "JAX_PROCESS_ID": "0"})
        child = merged(exports, outer)
        assert child["NO_PROXY"] == "nodea"
        before, _ = restored(child)
        hidden = outer.keys() - before.keys()
        assert hidden <= {"LOCAL_SIZE", "TORCHELASTIC_RESTART_COUNT"}, "marks of other launchers"
        same = {name: before.get(name) for name in outer.keys() - hidden - {"TF_CONFIG"}}
        assert same.items() <= outer.items()
        assert before.keys() <= outer.keys()
        assert detect(child)[:6] == placement[:6]


def test_port_changed_by_outer_distboot_reaches_the_child() -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nodea", "MASTER_PORT": "29500"}
    free = detect(outer).with_fields("agreed on", {"master_port": 29511})
    child = merged(variables(free, outer), outer)
    assert detect(child).master_port == 29511
    assert detect({**child, "MASTER_PORT": "29500"}).master_port == 29500, "set since"


def test_launcher_below_gets_previous_value() -> None:
    outer = {"NO_PROXY": "corp"}
    child = merged(variables(detect(outer), outer, others={"NO_PROXY": "corp,nodea"}), outer)
    assert for_launcher(detect(child), child, together=False)["NO_PROXY"] == "corp"


def test_value_that_distboot_0_1_exported_is_known() -> None:
    fields = "launcher=openmpi,rank=2,world_size=4,local_rank=2,local_world_size=4,node_rank=0"
    mpi = one("openmpi-5.0.11/1node_4procs", 2)
    exports = {"RANK": "2", "WORLD_SIZE": "4", "HOROVOD_RANK": "2"}
    digest = variables(detect({}), {}, others={"HOROVOD_RANK": "2"})[VARIABLE]
    assert digest is not None
    of_horovod = digest.rpartition("HOROVOD_RANK")[2]
    text = f"{fields},exported=RANK+WORLD_SIZE+HOROVOD_RANK{of_horovod.partition('+')[0]}"
    assert restored({**mpi, **exports, VARIABLE: text})[0] == mpi


_HANDED = "launcher=single,rank=0,world_size=1"


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "launcher=single", "launcher=single,rank=a,world_size=1,exported=", "9" * 1000),
        *(f"{_HANDED},exported=TF_CONFIG:12", f"{_HANDED},exported=PATH"),
        *(f"{_HANDED},seen=openmpi:12,exported=", f"{_HANDED},launches=yes,exported="),
    ],
)
def test_handoff_that_distboot_did_not_write_is_refused(text: str) -> None:
    refusal = refused({VARIABLE: text})
    assert refusal.code == "broken-environment"


OTHERS = {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "TF_CONFIG": '{"cluster": {}}'}


@pytest.mark.parametrize("name", ["openmpi-5.0.11/1node_4procs", "torchrun-2.13.0/1node_4procs"])
def test_one_frameworks_variables_are_no_launcher(name: str) -> None:
    outer = one(name, 2)
    child = merged(variables(detect(outer), outer, others=OTHERS), outer)
    assert OTHERS.items() <= child.items()
    assert {**detect(child).as_dict(), "sources": {}} == {**detect(outer).as_dict(), "sources": {}}


def test_earlier_mark_of_an_inner_launcher_is_ignored() -> None:
    # DeepSpeed's runners for an MPI set LOCAL_SIZE, and with --framework deepspeed the wrapper the rest.
    outer = one("deepspeed-0.19.8/impi_2nodes_2procs", 1)
    assert outer["LOCAL_SIZE"]
    placement = detect(outer)
    child = merged(
        variables(placement, outer, others={"CROSS_RANK": "0", "CROSS_SIZE": "2"}), outer
    )
    assert detect(child)[:8] == placement[:8]


def test_handoff_needs_no_quoting() -> None:
    safe = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789=,+._:-")
    names = (
        "openmpi-5.0.11/2nodes_x_master",
        "slurm-srun-22.05.8/2nodes_2procs",
        "torchrun-2.13.0/2nodes_2procs_c10d",
    )
    for name, rank in itertools.product(names, range(4)):
        assert set(_exported(one(name, rank))[VARIABLE]) <= safe


def test_inner_job_of_same_shape_is_different() -> None:
    outer = _exported(one("openmpi-5.0.11/2nodes_1proc", 1))
    inner = one("openmpi-5.0.11/alloc3_used1", 1)  # also rank 1 of 2, both on one node
    placement = detect({**outer, **inner})
    assert (
        placement.rank,
        placement.local_rank,
        placement.local_world_size,
        placement.num_nodes,
    ) == (1, 1, 2, 1)
    assert placement.master_port == detect(inner).master_port


def test_torchrun_that_numbers_like_its_wrapper() -> None:
    outer = merged(variables(detect({}).with_fields("found free", {"master_port": 61234}), {}), {})
    worker = one("torchrun-2.13.0/1node_4procs", 0)
    worker |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    worker |= {"MASTER_ADDR": outer["MASTER_ADDR"], "MASTER_PORT": outer["MASTER_PORT"]}
    placement = detect({**outer, **worker})
    assert (placement.launcher, placement.rank, placement.world_size) == ("torchrun", 0, 1)


def test_what_is_set_after_the_wrapper_counts() -> None:
    mpi = one("openmpi-5.0.11/1node_4procs", 2)
    for outer in (_exported({}), _exported(mpi)):
        placement = detect({**outer, **mpi, "MASTER_PORT": "29999"})
        assert (placement.launcher, placement.rank, placement.master_port) == ("openmpi", 2, 29999)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_a_wrapped_script_numbers_itself(rank: int) -> None:
    placement = detect({**_exported({}), "RANK": str(rank), "WORLD_SIZE": "2"})
    assert (placement.launcher, placement.rank, placement.world_size) == ("torch", rank, 2)
    assert (placement.local_rank, placement.node_rank) == (None, None), (
        "what was exported is not about them"
    )
    assert placement.master_addr == "127.0.0.1", "they find each other where the wrapper said"


def test_renumbered_processes_are_not_the_outer_one() -> None:
    outer = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "nodea",
    }
    inner = detect(
        {**_exported({**outer, "MASTER_PORT": "29500"}), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    )
    assert (inner.rank, inner.local_rank, inner.local_world_size) == (1, 0, 1)


def test_rank_set_below_a_rank_is_refused() -> None:
    # A shell below a rank starts two processes of its own, in a world that has as many
    mpi = one("openmpi-5.0.11/1node_4procs", 2)
    with pytest.raises(DistbootError) as refusal:
        detect({**_exported(mpi), "RANK": "0"})
    assert refusal.value.code == "conflicting-launchers"
    said = "below rank 2 of 4, and RANK and WORLD_SIZE were set below that to rank 0 of 4"
    assert said in refusal.value.message
    assert "remove what starts more of them in the script, such as mp.spawn" in refusal.value.hint


def test_exports_count_where_launcher_variables_are_missing() -> None:
    exported = merged(variables(detect(one("openmpi-5.0.11/1node_4procs", 1)), {}), {})
    placement = detect(exported)
    assert (placement.launcher, placement.rank, placement.world_size, placement.local_rank) == (
        "torch",
        1,
        4,
        2,
    )
    with pytest.raises(DistbootError) as refusal:
        detect({VARIABLE: exported[VARIABLE]})
    assert "rank 1 of 4, but RANK and WORLD_SIZE are missing" in refusal.value.message


def test_launcher_named_to_wrapper_holds_for_script(distboot: Run) -> None:
    command = (
        "run",
        "--launcher",
        "single",
        "--",
        sys.executable,
        "-m",
        "distboot",
        "show",
        "--json",
    )
    shown = json.loads(distboot(*command, env=one("openmpi-5.0.11/1node_4procs", 2)).stdout)
    assert (shown["launcher"], shown["rank"], shown["world_size"]) == ("single", 0, 1)


def test_containers_of_one_host_are_separate_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = set()
    for name in ("pod-0", "pod-1"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        plan, _ = plan_of(detect({"RANK": "0", "WORLD_SIZE": "2"}), {}, 10.0)
        nodes.add(plan.own.node)
    assert len(nodes) == 2


def test_consecutive_missing_nodes_are_grouped() -> None:
    node_of = {rank: rank // 8 for rank in range(100_000)}
    assert with_nodes([3, *range(9, 100_000)], node_of) == "3 (node 0), 9-99999 (nodes 1-12499)"
    assert with_nodes([8, 10, 16, 32], node_of) == "8, 10 (node 1), 16 (node 2), 32 (node 4)"


def test_agents_of_the_last_round_show_hosts() -> None:
    agents = [EarlierAgent(2, "b", 1.0), EarlierAgent(3, "b", 2.0), EarlierAgent(5, "c\n")]
    when = time.strftime("%H:%M:%S", time.localtime(2.0))
    assert describe_earlier(agents, "rank") == (
        f"; ranks 2-3 on b were lost at {when} and have not come back"
        "; rank 5 on c\\n was there in the round before"
    )
    many = [EarlierAgent(number, str(number)) for number in range(10)]
    assert describe_earlier(many, "node").endswith("; and those of 2 other hosts")
