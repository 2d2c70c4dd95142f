"""The checks of `doctor`: memory, CPUs and accelerators of a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from recorded import PACKAGES, Get, one_of

from distboot import cpus
from distboot.doctor import examine


@pytest.mark.parametrize(
    ("size", "free", "status"),
    [(64, 64, "problem"), (65, 65, "warning"), (1023, 1023, "warning"), (1024, 1024, "ok"), (9999, 3, "problem")],
)
def test_shared_memory(get: Get, size: int, free: int, status: str) -> None:
    assert one_of(get(shared_memory=lambda: (size << 20, free << 20)), "shared-memory").status == status


def test_no_shared_memory_at_all(get: Get) -> None:
    def none() -> tuple[int, int]:
        raise FileNotFoundError(2, "No such file or directory")

    found = one_of(get(shared_memory=none), "shared-memory")
    assert (found.status, found.seen) == ("problem", "there is no /dev/shm (No such file or directory)")


@pytest.mark.parametrize(("limit", "status"), [("unlimited", "ok"), ("8388608", "problem"), ("68719476736", "warning")])
def test_locked_memory(get: Get, limit: str, status: str) -> None:
    said = f"Max open files  4096  4096  files\nMax locked memory  {limit}  {limit}  bytes\n"
    assert one_of(get("azure-nd-h100", files={"proc/self/limits": said}), "memlock").status == status


def test_the_right_to_lock_memory_counts_in_the_first_user_namespace_only(get: Get) -> None:
    status = {"proc/self/status": "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-95\n"}
    assert one_of(get("azure-nd-h100", files=status), "memlock").status == "ok"
    rootless = {**status, "proc/self/uid_map": "0 1000 1\n"}
    assert one_of(get("azure-nd-h100", files=rootless), "memlock").status == "problem"


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
        ({}, "200000", "ok", ""),
        ({"OMP_NUM_THREADS": "2"}, "200000", "ok", ""),
        ({"OMP_NUM_THREADS": "3"}, "200000", "warning", "OMP_NUM_THREADS=2, or unset it"),
        ({"OMP_NUM_THREADS": "4,2"}, "200000", "unknown", ""),
        (TWO_RANKS, "max", "ok", ""),
        ({**TWO_RANKS, "OMP_NUM_THREADS": "11"}, "max", "ok", ""),
        ({**TWO_RANKS, "OMP_NUM_THREADS": "1"}, "150000", "problem", "ask the scheduler for more CPUs"),
    ],
)
def test_threads_against_cpus(get: Get, environ: Mapping[str, str], limit: str, status: str, remedy: str) -> None:
    files = {"sys/fs/cgroup/user.slice/cpu.max": f"{limit} 100000\n"}
    found = one_of(get(environ=environ, files=files), "cpus")
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
    found = one_of(get("azure-nd-h100", environ=environ), "visible-devices")
    assert (found.status, seen in found.seen) == (status, True), found


def test_more_ranks_than_accelerators(get: Get) -> None:
    found = one_of(get("azure-nd-h100", environ={"CUDA_VISIBLE_DEVICES": "0,1"}), "visible-devices")
    assert (found.status, found.seen) == ("problem", "CUDA_VISIBLE_DEVICES='0,1': 2 of 8; 8 ranks are on this node")
    alone = one_of(get("azure-nd-h100", environ={"CUDA_VISIBLE_DEVICES": "3"}), "visible-devices")
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
    found = one_of(get("rocm", environ=environ), "visible-devices")
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
    found = one_of(one, "accelerators")
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
    found = one_of(get(name, files=files), "driver")
    assert (found.status, seen in found.seen) == (status, True), found
