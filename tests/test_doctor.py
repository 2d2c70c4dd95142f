"""The checks of `doctor` on recorded and documented machines, and the command."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT, Run
from recorded import FOLDER, NAMES, PACKAGES, Get, machine

from distboot import cpus
from distboot.cli.doctor import text
from distboot.doctor import examine
from distboot.doctor.finding import Finding
from distboot.doctor.machine import Machine

_READY = {  # what the Azure machine lacks
    "dev/infiniband/uverbs{0-7}": "",
    "etc/ld.so.cache": "libibverbs.so.1\0/lib/x86_64-linux-gnu/libibverbs.so.1\0",
    "etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
    "opt/microsoft/ndv5/topo.xml": "<system/>",
    "proc/self/limits": "Max open files  1048576  1048576  files\nMax locked memory  unlimited  unlimited  bytes\n",
}


@pytest.fixture
def get(tmp_path: Path) -> Get:
    def it(name: str = "laptop", **changes: object) -> Machine:
        return machine(name, tmp_path, **changes)  # type: ignore[arg-type]

    return it


def _bad(one: Machine) -> dict[str, str]:
    return {finding.name: finding.status for finding in examine(one) if finding.status != "ok"}


def _one(one: Machine, name: str) -> Finding:
    (found,) = (finding for finding in examine(one) if finding.name == name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_machines(name: str, get: Get) -> None:
    """DISTBOOT_WRITE_MACHINES=1 writes what is said of each: read the difference, aloud."""
    one = get(name)
    said, file = text(examine(one), one.host) + "\n", FOLDER / f"{name}.txt"
    if os.environ.get("DISTBOOT_WRITE_MACHINES"):
        file.write_text(said)
    assert said == file.read_text()


def test_container_that_has_all_it_needs(get: Get) -> None:
    assert _bad(get("azure-nd-h100", files=_READY)) == {}


@pytest.mark.parametrize(
    ("environ", "files", "how"),
    [
        ({}, {".dockerenv": ""}, "docker run --shm-size=8g"),
        ({"container": "podman"}, {}, "docker run --shm-size=8g"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, {}, "emptyDir: {medium: Memory, sizeLimit: 8Gi}"),
        ({"AZUREML_RUN_ID": "run"}, {}, "resources: {shm_size: 8g}"),
        ({}, {}, "mount -o remount,size=8g /dev/shm"),
    ],
)
def test_remedy_fits_what_runs_the_container(
    get: Get, environ: Mapping[str, str], files: Mapping[str, str], how: str
) -> None:
    found = _one(get(environ=environ, files=files, shared_memory=lambda: (64 << 20, 64 << 20)), "shared-memory")
    assert (found.status, how in found.remedy) == ("problem", True), found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_to_be_put_into_a_pod_is_yaml(name: str, get: Get) -> None:
    yaml = pytest.importorskip("yaml")
    found = examine(get(name, environ={"KUBERNETES_SERVICE_HOST": "10.96.0.1"}))
    for pod in [finding.remedy.removeprefix("in the pod:") for finding in found if "in the pod:" in finding.remedy]:
        assert isinstance(yaml.safe_load(pod) or {}, dict), pod


def test_documents_show_what_is_really_said() -> None:
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs" / "infiniband.md").read_text()
    shown = readme.partition("$ python -m distboot doctor\n")[2].partition("…\n```")[0]
    said = (FOLDER / "azure-nd-h100.txt").read_text()
    assert (said.startswith(shown), len(shown) > 500) == (True, True)
    yaml = pytest.importorskip("yaml")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert [set(yaml.safe_load(block)) >= {"resources"} for block in blocks] == [False, True]


@pytest.mark.parametrize(
    ("size", "free", "status"),
    [(64, 64, "problem"), (65, 65, "warning"), (1023, 1023, "warning"), (1024, 1024, "ok"), (9999, 3, "problem")],
)
def test_shared_memory(get: Get, size: int, free: int, status: str) -> None:
    assert _one(get(shared_memory=lambda: (size << 20, free << 20)), "shared-memory").status == status


def test_no_shared_memory_at_all(get: Get) -> None:
    def none() -> tuple[int, int]:
        raise FileNotFoundError(2, "No such file or directory")

    found = _one(get(shared_memory=none), "shared-memory")
    assert (found.status, found.seen) == ("problem", "there is no /dev/shm (No such file or directory)")


def test_options_of_docker_are_a_field_of_the_job_in_azure_ml(get: Get) -> None:
    found = _one(get("azure-nd-h100", environ={"AZUREML_RUN_ID": "run"}), "memlock")
    assert found.remedy == 'in the job\'s YAML: resources: {docker_args: "--ulimit memlock=-1 --cap-add=IPC_LOCK"}'


@pytest.mark.parametrize(("limit", "status"), [("unlimited", "ok"), ("8388608", "problem"), ("68719476736", "warning")])
def test_locked_memory(get: Get, limit: str, status: str) -> None:
    said = f"Max open files  4096  4096  files\nMax locked memory  {limit}  {limit}  bytes\n"
    assert _one(get("azure-nd-h100", files={"proc/self/limits": said}), "memlock").status == status


def test_what_is_set_cannot_forge_lines(get: Get) -> None:
    one = get(environ={"NCCL_TOPO_FILE": "/x\nok all is well\x1b[31m", "container": "docker"})
    said = text(examine(one), one.host)
    assert ("\x1b" in said, "\nok all" in said) == (False, False)


def test_the_right_to_lock_memory_counts_in_the_first_user_namespace_only(get: Get) -> None:
    status = {"proc/self/status": "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-95\n"}
    assert _one(get("azure-nd-h100", files=status), "memlock").status == "ok"
    rootless = {**status, "proc/self/uid_map": "0 1000 1\n"}
    assert _one(get("azure-nd-h100", files=rootless), "memlock").status == "problem"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "400000 100000\n"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "900000 100000\n",
            },
            4.0,
        ),
        # The path is the host's, and the container's own group is mounted at the top.
        ({"proc/self/cgroup": "0::/kubepods/pod1/c2\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/5f\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "1 2 3"}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: Mapping[str, str], expected: float | None) -> None:
    for path, its in {"proc/self/cgroup": "0::/\n", **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(its)
    assert cpus.quota(tmp_path) == expected


@pytest.mark.parametrize(("listed", "count"), [("0", 1), ("0-3,8", 5), ("0-1,4-5", 4)])
def test_cpu_affinity(tmp_path: Path, listed: str, count: int) -> None:
    assert cpus.affinity(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nCpus_allowed_list:\t{listed}\n")
    assert cpus.affinity(tmp_path) == count


TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9"}


@pytest.mark.parametrize(
    ("environ", "limit", "status", "remedy"),
    [
        ({}, "max", "ok", ""),
        ({}, "1100000", "warning", "OMP_NUM_THREADS=11"),
        ({}, "200000", "problem", "OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "2"}, "200000", "ok", ""),
        ({"OMP_NUM_THREADS": "3"}, "200000", "warning", "OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "4,2"}, "200000", "unknown", ""),
        (TWO_RANKS, "max", "warning", "OMP_NUM_THREADS=11"),
        ({**TWO_RANKS, "OMP_NUM_THREADS": "11"}, "max", "ok", ""),
        ({**TWO_RANKS, "OMP_NUM_THREADS": "1"}, "150000", "problem", "ask the scheduler for more CPUs"),
    ],
)
def test_threads_against_cpus(get: Get, environ: Mapping[str, str], limit: str, status: str, remedy: str) -> None:
    files = {"sys/fs/cgroup/user.slice/cpu.max": f"{limit} 100000\n"}
    found = _one(get(environ=environ, files=files), "cpus")
    assert (found.status, found.remedy) == (status, remedy), found


@pytest.mark.parametrize(
    ("choice", "status", "seen"),
    [
        (None, "ok", "all 8"),
        ("0,1", "ok", "2 of 8"),
        ("GPU-22222222,GPU-3", "ok", "2 of 8"),
        ("", "warning", "hides all 8"),
        ("-1", "warning", "hides all 8"),
        ("NoDevFiles", "warning", "hides all 8"),
        ("0,8", "problem", "there is no device 8: 1 of the 8"),
        ("GPU-99999999", "problem", "no device here is called 'GPU-99999999'"),
        ("cuda:0", "problem", "no device here is called 'cuda:0'"),
        ("0,0", "problem", "names 0 twice"),
        ("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "unknown", "only the driver's library could say"),
        ("MIG-5c89852c,MIG-6d91", "warning", "shows a process the first MIG device only"),
    ],
)
def test_visible_devices_in_all_their_forms(get: Get, choice: str | None, status: str, seen: str) -> None:
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"} | ({} if choice is None else {"CUDA_VISIBLE_DEVICES": choice})
    found = _one(get("azure-nd-h100", environ=environ), "visible-devices")
    assert (found.status, seen in found.seen) == (status, True), found


def test_more_ranks_than_accelerators(get: Get) -> None:
    found = _one(get("azure-nd-h100", environ={"CUDA_VISIBLE_DEVICES": "0,1"}), "visible-devices")
    assert (found.status, found.seen) == ("problem", "CUDA_VISIBLE_DEVICES='0,1': 2 of 8; 8 ranks are on this node")
    alone = _one(get("azure-nd-h100", environ={"CUDA_VISIBLE_DEVICES": "3"}), "visible-devices")
    assert alone.status == "ok", "the launcher shows each rank its own"


@pytest.mark.parametrize(
    ("environ", "status", "seen"),
    [
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, "ok", "1 of 8"),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "2"}, "problem", "HIP_VISIBLE_DEVICES='2', and there"),
        ({"CUDA_VISIBLE_DEVICES": "9"}, "problem", "CUDA_VISIBLE_DEVICES='9', and there is no device 9"),
        ({"CUDA_VISIBLE_DEVICES": "9", "HIP_VISIBLE_DEVICES": "0"}, "ok", "1 of 8"),
    ],
)
def test_visible_devices_of_rocm(get: Get, environ: Mapping[str, str], status: str, seen: str) -> None:
    found = _one(get("rocm", environ=environ), "visible-devices")
    assert (found.status, seen in found.seen) == (status, True), found


GPU = {"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n"}
CUDA = {f"{PACKAGES}/torch/version.py": "__version__ = '2.7.0+cu126'\ncuda: Optional[str] = '12.6'\nhip = None\n"}


@pytest.mark.parametrize(
    ("environ", "files", "status", "remedy"),
    [
        ({"container": "docker"}, CUDA, "problem", "docker run --gpus all"),
        ({"KUBERNETES_SERVICE_HOST": "1"}, CUDA, "problem", "limits: {nvidia.com/gpu: 1}"),
        ({"APPTAINER_CONTAINER": "/image.sif"}, CUDA, "problem", "apptainer exec --nv"),
        ({"container": "docker", "CUDA_VISIBLE_DEVICES": ""}, CUDA, "ok", ""),
        ({"container": "docker"}, {}, "ok", ""),  # the laptop's torch is for the CPU
        ({"container": "docker"}, {f"{PACKAGES}/torch/version.py": ""}, "warning", "docker run --gpus all"),
    ],
)
def test_accelerators_that_did_not_get_into_the_container(
    get: Get, environ: Mapping[str, str], files: Mapping[str, str], status: str, remedy: str
) -> None:
    found = [each for each in examine(get(environ=environ, files={**GPU, **files})) if each.name == "accelerators"]
    (nvidia,) = (each for each in found if "NVIDIA" in each.seen)
    assert (nvidia.status, remedy in nvidia.remedy) == (status, True), nvidia


def test_accelerator_that_this_user_may_not_open(get: Get, tmp_path: Path) -> None:
    one = get("rocm", files={"dev/kfd": "", "dev/dri/renderD128": ""}, may_open=lambda _: False)
    found = _one(one, "accelerators")
    assert found.seen == "8 AMD GPUs on this host, and this user may not open /dev/kfd"
    assert found.remedy == f"docker run --group-add {(tmp_path / 'dev/kfd').stat().st_gid}"


@pytest.mark.parametrize(
    ("name", "files", "status", "seen"),
    [
        ("azure-nd-h100", {}, "ok", "NVIDIA driver 535.161.08"),
        ("old-driver", {"usr/local/cuda/compat/libcuda.so.1": ""}, "warning", "compatibility library"),
        ("azure-nd-h100", {f"{PACKAGES}/torch/version.py": "__version__ = '2.13.0+cpu'\n"}, "warning", "CPU only"),
        ("azure-nd-h100", {f"{PACKAGES}/torch/version.py": "__version__ = '2'\nhip = '6.3'\n"}, "problem", "ROCm"),
        ("rocm", {**CUDA, "dev/kfd": "", "dev/dri/renderD128": ""}, "problem", "built for CUDA"),
        ("gaudi-pod", {}, "ok", "torch 2.6.0+hpu.1.20.1 for Gaudi"),
    ],
)
def test_driver_against_the_build(get: Get, name: str, files: Mapping[str, str], status: str, seen: str) -> None:
    found = _one(get(name, files=files), "driver")
    assert (found.status, seen in found.seen) == (status, True), found


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
    assert _bad(get("azure-nd-h100", files={**_READY, **files})) == expected


def test_infiniband_without_a_driver_on_the_host(get: Get) -> None:
    card = "sys/bus/pci/devices/0101:00:00.0/class"
    elsewhere = _one(get(files={card: "0x020700\n"}), "rdma-devices")
    assert (elsewhere.status, "modprobe mlx5_ib" in elsewhere.remedy) == ("problem", True)
    azure = _one(get(files={"sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n"}), "rdma-devices")
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
    assert {name: status for name, status in _bad(one).items() if name != "cpus"} == expected


def test_rdma_is_not_missed_on_one_node(get: Get) -> None:
    assert _one(get(environ={"NCCL_IB_DISABLE": "1"}, files=ROCE), "nccl-rdma").status == "ok"


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
    assert _one(get("efa", environ=environ, files=files), "rdma-libraries").status == status


def test_nccl_itself_has_no_say_in_efa(get: Get) -> None:
    assert _one(get("efa", environ={"NCCL_IB_DISABLE": "1"}), "nccl-rdma").status == "ok"
    assert _one(get("efa", environ={"NCCL_NET": "Socket"}), "nccl-rdma").status == "problem"


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
    found = _one(get("efa", environ=environ), "interfaces")
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
    found = _one(get(environ=environ), "nccl-settings")
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

    said = _one(get(environ=environ, look_up=look_up), "host-name")
    assert (said.status, seen in said.seen) == (status, True), said


def test_resolver_that_is_slow_is_no_problem_yet(get: Get) -> None:
    def look_up(_: str) -> list[str]:
        raise TimeoutError("no name server answered within 0.3 s")

    said = _one(get(environ=SEVERAL_NODES, look_up=look_up), "host-name")
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
    assert _one(one, "proxies").status == status
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
    assert _one(get(environ=environ, files={"proc/net/tcp": listening}), "ports").status == status


def test_clock_that_is_behind(get: Get) -> None:
    assert _one(get(now=1_700_000_000.0), "clock").status == "problem"


def test_broken_environment_is_a_finding_with_the_hint_of_its_error(get: Get) -> None:
    found = _one(get(environ={"RANK": "3"}), "launcher")
    assert (found.status, "WORLD_SIZE" in found.seen, bool(found.remedy)) == ("problem", True, True), found


def test_check_that_crashes_is_a_finding(get: Get) -> None:
    def broken(_: Machine) -> list[Finding]:
        raise ZeroDivisionError("so it is")

    (found,) = examine(get(), (broken,))  # type: ignore[arg-type]
    assert (found.name, found.status) == ("broken", "unknown")
    assert found.seen == "the check itself failed: ZeroDivisionError: so it is"


@pytest.mark.parametrize("name", NAMES)
def test_machine_without_proc_and_sys(name: str, tmp_path: Path, get: Get) -> None:
    one = get(name, root=tmp_path / "empty")
    assert [finding for finding in examine(one) if "the check itself failed" in finding.seen] == []


def test_files_full_of_nonsense_are_no_traceback(get: Get, tmp_path: Path) -> None:
    one = get("azure-nd-h100")
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff\x00 : - nonsense\n")
    assert len(examine(one)) >= 20


def test_elsewhere_than_on_linux_only_what_makes_sense_there(get: Get) -> None:
    names = {finding.name for finding in examine(get(system="darwin"))}
    assert names == {"launcher", "host-name", "master-addr", "ports", "proxies", "clock"}


_RUN_IT = """
import sys
from distboot.cli.main import main
code = main(["doctor", *sys.argv[1:]])
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "tensorflow", "jax", "horovod", "numpy"}
sys.exit(f"loaded: {loaded}" if loaded else code)
"""


def test_command_on_this_very_machine(run: Run) -> None:
    done = run(sys.executable, "-c", _RUN_IT, "--json")
    said = json.loads(done.stdout)
    assert [set(finding) for finding in said["findings"]] == [{"name", "status", "seen", "remedy"}] * 20
    assert said["ready"] == ("problem" not in {finding["status"] for finding in said["findings"]})
    assert (done.returncode, done.stderr) == (0 if said["ready"] else 78, "")
    assert not [finding for finding in said["findings"] if "the check itself failed" in finding["seen"]]


def test_command_says_what_is_wrong_and_ends_with_78(distboot: Run) -> None:
    done = distboot("doctor", env={"RANK": "3"})
    assert done.returncode == 78
    headline, _, first, remedy, *_ = done.stdout.splitlines()
    assert headline.startswith("Not ready: ")
    assert first.startswith("problem  launcher: ")
    assert remedy.startswith("           remedy: ")
    assert done.stderr == ""
