"""Which accelerators this process may use, by ids that two processes can compare, before any framework is imported.

NVIDIA's driver lists its devices under /proc/driver/nvidia, AMD's under /sys/class/kfd. Other kinds are not known here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# What says which of them a process sees.
VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "HABANA_VISIBLE_MODULES",
)


def visible(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Ids in the order of the framework's index, for example "GPU-9a1c…"; empty where there are none, or none known."""
    found = _nvidia(root)
    if found:
        return chosen(found, environ.get("CUDA_VISIBLE_DEVICES"))
    found = chosen(_amd(root), environ.get("ROCR_VISIBLE_DEVICES"))
    return chosen(found, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))


def own_index(count: int, environ: Mapping[str, str], local_rank: int | None) -> int | None:
    """Which of so many visible ones a rank uses; None: there are too few, or its local rank is not known yet."""
    # A launcher that shows each process only its own (srun --gpus-per-task, say) numbers it 0 for all.
    if count == 1 and any(name in environ for name in VISIBILITY):
        return 0
    return local_rank if local_rank is not None and local_rank < count else None


def own(ids: list[str], environ: Mapping[str, str], local_rank: int | None) -> str | None:
    """The id of that one."""
    index = own_index(len(ids), environ, local_rank)
    return None if index is None else ids[index]


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """Version of NVIDIA's driver, for example "550.54.15"."""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    with suppress(OSError):
        version = re.search(
            r"\s(\d+\.\d+(\.\d+)?)\s", (root / "proc/driver/nvidia/version").read_text()
        )
        return version[1] if version else None
    return None


def has_intel_gpu(root: Path = Path("/")) -> bool:
    """Whether this host has a GPU of Intel, be it in its processor."""
    for path in (root / "sys/class/drm").glob("renderD*/device/vendor"):
        with suppress(OSError):
            if path.read_text().strip() == "0x8086":
                return True
    return False


def _nvidia(root: Path) -> list[str]:
    """In the order of the PCI bus, as CUDA numbers devices of one kind."""
    ids = []
    with suppress(OSError):
        for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
            # GPU UUID: 	 GPU-9a1c4b7e-…
            # Device Minor: 	 0
            lines = dict(
                re.findall(r"^(GPU UUID|Device Minor):\s*(\S+)\s*$", path.read_text(), re.MULTILINE)
            )
            device = root / f"dev/nvidia{lines.get('Device Minor', '')}"
            # /proc lists them all; with Slurm's ConstrainDevices a task may open its own only, and numbers it 0.
            if os.access(device, os.R_OK | os.W_OK):
                ids.append(lines.get("GPU UUID", path.parent.name))
    return ids


def _amd(root: Path) -> list[str]:
    ids = []
    with suppress(OSError, ValueError):
        nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
        for path in sorted(nodes, key=lambda path: int(path.parent.name)):
            properties = dict(
                line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line
            )
            if properties.get("simd_count", "0") != "0":  # the others are CPUs
                unique = int(properties.get("unique_id", "0"))  # 0 where the device has none
                ids.append(f"GPU-{unique:016x}" if unique else f"kfd{path.parent.name}")
    return ids


def chosen(found: list[str], choice: str | None) -> list[str]:
    """What a visibility variable leaves: indexes, or ids that may be shortened, up to the first that is neither."""
    if choice is None:
        return found
    ids = []
    for word in map(str.strip, choice.split(",")):
        if word.isdecimal() and word.isascii() and int(word) < len(found):
            ids.append(found[int(word)])
        elif word.startswith(("GPU-", "MIG-")):
            ids.append(next((known for known in found if known.startswith(word)), word))
        else:
            break
    return ids
