"""TensorFlow's cluster, before TensorFlow itself is asked: which rank is what, at which address, with which GPU."""

import json
import socket
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from inside import replace
from tensorflows import tasks

from distboot import DistbootError
from distboot.agent.session import Session
from distboot.detection.placement import Placement
from distboot.frameworks import Options, _tf_cluster
from distboot.frameworks._tf_cluster import Cluster
from distboot.frameworks._tf_options import refuse_job, refuse_options
from distboot.frameworks.tensorflow import own_gpus
from distboot.rendezvous.membership import Membership

PROXY = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}


def _meeting(rank: int, world_size: int, *nodes: Sequence[int]) -> Session:
    placement = Placement(
        "torch", None, rank, world_size, None, None, None, None, "127.0.0.1", 29500, None
    )
    job = Session(placement, 10.0)
    nodes = nodes or (range(world_size),)
    membership = Membership(
        tuple(f"node{index}" for index, _ in enumerate(nodes)), tuple(map(tuple, nodes))
    )
    job.result = replace(job.result, membership=membership)
    return job


def _cluster(
    rank: int,
    world_size: int,
    offers: Mapping[int, str] = {},
    environ: Mapping[str, str] = {},
) -> Cluster:
    job = _meeting(rank, world_size)
    job.offers = dict(offers)
    return Cluster(job, environ)


def test_cluster_is_made_of_workers_by_rank() -> None:
    cluster = _cluster(2, 3, {0: "a:1", 1: "a:2", 2: "a:3"}).completed()
    assert cluster.kinds == ["worker"] * 3
    assert cluster.addresses == {"worker": ["a:1", "a:2", "a:3"]}
    assert json.loads(cluster.exports({})["TF_CONFIG"])["task"] == {"type": "worker", "index": 2}


def test_given_cluster_has_its_tasks_by_rank() -> None:
    cluster = _cluster(3, 4, environ=tasks(chief=1, worker=2, ps=1)[3])
    assert cluster.kinds == ["chief", "worker", "worker", "ps"]
    assert (cluster.kind, cluster.index, cluster.has_servers) == ("ps", 0, True)


def test_rank_of_tf_config_must_match_the_launcher() -> None:
    with pytest.raises(
        DistbootError, match="torch says rank 0 of 2, but TF_CONFIG says rank 1 of 2: task worker 1"
    ):
        _cluster(0, 2, environ=tasks(worker=2)[1])


@pytest.mark.parametrize(
    ("environ", "offers", "said"),
    [
        (
            tasks(worker=3)[0],
            {1: "127.0.0.1:5", 2: "given 5c2f10aa"},
            "ranks 0, 2 have a TF_CONFIG, but rank 1 has",
        ),
        (
            {},
            {0: "127.0.0.1:4", 1: "127.0.0.1:5", 2: "given 5c2f10aa"},
            "rank 2 has a TF_CONFIG, but ranks 0-1 have",
        ),
        (
            tasks(worker=3)[0],
            {1: "given 5c2f10aa", 2: "given 5c2f10aa"},
            "TF_CONFIG of ranks 1-2 is different from that of rank 0",
        ),
    ],
)
def test_ranks_with_different_clusters(
    environ: dict[str, str], offers: dict[int, str], said: str
) -> None:
    cluster = _cluster(0, 3, offers, environ=environ)
    if cluster.offer is not None:
        cluster = _cluster(0, 3, {0: cluster.offer, **offers}, environ=environ)
    with pytest.raises(DistbootError, match=said) as refusal:
        cluster.completed()
    assert refusal.value.code == "membership-mismatch"


def test_address_of_a_task_on_ipv6() -> None:
    cluster = _cluster(0, 2)
    session = cluster._session
    session.result = replace(session.result, own_address="fd00::1")
    port = cluster.hold_port()
    assert port is not None
    with port:
        assert cluster.offer == f"[fd00::1]:{port.getsockname()[1]}"


def test_port_of_tf_config_that_is_taken() -> None:
    environ = tasks(worker=2)[1]
    address = json.loads(environ["TF_CONFIG"])["cluster"]["worker"][1]
    said = f"TF_CONFIG has {address} for worker 1, but this process cannot listen"
    with (
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
        pytest.raises(DistbootError, match=said),
    ):
        _cluster(1, 2, environ=environ).hold_port()


