"""The checks of `doctor`, one by one: memory, CPUs and accelerators, RDMA, NCCL, names, proxies and ports."""

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
from inside import cpus, examine, text
from recorded import PACKAGES, READY, Get, bad, lay_out, one_of

AZURE = "azure-nd-h100"
LAPTOP = "laptop"
VISIBLE = "visible-devices"
THREADS = "OMP_NUM_THREADS"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
IFNAME = "NCCL_SOCKET_IFNAME"
GLOO_IFNAME = "GLOO_SOCKET_IFNAME"
TWO_RANKS = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.9",
}
SEVERAL_NODES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}
LOCKS = {"proc/self/status": "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-95\n"}
LOADER = "etc/ld.so.cache"
TORCH = f"{PACKAGES}/torch/version.py"
CUDA = {TORCH: "__version__ = '2.7.0+cu126'\ncuda: Optional[str] = '12.6'\nhip = None\n"}
AMD = {"dev/kfd": "", "dev/dri/renderD128": ""}
GPU = {
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
}
PORT_1 = "sys/class/infiniband/mlx5_ib1/ports/1/state"
TOPOLOGY = {"NCCL_TOPO_FILE": "/topo.xml"}
PLUGIN = {"NCCL_NET_PLUGIN": "/opt/plugin.so"}
CARD = {"sys/bus/pci/devices/0101:00:00.0/class": "0x020700\n"}
VENDOR = {"sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n"}
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
    LOADER: "libibverbs.so.1\0/lib64/libibverbs.so.1\0",
    "etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
    "proc/self/limits": (
        "Max open files  4096  4096  files\nMax locked memory  unlimited  unlimited  bytes\n"
    ),
}


def _locked(limit: str) -> dict[str, str]:
    said = f"Max open files  4096  4096  files\nMax locked memory  {limit}  {limit}  bytes\n"
    return {"proc/self/limits": said}


def _quota(limit: str) -> dict[str, str]:
    return {"sys/fs/cgroup/user.slice/cpu.max": f"{limit} 100000\n"}


def _alone(choice: str) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "CUDA_VISIBLE_DEVICES": choice}


