"""The checks of `doctor`: RDMA, NCCL's settings, names, proxies and ports."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from recorded import READY, Get, bad, one_of

from distboot.cli.doctor import text
from distboot.doctor import examine

PORT_1 = "sys/class/infiniband/mlx5_ib1/ports/1/state"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"dev/infiniband/uverbs{0-7}": None, "dev/infiniband/uverbs{0-5}": ""}, {"rdma-devices": "problem"}),
        ({"etc/ld.so.cache": None}, {"rdma-libraries": "problem"}),
        ({"etc/libibverbs.d/mlx5.driver": None}, {"rdma-libraries": "problem"}),
        ({PORT_1: "1: DOWN\n"}, {"rdma-ports": "warning"}),
        ({PORT_1.replace("ib1", "ib{0-7}"): "2: INIT\n"}, {"rdma-ports": "problem"}),
        ({"etc/nccl.conf": "NCCL_IB_DISABLE=1\n"}, {"nccl-rdma": "problem", "nccl-settings": "warning"}),
        ({"etc/nccl.conf": "# nothing\n"}, {"nccl-settings": "warning"}),  # no topology file
    ],
)
def test_infiniband(get: Get, files: Mapping[str, str | None], expected: Mapping[str, str]) -> None:
    assert bad(get("azure-nd-h100", files={**READY, **files})) == expected


def test_infiniband_without_a_driver_on_the_host(get: Get) -> None:
    card = "sys/bus/pci/devices/0101:00:00.0/class"
    elsewhere = one_of(get(files={card: "0x020700\n"}), "rdma-devices")
    assert (elsewhere.status, "modprobe mlx5_ib" in elsewhere.remedy) == ("problem", True)
    azure = one_of(get(files={"sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n"}), "rdma-devices")
    assert "InfiniBandDriverLinux" in azure.remedy


MLX = "sys/class/infiniband/mlx5_0"
ROCE = {
    f"{MLX}/device/vendor": "0x15b3\n",
    f"{MLX}/device/uevent": "DRIVER=mlx5_core\n",
    f"{MLX}/ports/1/link_layer": "Ethernet\n",
    f"{MLX}/ports/1/state": "4: ACTIVE\n",
    f"{MLX}/ports/1/gids/0": "fe80:0000:0000:0000:0e42:a1ff:fe5b:0c2e\n",
    f"{MLX}/ports/1/gid_attrs/types/0": "IB/RoCE v1\n",
    f"{MLX}/ports/1/gids/1": "fe80:0000:0000:0000:0e42:a1ff:fe5b:0c2e\n",
    f"{MLX}/ports/1/gid_attrs/types/1": "RoCE v2\n",
    f"{MLX}/ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0004\n",
    f"{MLX}/ports/1/gid_attrs/types/3": "RoCE v2\n",
    "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n",
    "dev/infiniband/uverbs0": "",
    "etc/ld.so.cache": "libibverbs.so.1\0/lib64/libibverbs.so.1\0",
    "etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
    "proc/self/limits": "Max open files  4096  4096  files\nMax locked memory  unlimited  unlimited  bytes\n",
}
SEVERAL_NODES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, {}, {}),
        ({}, {"dev/infiniband/uverbs0": None}, {"rdma-devices": "warning"}),
        ({}, {f"{MLX}/ports/1/gids/3": None}, {"rdma-gids": "warning"}),
        ({"NCCL_IB_GID_INDEX": "3"}, {}, {}),
        ({"NCCL_IB_GID_INDEX": "0"}, {}, {"rdma-gids": "problem"}),
        ({"NCCL_IB_GID_INDEX": "1"}, {}, {"rdma-gids": "problem"}),
        ({"NCCL_IB_HCA": "mlx5"}, {}, {}),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, {}, {}),
        ({"NCCL_IB_HCA": "mlx5_1"}, {}, {"nccl-rdma": "problem"}),
        ({"NCCL_IB_HCA": "=mlx5"}, {}, {"nccl-rdma": "problem"}),
        ({"NCCL_IB_DISABLE": "1"}, {}, {"nccl-rdma": "warning"}),
        ({"NCCL_NET": "Socket"}, {}, {"nccl-rdma": "warning"}),
        ({"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"}, {}, {"nccl-rdma": "problem"}),
    ],
)
def test_roce(
    get: Get, environ: Mapping[str, str], files: Mapping[str, str | None], expected: Mapping[str, str]
) -> None:
    one = get(environ={**SEVERAL_NODES, **environ}, files={**ROCE, **files}, look_up=lambda _: ["192.168.1.20"])
    assert {name: status for name, status in bad(one).items() if name != "cpus"} == expected


def test_rdma_is_not_missed_on_one_node(get: Get) -> None:
    assert one_of(get(environ={"NCCL_IB_DISABLE": "1"}, files=ROCE), "nccl-rdma").status == "ok"


@pytest.mark.parametrize(
    ("environ", "files", "status"),
    [
        ({}, {}, "problem"),
        ({"LD_LIBRARY_PATH": "/usr/lib:/opt/amazon/ofi-nccl/lib"}, {}, "ok"),
        ({}, {"etc/ld.so.cache": "\0/opt/amazon/ofi-nccl/lib/libnccl-net.so\0"}, "ok"),
        ({"NCCL_NET_PLUGIN": "ofi"}, {"etc/ld.so.cache": "\0/usr/lib/libnccl-net-ofi.so\0"}, "ok"),
        ({"NCCL_NET_PLUGIN": "ofi"}, {"etc/ld.so.cache": "\0/usr/lib/libnccl-net.so\0"}, "problem"),
    ],
)
def test_plugin_for_efa(get: Get, environ: Mapping[str, str], files: Mapping[str, str], status: str) -> None:
    assert one_of(get("efa", environ=environ, files=files), "rdma-libraries").status == status


def test_nccl_itself_has_no_say_in_efa(get: Get) -> None:
    assert one_of(get("efa", environ={"NCCL_IB_DISABLE": "1"}), "nccl-rdma").status == "ok"
    assert one_of(get("efa", environ={"NCCL_NET": "Socket"}), "nccl-rdma").status == "problem"


@pytest.mark.parametrize(
    ("environ", "status", "seen"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "ok", "docker0, eth0, lo"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "ok", ""),
        ({"NCCL_SOCKET_IFNAME": "^=docker0,lo"}, "ok", ""),
        ({"NCCL_SOCKET_IFNAME": "^=docker0"}, "problem", "so that it may take lo"),
        ({"NCCL_SOCKET_IFNAME": "^docker0", "WORLD_SIZE": "8"}, "warning", "so that it may take lo"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "problem", "this host has no interface 'ib0': it has docker0, eth0, lo"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth"}, "problem", "GLOO_SOCKET_IFNAME='eth', and"),
    ],
)
def test_interfaces(get: Get, environ: Mapping[str, str], status: str, seen: str) -> None:
    found = one_of(get("efa", environ=environ), "interfaces")
    assert (found.status, seen in found.seen) == (status, True), found


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({"NCCL_TOPO_FILE": "/topo.xml"}, "NCCL_TOPO_FILE='/topo.xml', and there is no such file here"),
        (
            {"NCCL_NET_PLUGIN": "/opt/plugin.so"},
            "NCCL_NET_PLUGIN='/opt/plugin.so', and the dynamic linker finds no such",
        ),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        ({"NCCL_SHM_DISABLE": "1"}, "NCCL_SHM_DISABLE=1"),
        ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "more than 64"),
    ],
)
def test_nccl_settings(get: Get, environ: Mapping[str, str], seen: str) -> None:
    found = one_of(get(environ=environ), "nccl-settings")
    assert (found.status, seen in found.seen) == ("warning", True), found


@pytest.mark.parametrize(
    ("environ", "found", "status", "seen"),
    [
        ({}, ["127.0.1.1"], "ok", ""),
        (SEVERAL_NODES, ["127.0.1.1"], "warning", "which no other host can reach"),
        (SEVERAL_NODES, ["192.168.1.20"], "ok", ""),
        (SEVERAL_NODES, ["192.168.1.99"], "problem", "192.168.1.99 is no address of this host"),
        (SEVERAL_NODES, [], "problem", "does not resolve: Name or service not known"),
        ({}, [], "warning", "does not resolve"),
    ],
)
def test_own_name(get: Get, environ: Mapping[str, str], found: list[str], status: str, seen: str) -> None:
    def look_up(_: str) -> list[str]:
        if not found:
            raise OSError(-2, "Name or service not known")
        return found

    said = one_of(get(environ=environ, look_up=look_up), "host-name")
    assert (said.status, seen in said.seen) == (status, True), said


def test_resolver_that_is_slow_is_no_problem_yet(get: Get) -> None:
    def look_up(_: str) -> list[str]:
        raise TimeoutError("no name server answered within 0.3 s")

    said = one_of(get(environ=SEVERAL_NODES, look_up=look_up), "host-name")
    assert (said.status, said.seen.endswith("no name server answered within 0.3 s")) == ("warning", True)


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({"http_proxy": "http://user:secret@proxy:3128"}, "warning"),
        ({"grpc_proxy": "http://user:secret@proxy:3128", "no_proxy": "localhost"}, "warning"),
        ({"http_proxy": "http://user:secret@proxy:3128", "no_proxy": "localhost,.0.0.4"}, "ok"),
        ({"http_proxy": "http://user:secret@proxy:3128", "no_proxy": "*"}, "ok"),
        ({"http_proxy": "http://user:secret@proxy:3128", "MASTER_ADDR": "127.0.0.1"}, "ok"),
        ({"HTTP_PROXY": "http://user:secret@proxy:3128"}, "ok"),  # gRPC reads small letters only
        ({"http_proxy": "http://user:secret@proxy:3128", "WORLD_SIZE": "1"}, "ok"),
    ],
)
def test_proxies(get: Get, environ: Mapping[str, str], status: str) -> None:
    one = get(environ={**SEVERAL_NODES, **environ})
    assert one_of(one, "proxies").status == status
    assert "secret" not in text(examine(one), one.host)


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        (SEVERAL_NODES, "ok"),
        ({**SEVERAL_NODES, "MASTER_PORT": "40001"}, "warning"),  # among those of outgoing connections
        ({**SEVERAL_NODES, "MASTER_PORT": "33935"}, "warning"),  # recorded: somebody listens there
        ({**SEVERAL_NODES, "RANK": "1", "MASTER_PORT": "61000"}, "ok"),
    ],
)
def test_ports(get: Get, environ: Mapping[str, str], status: str) -> None:
    listening = (
        "sl local_address rem_address st\n0: 0100007F:848F 00000000:0000 0A 0\n1: 0100007F:7234 00000000:0 01 0\n"
    )
    assert one_of(get(environ=environ, files={"proc/net/tcp": listening}), "ports").status == status