def test_port_is_held_for_the_tensorflow_server() -> None:
    with _tf_cluster._held(0) as held:
        address = ("127.0.0.1", held.getsockname()[1])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            server.bind(address)
            server.listen()
            socket.create_connection(address, timeout=10).close()


@pytest.mark.parametrize(
    ("environ", "exported"),
    [
        ({"no_proxy": "example.org"}, {}),
        ({"https_proxy": "http://p:1"}, {"no_grpc_proxy": "a,b"}),
        ({"grpc_proxy": "http://p:1", "no_proxy": "c,a"}, {"no_grpc_proxy": "c,a,b"}),
        (
            {"http_proxy": "http://p:1", "no_proxy": "c", "no_grpc_proxy": "b,d"},
            {"no_grpc_proxy": "b,d,a"},
        ),
        ({"http_proxy": "http://p:1", "no_proxy": "b,a"}, {}),
        ({"http_proxy": ""}, {}),
    ],
)
def test_proxies(environ: dict[str, str], exported: dict[str, str]) -> None:
    config = json.dumps(
        {"cluster": {"worker": ["a:1", "b:2", "a:3"]}, "task": {"type": "worker", "index": 0}}
    )
    assert _cluster(0, 3, environ={"TF_CONFIG": config}).exports(environ) == exported


_SERVERS = tasks(chief=1, worker=2, ps=1)


@pytest.mark.parametrize(
    ("rank", "environs", "own"),
    [
        (0, [{}] * 3, [0]),
        (2, [{}] * 3, [1]),
        (1, [{}] * 3, [0, 1]),  # alone on its node
        (0, _SERVERS, []),  # chief
        (1, _SERVERS, [0, 1]),  # a worker, alone on its node
        (2, _SERVERS, [0, 1]),  # a worker beside the chief and the ps, which use none
        (3, _SERVERS, []),  # ps
    ],
)
def test_gpus_of_a_rank(rank: int, environs: list[dict[str, str]], own: list[int]) -> None:
    world_size = len(environs)
    others = [each for each in range(world_size) if each != 1]
    shown: list[object] = []
    config = SimpleNamespace(list_physical_devices=lambda _: ["gpu0", "gpu1"])
    config.set_visible_devices = lambda gpus, _: shown.append(gpus)
    job = _meeting(rank, world_size, others, [1])
    cluster = Cluster(job, environs[rank])
    assert own_gpus(SimpleNamespace(config=config), job, cluster, {}) == own
    assert shown == ([] if len(own) == 2 else [[f"gpu{index}" for index in own]])


@pytest.mark.parametrize(
    ("environ", "enough"), [({}, False), ({"CUDA_VISIBLE_DEVICES": "1"}, True)]
)
def test_too_few_gpus(environ: dict[str, str], enough: bool) -> None:
    tf = SimpleNamespace(config=SimpleNamespace(list_physical_devices=lambda _: ["gpu0"]))
    job = _meeting(1, 2)
    cluster = Cluster(job, environ)
    if enough:  # each process sees only its own, as number 0
        assert own_gpus(tf, job, cluster, environ) == [0]
        return
    with pytest.raises(DistbootError, match="2 ranks of this node use GPUs, and this one sees 1"):
        own_gpus(tf, job, cluster, environ)


@pytest.mark.parametrize("options", [{}, {"strategy": "parameter_server"}])
def test_parameter_servers_of_tf_config_are_the_default(options: dict[str, Any]) -> None:
    _refuse(options, _SERVERS[0])


@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        ({"strategy": "mirrored"}, _SERVERS[0], "is for one process, and the job has 4"),
        ({"strategy": "multi_worker_mirrored"}, _SERVERS[0], "has parameter servers, and strategy"),
        ({"timeout": 5.0}, _SERVERS[0], "backend= and timeout= are for strategy"),
        ({"strategy": "parameter_server"}, {}, "needs a TF_CONFIG with the tasks chief, worker"),
    ],
)
def test_strategies_that_a_job_cannot_have(
    options: dict[str, Any], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(DistbootError, match=said) as refusal:
        _refuse(options, environ)
    assert refusal.value.code == "usage"


def _refuse(options: dict[str, Any], environ: Mapping[str, str]) -> None:
    chosen = Options("tensorflow", **options)
    job = _meeting(0, 4)
    refuse_options(chosen, environ)
    refuse_job(Cluster(job, environ), job, chosen)