def _of_hip(choice: str) -> dict[str, str]:
    return {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": choice}


def _port(port: str, rank: str = "0") -> dict[str, str]:
    return {**SEVERAL_NODES, "MASTER_PORT": port, "RANK": rank}


def _proxy(name: str, **others: str) -> dict[str, str]:
    return {**SEVERAL_NODES, name: "http://user:secret@proxy:3128", **others}


_TCP = (
    "sl local_address rem_address st\n0: 0100007F:848F 00000000:0000 0A 0\n1: "
    "0100007F:7234 00000000:0 01 0\n"
)
LISTENING = {"proc/net/tcp": _TCP}
_IN_AZURE_ML = (
    'in the job\'s YAML: resources: {docker_args: "--ulimit memlock=-1 --cap-add=IPC_LOCK"}'
)

# Name of the check, machine, variables, files, status, and what is seen, or to be done.
CHECKS: list[tuple[str, str, Mapping[str, str], Mapping[str, str | None], str, str]] = [
    ("memlock", AZURE, {}, _locked("unlimited"), "ok", ""),
    ("memlock", AZURE, {}, _locked("8388608"), "problem", ""),
    ("memlock", AZURE, {}, _locked("68719476736"), "warning", ""),
    # The right to lock memory counts in the first user namespace only.
    ("memlock", AZURE, {}, LOCKS, "ok", ""),
    ("memlock", AZURE, {}, {**LOCKS, "proc/self/uid_map": "0 1000 1\n"}, "problem", ""),
    ("cpus", LAPTOP, {}, _quota("max"), "ok", ""),
    ("cpus", LAPTOP, {}, _quota("200000"), "ok", ""),
    ("cpus", LAPTOP, {THREADS: "2"}, _quota("200000"), "ok", ""),
    ("cpus", LAPTOP, {THREADS: "3"}, _quota("200000"), "warning", "OMP_NUM_THREADS=2, or unset it"),
    ("cpus", LAPTOP, {THREADS: "4,2"}, _quota("200000"), "unknown", ""),
    ("cpus", LAPTOP, TWO_RANKS, _quota("max"), "ok", ""),
    ("cpus", LAPTOP, {**TWO_RANKS, THREADS: "11"}, _quota("max"), "ok", ""),
    (
        "cpus",
        LAPTOP,
        {**TWO_RANKS, THREADS: "1"},
        _quota("150000"),
        "problem",
        "ask the scheduler for more",
    ),
    (VISIBLE, AZURE, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {}, "ok", "all 8"),
    (VISIBLE, AZURE, _alone("0,1"), {}, "ok", "2 of 8"),
    (VISIBLE, AZURE, _alone("GPU-22222222,GPU-3"), {}, "ok", "2 of 8"),
    (VISIBLE, AZURE, _alone(""), {}, "warning", "hides all 8"),
    (VISIBLE, AZURE, _alone("-1"), {}, "warning", "hides all 8"),
    (VISIBLE, AZURE, _alone("NoDevFiles"), {}, "warning", "hides all 8"),
    (VISIBLE, AZURE, _alone("0,8"), {}, "problem", "there is no device 8: 1 of the 8"),
    (
        VISIBLE,
        AZURE,
        _alone("GPU-99999999"),
        {},
        "problem",
        "no device here is called 'GPU-99999999'",
    ),
    (VISIBLE, AZURE, _alone("cuda:0"), {}, "problem", "no device here is called 'cuda:0'"),
    (VISIBLE, AZURE, _alone("0,0"), {}, "problem", "names 0 twice"),
    (
        VISIBLE,
        AZURE,
        _alone("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"),
        {},
        "unknown",
        "only the driver's",
    ),
    (
        VISIBLE,
        AZURE,
        _alone("MIG-5c89852c,MIG-6d91"),
        {},
        "warning",
        "shows a process the first MIG device",
    ),
    (VISIBLE, AZURE, {CUDA_VISIBLE: "0,1"}, {}, "problem", "2 of 8; 8 ranks are on this node"),
    (VISIBLE, AZURE, {CUDA_VISIBLE: "3"}, {}, "ok", ""),  # the launcher shows each rank its own
    (VISIBLE, "rocm", _of_hip("1"), {}, "ok", "1 of 8"),
    (VISIBLE, "rocm", _of_hip("2"), {}, "problem", "='2', but"),
    (VISIBLE, "rocm", {CUDA_VISIBLE: "9"}, {}, "problem", "='9', but there is no device 9"),
    (VISIBLE, "rocm", {CUDA_VISIBLE: "9", "HIP_VISIBLE_DEVICES": "0"}, {}, "ok", "1 of 8"),
    ("driver", AZURE, {}, {}, "ok", "NVIDIA driver 535.161.08"),
    (
        "driver",
        "old-driver",
        {},
        {"usr/local/cuda/compat/libcuda.so.1": ""},
        "warning",
        "compatibility library",
    ),
    ("driver", AZURE, {}, {TORCH: "__version__ = '2.13.0+cpu'\n"}, "warning", "CPU only"),
    ("driver", AZURE, {}, {TORCH: "__version__ = '2'\nhip = '6.3'\n"}, "problem", "ROCm"),
    ("driver", "rocm", {}, {**CUDA, **AMD}, "problem", "built for CUDA"),
    ("driver", "gaudi-pod", {}, {}, "ok", "torch 2.6.0+hpu.1.20.1 for Gaudi"),
    ("rdma-devices", LAPTOP, {}, CARD, "problem", "modprobe mlx5_ib"),
    ("rdma-devices", LAPTOP, {}, {**CARD, **VENDOR}, "problem", "InfiniBandDriverLinux"),
    ("nccl-rdma", LAPTOP, {"NCCL_IB_DISABLE": "1"}, ROCE, "ok", ""),  # not missed on one node
    # The plugin for EFA; NCCL itself has no say in it.
    ("rdma-libraries", "efa", {}, {}, "problem", ""),
    (
        "rdma-libraries",
        "efa",
        {"LD_LIBRARY_PATH": "/usr/lib:/opt/amazon/ofi-nccl/lib"},
        {},
        "ok",
        "",
    ),
    (
        "rdma-libraries",
        "efa",
        {},
        {LOADER: "\0/opt/amazon/ofi-nccl/lib/libnccl-net.so\0"},
        "ok",
        "",
    ),
    (
        "rdma-libraries",
        "efa",
        {"NCCL_NET_PLUGIN": "ofi"},
        {LOADER: "\0/usr/lib/libnccl-net-ofi.so\0"},
        "ok",
        "",
    ),
    (
        "rdma-libraries",
        "efa",
        {"NCCL_NET_PLUGIN": "ofi"},
        {LOADER: "\0/usr/lib/libnccl-net.so\0"},
        "problem",
        "",
    ),
    ("nccl-rdma", "efa", {"NCCL_IB_DISABLE": "1"}, {}, "ok", ""),
    ("nccl-rdma", "efa", {"NCCL_NET": "Socket"}, {}, "problem", ""),
    ("interfaces", "efa", {IFNAME: "eth0"}, {}, "ok", "docker0, eth0, lo"),
    ("interfaces", "efa", {IFNAME: "^docker,lo"}, {}, "ok", ""),
    ("interfaces", "efa", {IFNAME: "^=docker0,lo"}, {}, "ok", ""),
    ("interfaces", "efa", {IFNAME: "^=docker0"}, {}, "problem", "so that NCCL may use lo"),
    (
        "interfaces",
        "efa",
        {IFNAME: "^docker0", "WORLD_SIZE": "8"},
        {},
        "warning",
        "so that NCCL may use lo",
    ),
    (
        "interfaces",
        "efa",
        {IFNAME: "ib0"},
        {},
        "problem",
        "no interface 'ib0': it has docker0, eth0, lo",
    ),
    ("interfaces", "efa", {IFNAME: "eth0", GLOO_IFNAME: "eth"}, {}, "problem", "GLOO_SOCKET_IFNA"),
    (
        "nccl-settings",
        LAPTOP,
        TOPOLOGY,
        {},
        "warning",
        "='/topo.xml', but there is no such file here",
    ),
    (
        "nccl-settings",
        LAPTOP,
        PLUGIN,
        {},
        "warning",
        "='/opt/plugin.so', but the dynamic linker finds no such",
    ),
    ("nccl-settings", LAPTOP, {"NCCL_P2P_DISABLE": "1"}, {}, "warning", "NCCL_P2P_DISABLE=1"),
    ("nccl-settings", LAPTOP, {"NCCL_SHM_DISABLE": "1"}, {}, "warning", "NCCL_SHM_DISABLE=1"),
    (
        "nccl-settings",
        LAPTOP,
        {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
        {},
        "warning",
        "than 64",
    ),
    ("ports", LAPTOP, SEVERAL_NODES, LISTENING, "ok", ""),
    # Among those of outgoing connections
    ("ports", LAPTOP, _port("40001"), LISTENING, "warning", ""),
    ("ports", LAPTOP, _port("33935"), LISTENING, "warning", ""),  # recorded: somebody listens there
    ("ports", LAPTOP, _port("61000", "1"), LISTENING, "ok", ""),
    ("proxies", LAPTOP, _proxy("http_proxy"), {}, "warning", ""),
    ("proxies", LAPTOP, _proxy("grpc_proxy", no_proxy="localhost"), {}, "warning", ""),
    ("proxies", LAPTOP, _proxy("http_proxy", no_proxy="localhost,.0.0.4"), {}, "ok", ""),
    ("proxies", LAPTOP, _proxy("http_proxy", no_proxy="*"), {}, "ok", ""),
    ("proxies", LAPTOP, _proxy("http_proxy", MASTER_ADDR="127.0.0.1"), {}, "ok", ""),
    ("proxies", LAPTOP, _proxy("HTTP_PROXY"), {}, "ok", ""),  # gRPC reads small letters only
    ("proxies", LAPTOP, _proxy("http_proxy", WORLD_SIZE="1"), {}, "ok", ""),
    ("launcher", LAPTOP, {"RANK": "3"}, {}, "problem", "WORLD_SIZE"),
    ("memlock", AZURE, {"AZUREML_RUN_ID": "run"}, {}, "problem", _IN_AZURE_ML),
]


@pytest.mark.parametrize(("check", "machine", "environ", "files", "status", "said"), CHECKS)
def test_check(
    get: Get,
    *,
    check: str,
    machine: str,
    environ: Mapping[str, str],
    files: Mapping[str, str],
    status: str,
    said: str,
) -> None:
    this = get(machine, environ=environ, files=files)
    found = one_of(this, check)
    assert (found.status, said in f"{found.seen}\n{found.remedy}") == (status, True), found
    assert bool(found.remedy) == (status in ("warning", "problem")), found
    assert "secret" not in text(examine(this), this.host)


@pytest.mark.parametrize(
    ("size", "free", "status", "seen"),
    [
        (64, 64, "problem", "too little for DataLoader workers"),
        (65, 65, "warning", ""),
        (1023, 1023, "warning", ""),
        (1024, 1024, "ok", "/dev/shm has 1 GiB, 1 GiB of it free"),
        (9999, 3, "problem", "3 MiB of it free: it is full"),
        (None, 0, "problem", "there is no /dev/shm (No such file or directory)"),
    ],
)
def test_shared_memory(get: Get, size: int | None, free: int, status: str, seen: str) -> None:
    absent = Mock(side_effect=FileNotFoundError(2, "No such file or directory"))
    there = absent if size is None else lambda: (size << 20, free << 20)
    found = one_of(get(shared_memory=there), "shared-memory")
    assert (found.status, seen in found.seen) == (status, True), found


CGROUP = "proc/self/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct/cpu.cfs"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({CGROUP: "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "4 1\n"}, 4.0),
        (
            {
                CGROUP: "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "4 1\n",
                "sys/fs/cgroup/a/b/cpu.max": "9 1\n",
            },
            4.0,
        ),
        # The path is the host's, and the container's own group is mounted at the top.
        ({CGROUP: "0::/kubepods/pod1/c2\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                CGROUP: "4:cpu,cpuacct:/docker/5f\n0::/\n",
                f"{V1}_quota_us": "300000",
                f"{V1}_period_us": "100000",
            },
            3.0,
        ),
        (
            {
                CGROUP: "4:cpuacct,cpu:/docker/5f\n0::/\n",
                "sys/fs/cgroup/cpu/docker/5f/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/docker/5f/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
        ({CGROUP: "nonsense", "sys/fs/cgroup/cpu.max": "1 2 3"}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: Mapping[str, str], expected: float | None) -> None:
    lay_out({CGROUP: "0::/\n", **files}, tmp_path)
    assert cpus.quota(tmp_path) == expected


@pytest.mark.parametrize(("listed", "count"), [("0", 1), ("0-3,8", 5), ("0-1,4-5", 4)])
def test_cpu_affinity(tmp_path: Path, listed: str, count: int) -> None:
    assert cpus.affinity(tmp_path) is None
    lay_out({"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{listed}\n"}, tmp_path)
    assert cpus.affinity(tmp_path) == count


@pytest.mark.parametrize(
    ("environ", "files", "status", "remedy"),
    [
        ({"container": "docker"}, CUDA, "problem", "docker run --gpus all"),
        ({"KUBERNETES_SERVICE_HOST": "1"}, CUDA, "problem", "limits: {nvidia.com/gpu: 1}"),
        ({"APPTAINER_CONTAINER": "/image.sif"}, CUDA, "problem", "apptainer exec --nv"),
        ({"container": "docker", "CUDA_VISIBLE_DEVICES": ""}, CUDA, "ok", ""),
        ({"container": "docker"}, {}, "ok", ""),  # the laptop's torch is for the CPU
        ({"container": "docker"}, {TORCH: ""}, "warning", "docker run --gpus all"),
    ],
)
def test_accelerators_that_did_not_get_into_the_container(
    get: Get, environ: Mapping[str, str], files: Mapping[str, str], status: str, remedy: str
) -> None:
    found = [
        each
        for each in examine(get(environ=environ, files={**GPU, **files}))
        if each.name == "accelerators"
    ]
    (nvidia,) = (each for each in found if "NVIDIA" in each.seen)
    assert (nvidia.status, remedy in nvidia.remedy) == (status, True), nvidia


def test_accelerator_that_this_user_may_not_open(get: Get, tmp_path: Path) -> None:
    one = get("rocm", files={"dev/kfd": "", "dev/dri/renderD128": ""}, may_open=lambda _: False)
    found = one_of(one, "accelerators")
    assert found.seen == "8 AMD GPUs on this host, but this user may not open /dev/kfd"
    assert found.remedy == f"docker run --group-add {(tmp_path / 'dev/kfd').stat().st_gid}"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),  # it has all that it needs
        (
            {"dev/infiniband/uverbs{0-7}": None, "dev/infiniband/uverbs{0-5}": ""},
            {"rdma-devices": "problem"},
        ),
        ({"etc/ld.so.cache": None}, {"rdma-libraries": "problem"}),
        ({"etc/libibverbs.d/mlx5.driver": None}, {"rdma-libraries": "problem"}),
        ({PORT_1: "1: DOWN\n"}, {"rdma-ports": "warning"}),
        ({PORT_1.replace("ib1", "ib{0-7}"): "2: INIT\n"}, {"rdma-ports": "problem"}),
        (
            {"etc/nccl.conf": "NCCL_IB_DISABLE=1\n"},
            {"nccl-rdma": "problem", "nccl-settings": "warning"},
        ),
        ({"etc/nccl.conf": "# nothing\n"}, {"nccl-settings": "warning"}),  # no topology file
    ],
)
def test_infiniband(get: Get, files: Mapping[str, str | None], expected: Mapping[str, str]) -> None:
    assert bad(get("azure-nd-h100", files={**READY, **files})) == expected


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
    get: Get,
    environ: Mapping[str, str],
    files: Mapping[str, str | None],
    expected: Mapping[str, str],
) -> None:
    one = get(
        environ={**SEVERAL_NODES, **environ},
        files={**ROCE, **files},
        look_up=lambda _: ["192.168.1.20"],
    )
    assert {name: status for name, status in bad(one).items() if name != "cpus"} == expected


UNKNOWN = OSError(-2, "Name or service not known")
SLOW = TimeoutError("no name server answered within 0.3 s")


@pytest.mark.parametrize(
    ("environ", "found", "status", "seen"),
    [
        ({}, ["127.0.1.1"], "ok", ""),
        (SEVERAL_NODES, ["127.0.1.1"], "warning", "which no other host can reach"),
        # Debian's line in /etc/hosts, and one that was added for a cluster
        ({}, ["127.0.1.1", "192.168.1.20"], "ok", ""),
        (SEVERAL_NODES, ["127.0.1.1", "192.168.1.20"], "warning", "other host can reach 127.0.1.1"),
        (SEVERAL_NODES, ["192.168.1.20"], "ok", ""),
        (SEVERAL_NODES, ["192.168.1.99"], "problem", "192.168.1.99 is not an address of this host"),
        (SEVERAL_NODES, UNKNOWN, "problem", "does not resolve: Name or service not known"),
        ({}, UNKNOWN, "warning", "does not resolve"),
        (SEVERAL_NODES, SLOW, "warning", "does not resolve: no name server answered within 0.3 s"),
    ],
)
def test_own_name(
    get: Get, environ: Mapping[str, str], found: list[str] | OSError, status: str, seen: str
) -> None:
    said = one_of(get(environ=environ, look_up=Mock(side_effect=[found] * 9)), "host-name")
    assert (said.status, seen in said.seen) == (status, True), said
