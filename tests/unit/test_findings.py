"""What the ranks should have alike and have not, and what each of them says of itself for that."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from recorded import lay_out
from rendezvous_peers import record

from distboot import __version__
from distboot.base.errors import DistbootError
from distboot.host import FRAMEWORK, accelerators
from distboot.rendezvous.differences import consistency_warnings, refuse_several_frameworks
from distboot.rendezvous.membership import build_membership
from distboot.rendezvous.messages import WorkerInfo
from distboot.rendezvous.plan import environment_facts


def _found(
    per_rank: Mapping[int, Mapping[str, str | None]], skews: Mapping[int, float]
) -> list[str]:
    """The findings about a job of 16 ranks on two nodes, whose ranks differ from all others by this."""
    records: list[WorkerInfo] = []
    alike = {"Python": "3.11.7 in /usr", "torch": "2.13.0", "accelerators": "8"}
    for rank in range(16):
        mine = {
            name: value
            for name, value in {**alike, **per_rank.get(rank, {})}.items()
            if value is not None
        }
        records.append(record(rank, 16, "ab"[rank // 8], facts=tuple(sorted(mine.items()))))
    return consistency_warnings(records, build_membership(records), skews)


def test_different_frameworks_on_ranks_are_refused() -> None:
    records = [
        record(rank, 4, facts=((FRAMEWORK, "jax" if rank == 2 else "torch"),)) for rank in range(4)
    ]
    refuse_several_frameworks(records[:2], build_membership(records[:2]))
    with pytest.raises(DistbootError) as refusal:
        refuse_several_frameworks(records, build_membership(records))
    assert refusal.value.code == "membership-mismatch"
    assert refusal.value.message == "rank 2 (node 0): framework to start jax, others torch"


OLDER = {rank: {"torch": "2.12.0"} for rank in range(8, 16)}
SAME = dict.fromkeys(range(16), 0.0)


@pytest.mark.parametrize(
    ("per_rank", "skews", "said"),
    [
        ({}, {3: 29.0, 4: -29.0}, []),  # nothing is said of what is alike
        (OLDER, {}, ["ranks 8-15 (node 1): torch 2.12.0, others 2.13.0"]),
        ({3: {"accelerators": "4"}}, {}, ["rank 3 (node 0): 4 accelerators visible, others 8"]),
        (
            {rank: {"torch": None} for rank in (6, 7, 8)},
            {},
            ["ranks 6-8 (nodes 0-1): torch not there, others 2.13.0"],
        ),
        (
            {5: {"NCCL_IB_DISABLE=": "1"}},
            {},
            ["rank 5 (node 0): NCCL_IB_DISABLE='1', others not set"],
        ),
        (
            {rank: {"NCCL_NET=": "IB"} for rank in range(1, 16)},
            {},
            ["rank 0 (node 0): NCCL_NET not set, others 'IB'"],
        ),
        (
            {5: {"FI_X=": "user:pass@host\n"}},
            {},
            ["rank 5 (node 0): FI_X='***@host\\n', others not set"],
        ),
        # Clocks are compared with the middle one.
        (
            {},
            dict.fromkeys(range(1, 16), 45.0),
            ["rank 0 (node 0): clock up to 45 s behind that of the others"],
        ),
        ({}, {**SAME, 7: 31.0}, ["rank 7 (node 0): clock up to 31 s ahead of that of the others"]),
        (
            {},
            {**SAME, 9: -3600.0, 10: -40},
            ["ranks 9-10 (node 1): clock up to 3600 s behind that of the others"],
        ),
    ],
)
def test_odd_ranks_are_named(
    per_rank: Mapping[int, Mapping[str, str | None]], skews: Mapping[int, float], said: list[str]
) -> None:
    assert _found(per_rank, skews) == said


def test_value_that_differs_everywhere_is_shortened() -> None:
    said = _found({rank: {"NCCL_X=": str(rank)} for rank in range(16)}, {})
    assert len(said) == 5
    assert said[-1] == "NCCL_X: 11 more values on other ranks"


def test_facts_of_this_process() -> None:
    may_differ = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "PATH": "/bin"}
    environ = {"NCCL_IB_DISABLE": "1", "FI_PROVIDER": "efa", "NCCL_LONG": "x" * 5000, **may_differ}
    said = dict(environment_facts(environ, 2, "torch"))
    assert said["Python"] == f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}"
    assert (said["distboot"], said["accelerators"]) == (__version__, "2")
    assert (said["NCCL_IB_DISABLE="], said["FI_PROVIDER="], len(said["NCCL_LONG="])) == (
        "1",
        "efa",
        200,
    )
    assert not said.keys() & {f"{name}=" for name in may_differ}


def test_versions_are_found_without_importing_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    for name in (
        "first/torch-2.12.0+cu126.dist-info",
        "second/torch-1.0.dist-info",
        "second/horovod-0.28.1.egg-info",
    ):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "absent"), str(first), str(second)])
    said = dict(environment_facts({}, 0, "torch"))
    assert (said["torch"], said["horovod"]) == ("2.12.0+cu126", "0.28.1")
    assert "tensorflow" not in said


# Written after NVIDIA's driver README, chapter "Using the /proc File System Interface": no such machine is to be had in
# CI. Three devices, not in the order of the bus.
INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 213
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.74.00.01
Bus Location: \t {bus}
Device Minor: \t {minor}
"""
UUIDS = ["GPU-11111111-aaaa", "GPU-22222222-bbbb", "GPU-33333333-cccc"]


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    driver = "proc/driver/nvidia"
    loaded = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 "
        "22:23:56 UTC 2024\nGCC 12\n"
    )
    lay_out({f"{driver}/version": loaded}, tmp_path)
    buses = (("0000:1b:00.0", UUIDS[2]), ("0000:04:00.0", UUIDS[0]), ("0000:0c:00.0", UUIDS[1]))
    for minor, (bus, uuid) in enumerate(buses):
        information = INFORMATION.format(uuid=uuid, bus=bus, minor=minor)
        lay_out(
            {f"dev/nvidia{minor}": "", f"{driver}/gpus/{bus}/information": information}, tmp_path
        )
    return tmp_path


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        (None, UUIDS),
        ("2,0", [UUIDS[2], UUIDS[0]]),
        ("GPU-22", [UUIDS[1]]),
        ("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", ["MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"]),
        # CUDA C++ Programming Guide: what follows an invalid index is not visible
        ("0,-1,2", [UUIDS[0]]),
        ("0,7", [UUIDS[0]]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_accelerators_as_the_visibility_variable_leaves_them(
    nvidia: Path, choice: str | None, seen: list[str]
) -> None:
    environ = {} if choice is None else {"CUDA_VISIBLE_DEVICES": choice}
    assert accelerators.visible(environ, nvidia) == seen
    assert accelerators.nvidia_driver(nvidia) == "550.54.15"


def test_driver_may_be_the_last_word(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module  550.54.15\n"
    lay_out({"proc/driver/nvidia/version": text}, tmp_path)
    assert accelerators.nvidia_driver(tmp_path) == "550.54.15"


def test_accelerators_of_other_tasks_do_not_count(nvidia: Path) -> None:
    (nvidia / "dev/nvidia1").unlink()  # for root, who may open everything; Slurm's cgroup denies it
    assert accelerators.visible({}, nvidia) == UUIDS[1:]
    assert accelerators.visible({"CUDA_VISIBLE_DEVICES": "0"}, nvidia) == [UUIDS[1]]


def test_accelerators_that_no_process_has_opened(nvidia: Path) -> None:
    """Without persistence mode NVIDIA's driver does not know their ids yet."""
    for path in nvidia.glob("proc/driver/nvidia/gpus/*/information"):
        path.write_text(
            re.sub("GPU-.*", "GPU-????????-????-????-????-????????????", path.read_text())
        )
    addresses = ["0000:04:00.0", "0000:0c:00.0", "0000:1b:00.0"]
    assert accelerators.visible({}, nvidia) == addresses
    assert accelerators.visible({"CUDA_VISIBLE_DEVICES": "2,0"}, nvidia) == addresses[::-2]
    assert accelerators.visible({"CUDA_VISIBLE_DEVICES": UUIDS[1]}, nvidia) == [UUIDS[1]]
    assert list(accelerators.pci_addresses(nvidia).values()) == addresses


def test_mig_devices_are_not_their_gpu(nvidia: Path) -> None:
    slices = ["MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "MIG-GPU-22222222/1/0"]
    for part in slices:
        assert accelerators.visible({"NVIDIA_VISIBLE_DEVICES": part}, nvidia) == [part]
    lay_out(
        {"proc/driver/nvidia/capabilities/gpu1/mig/gi7/access": "DeviceFileMinor: 66\n"}, nvidia
    )
    ids = accelerators.visible({"NVIDIA_VISIBLE_DEVICES": "all"}, nvidia)
    assert ids == ["", *UUIDS[1:]], "minor 1 has the lowest address"
    assert accelerators.own(ids, {}, 0) is None
    assert accelerators.own(ids, {}, 1) == UUIDS[1]


def test_amd_accelerators_outside_the_control_group(tmp_path: Path) -> None:
    topology = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (topology / "1/properties").mkdir(parents=True)  # a stand-in for EPERM, which root does not get
    for node in (2, 3):  # partitions of one device
        lay_out({f"{node}/properties": "simd_count 76\nunique_id 9\n"}, topology)
    assert accelerators.visible({}, tmp_path) == ["GPU-0000000000000009", "kfd3"]


def test_amd_accelerators(tmp_path: Path) -> None:
    """Written after the kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c; node 0 is the CPU."""
    for node, simd, unique in ((0, 0, 0), (1, 304, 9), (2, 304, 0), (10, 304, 12)):
        properties = f"cpu_cores_count 0\nsimd_count {simd}\nunique_id {unique}\n"
        lay_out({f"sys/class/kfd/kfd/topology/nodes/{node}/properties": properties}, tmp_path)
    # Not every device has a unique id
    ids = ["GPU-0000000000000009", "kfd2", "GPU-000000000000000c"]
    assert accelerators.visible({}, tmp_path) == ids
    assert accelerators.visible(
        {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, tmp_path
    ) == [ids[2]]


def test_which_accelerator_a_rank_will_use() -> None:
    nowhere = Path(os.devnull)
    assert accelerators.visible({"CUDA_VISIBLE_DEVICES": "0"}, nowhere) == []
    assert accelerators.nvidia_driver(nowhere) is None
    assert accelerators.own(UUIDS, {}, 1) == UUIDS[1]
    assert accelerators.own(UUIDS, {}, None) is None, "not known before the ranks meet"
    assert accelerators.own(UUIDS[:1], {"CUDA_VISIBLE_DEVICES": "0"}, 1) == UUIDS[0]
    assert accelerators.own(UUIDS[:1], {}, 1) is None, "it has none, and the framework will say so"
    assert accelerators.own([], {"CUDA_VISIBLE_DEVICES": "0"}, 0) is None
