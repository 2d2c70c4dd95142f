"""TensorFlow's cluster, before TensorFlow itself is asked: which rank is what, at which address, with which GPU."""

import json
import socket
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tensorflows import tasks

from distboot import DistbootError
from distboot.agent.session import Session
from distboot.detection.placement import Placement
from distboot.frameworks import Options, _tf_cluster
from distboot.frameworks._tf_cluster import Cluster
from distboot.frameworks.tensorflow import own_gpus
from distboot.rendezvous.membership import Membership

PROXY = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}


def _meeting(rank: int, world_size: int, *nodes: Sequence[int]) -> Session:
    placement = Placement(
        "torch", None, rank, world_size, None, None, None, None, "127.0.0.1", 29500, None
    )
    job = Session(placement, 10.0)
    nodes = nodes or (range(world_size),)
    job.membership = Membership(
        tuple(f"node{index}" for index, _ in enumerate(nodes)), tuple(map(tuple, nodes))
    )
    return job


def _cluster(rank: int, world_size: int, offers: Mapping[int, str] = {}, **more: Any) -> Cluster:
    job = _meeting(rank, world_size)
    job.offers = dict(offers)
    return Cluster(job, more.pop("environ", {}), Options("tensorflow", **more))


def test_roles_follow_the_ranks() -> None:
    offers, chosen = (
        {rank: f"a:{rank + 1}" for rank in range(5)},
        {"strategy": "parameter_server", "ps": 2},
    )
    cluster = _cluster(3, 6, offers, **chosen, evaluator=True).completed()
    assert cluster.kinds == ["chief", "worker", "worker", "ps", "ps", "evaluator"]
    assert cluster.addresses == {"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4", "a:5"]}
    assert json.loads(cluster.exports({})["TF_CONFIG"])["task"] == {"type": "ps", "index": 0}


def test_rank_of_tf_config_must_be_that_of_the_launcher() -> None:
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
            "ranks 0, 2 have a TF_CONFIG, and rank 1 has",
        ),
        (
            {},
            {0: "127.0.0.1:4", 1: "127.0.0.1:5", 2: "given 5c2f10aa"},
            "rank 2 has a TF_CONFIG, and ranks 0-1 have",
        ),
        (
            tasks(worker=3)[0],
            {1: "given 5c2f10aa", 2: "given 5c2f10aa"},
            "TF_CONFIG of ranks 1-2 is another one",
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
    cluster._job_info.own_address = "fd00::1"
    port = cluster.hold_port()
    assert port is not None
    with port:
        assert cluster.offer == f"[fd00::1]:{port.getsockname()[1]}"


def test_port_of_tf_config_that_is_taken() -> None:
    environ = tasks(worker=2)[1]
    address = json.loads(environ["TF_CONFIG"])["cluster"]["worker"][1]
    said = f"TF_CONFIG has {address} for worker 1, and this process cannot listen"
    with (
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
        pytest.raises(DistbootError, match=said),
    ):
        _cluster(1, 2, environ=environ).hold_port()


def test_port_is_held_for_the_server_of_tensorflow_alone() -> None:
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


@pytest.mark.parametrize(
    ("rank", "options", "own"),
    [
        (0, {}, [0]),
        (2, {}, [1]),
        (1, {}, [0, 1]),  # alone on its node
        (0, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, []),  # chief
        # Worker, alone on its node
        (1, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, [0, 1]),
        (2, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, [0]),  # worker
        (3, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, []),  # ps
        (4, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, [1]),  # evaluator
    ],
)
def test_gpus_of_a_rank(rank: int, options: dict[str, Any], own: list[int]) -> None:
    world_size, nodes = (5, ([0, 2, 3, 4], [1])) if options.get("evaluator") else (3, ([0, 2], [1]))
    shown: list[object] = []
    config = SimpleNamespace(list_physical_devices=lambda _: ["gpu0", "gpu1"])
    config.set_visible_devices = lambda gpus, _: shown.append(gpus)
    job, chosen = _meeting(rank, world_size, *nodes), Options("tensorflow", **options)
    assert (
        own_gpus(SimpleNamespace(config=config), job, Cluster(job, {}, chosen), chosen, {}) == own
    )
    assert shown == ([] if len(own) == 2 else [[f"gpu{index}" for index in own]])


@pytest.mark.parametrize(
    ("environ", "enough"), [({}, False), ({"CUDA_VISIBLE_DEVICES": "1"}, True)]
)
def test_too_few_gpus(environ: dict[str, str], enough: bool) -> None:
    tf = SimpleNamespace(config=SimpleNamespace(list_physical_devices=lambda _: ["gpu0"]))
    job, options = _meeting(1, 2), Options("tensorflow")
    cluster = Cluster(job, environ, options)
    if enough:  # each process sees only its own, as number 0
        assert own_gpus(tf, job, cluster, options, environ) == [0]
        return
    with pytest.raises(DistbootError, match="2 ranks of this node use GPUs, and this one sees 1"):
        own_gpus(tf, job, cluster, options, environ)
