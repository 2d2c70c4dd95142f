"""Which accelerators this process may use, by ids that two processes can compare.

NVIDIA's driver lists its devices under /proc/driver/nvidia, AMD's under /sys/class/kfd. Other kinds
are not known here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..base.text import digits

# The variables that decide which accelerators a process sees
VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "HABANA_VISIBLE_MODULES",
)
_TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"  # below the root, of AMD's devices and of CPUs
_INTEL = "0x8086"  # vendor of PCI devices


def visible(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Ids by the framework's index, for example "GPU-9a1c…"; empty if none are known.

    An id is empty where it is not known which MIG device a process sees.
    """
    nvidia = _nvidia(environ, root)
    if nvidia:
        return chosen(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    amd = chosen(list(amd_addresses(root)), environ.get("ROCR_VISIBLE_DEVICES"))
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    shown = environ.get("HIP_VISIBLE_DEVICES", shown)
    return chosen(amd, shown)


def own_index(
    count: int,
    environ: Mapping[str, str],
    local_rank: int | None,
) -> int | None:
    """The index of this rank's device among `count` visible ones.

    None if there are too few, or if the local rank is not known yet.
    """
    # A launcher that shows each process only its own device (srun --gpus-per-task) numbers it 0 on
    # every rank.
    is_restricted = not environ.keys().isdisjoint(VISIBILITY)
    if count == 1 and is_restricted:
        return 0
    if local_rank is None or local_rank >= count:
        return None
    return local_rank


def own(
    ids: list[str],
    environ: Mapping[str, str],
    local_rank: int | None,
) -> str | None:
    """The id of this rank's device; None: it is not known."""
    index = own_index(len(ids), environ, local_rank)
    if index is None:
        return None
    return ids[index] or None


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """Version of NVIDIA's driver, for example "550.54.15"."""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    text = text_of(root / "proc/driver/nvidia/version")
    version = re.search(r"\s(\d+\.\d+(\.\d+)?)(?!\S)", text)
    if version is None:
        return None
    return version[1]


def has_intel_gpu() -> bool:
    """Whether this host has a GPU of Intel, also one in its processor."""
    vendors = Path("/sys/class/drm").glob("renderD*/device/vendor")
    return _INTEL in map(text_of, vendors)


def has_nvidia_smi() -> bool:
    """Whether this host has the program that `nvidia_smi` asks."""
    # Without `shutil`, which has almost a megabyte, in the agent of each job of one node
    paths = map("{}/nvidia-smi".format, os.get_exec_path())
    return any(map(partial(os.access, mode=os.X_OK), paths))


def has_accelerators() -> bool:
    """Whether this host may have accelerators of a maker whose driver can be asked."""
    return any((os.path.isdir(f"/{_TOPOLOGY}"), has_nvidia_smi()))


def pci_addresses(root: Path) -> dict[str, str]:
    """The PCI address of each accelerator, by its id: `{"GPU-9a1c…": "0000:3b:00.0"}`."""
    found = amd_addresses(root)
    for device in _nvidia_devices(root):
        found[device.id] = device.address
    return found


def _nvidia(environ: Mapping[str, str], root: Path) -> list[str]:
    """In the order of the PCI bus, as CUDA numbers devices of one kind."""
    ids = []
    for device in _nvidia_devices(root):
        ids.append(device.id_in_job)
    # NVIDIA's container runtime has given these to this container
    given = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    slices = re.findall(r"MIG-[^\s,]+", given)
    if ids and slices:
        return slices
    return ids


class _Nvidia(NamedTuple):
    """A device of NVIDIA."""

    id: str
    address: str  # on the PCI bus
    id_in_job: str  # empty: it has MIG devices, whose ids only the driver's library knows


def _nvidia_devices(root: Path) -> Iterator[_Nvidia]:
    """Those that this process may open."""
    driver = root / "proc/driver/nvidia"
    for path in sorted(driver.glob("gpus/*/information")):
        # GPU UUID: 	 GPU-9a1c4b7e-…
        # Device Minor: 	 0
        text = text_of(path)
        pairs = re.findall(r"^(GPU UUID|Device Minor):\s*(\S+)\s*$", text, re.MULTILINE)
        lines = dict(pairs)
        minor = lines.get("Device Minor", "")
        device = root / f"dev/nvidia{minor}"
        # /proc lists all devices; with Slurm's ConstrainDevices a task may open only its own, and
        # numbers it 0.
        if not os.access(device, os.R_OK | os.W_OK):
            continue
        address = path.parent.name
        own_id = lines.get("GPU UUID", "?")
        # "GPU-????????-…" until a process opens it, without persistence mode
        if "?" in own_id:
            own_id = address
        id_in_job = own_id
        slices = driver.glob(f"capabilities/gpu{minor}/mig/gi*")
        if any(slices):
            id_in_job = ""
        yield _Nvidia(own_id, address, id_in_job)


def text_of(path: Path) -> str:
    """A file of a driver; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def amd_addresses(root: Path) -> dict[str, str]:
    """The PCI address of each accelerator of AMD, by its id, in the order of the topology's nodes."""
    found: dict[str, str] = {}
    nodes = (root / _TOPOLOGY).glob("[0-9]*/properties")
    by_number = sorted(nodes, key=lambda path: int(path.parent.name))
    for path in by_number:
        # simd_count 304
        # unique_id 9223372036854775810
        # domain 0
        # location_id 15104
        # Empty for a device outside the control group: EPERM, in Linux's kfd_topology.c
        lines = re.findall(r"^(\S+) +([0-9]+)\s*$", text_of(path), re.MULTILINE)
        properties = {}
        for name, value in lines:
            properties[name] = int(value)
        if not properties.get("simd_count"):  # a CPU
            continue
        address = _pci_address(properties)
        unique = properties.get("unique_id", 0)
        own_id = f"GPU-{unique:016x}"
        # 0 where the device has none; partitions of a device may share it
        if unique == 0 or own_id in found:
            own_id = f"kfd{path.parent.name}"
        found[own_id] = address
    return found


def _pci_address(properties: Mapping[str, int]) -> str:
    """Linux's kfd_topology.c: bus, device and function are in one number."""
    domain = properties.get("domain", 0)
    place = properties.get("location_id", 0)
    bus = place >> 8
    device = place >> 3 & 0x1F
    return f"{domain:04x}:{bus:02x}:{device:02x}.{place & 7}"


def chosen(ids: list[str], choice: str | None) -> list[str]:
    """The ids that a visibility variable leaves.

    Its words are indices or ids, which may be shortened. The first word that is neither ends the
    list.
    """
    if choice is None:
        return ids
    found = []
    words = map(str.strip, choice.split(","))
    for word in words:
        index = digits(word)
        if word.startswith(("GPU-", "MIG-")):
            full_id = _full_id(ids, word)
            found.append(full_id)
        elif index is not None and index < len(ids):
            found.append(ids[index])
        else:
            break
    return found


def _full_id(ids: list[str], beginning: str) -> str:
    """The id that begins so; the word itself if it is not known, as before a GPU is opened."""
    for known in ids:
        if known.startswith(beginning):
            return known
    return beginning
