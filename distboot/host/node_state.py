"""What this node has to offer a job, for a comparison with other nodes."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from typing import NamedTuple

from ..base.process import started
from ..base.units import UNLIMITED, size
from . import amd_gpu, cpus, nvidia_smi
from .accelerators import has_nvidia_smi
from .command_line import short_command
from .device import Device, Holder

# What a driver may hold for itself: bytes, and a part of the memory
_MUCH = 1 << 29
_SMALL_PART = 10
_LIMIT = 2.5  # seconds for the driver to answer
_MPS_SERVER = "nvidia-cuda-mps-server"  # serves the processes of all jobs, with CUDA's MPS
# Seconds: the ranks of one node start within a moment, so what is older is not of this job
_OLDER = 10.0


class NodeState(NamedTuple):
    """What was seen."""

    amounts: dict[str, float]  # bytes, or a number of things, by name
    names: dict[str, str]  # what should be the same on all nodes
    problems: list[str]  # what is wrong by itself


def look(pid: int, *, is_rank: bool) -> NodeState:
    """Look at this node.

    Args:
        pid: a process of the job here, with which the ranks of this node have started.
        is_rank: whether the ranks run: memory of an accelerator without a visible owner may be
            theirs.
    """
    found = NodeState(
        amounts={},
        names={},
        problems=[],
    )
    for name, measure in _AMOUNTS.items():
        with suppress(OSError, ValueError, KeyError):
            found.amounts[name] = float(measure())
    try:
        accelerators = _Accelerators(pid, is_rank=is_rank)
        accelerators.describe(found)
    except nvidia_smi.DriverHangs as error:
        found.problems.append(str(error))
    return found


def _available_memory() -> float:
    # MemAvailable:   16318456 kB
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = file.read().splitlines()
    table = dict(line.split(":") for line in lines)
    kibibytes, _ = table["MemAvailable"].split()
    return float(kibibytes) * 1024


def _free(folder: str) -> float:
    found = os.statvfs(folder)
    return float(found.f_bavail * found.f_frsize)


def _locked_memory() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    known = {resource.RLIM_INFINITY: UNLIMITED}
    return known.get(soft, float(soft))


def _cpus() -> float:
    """CPUs of the node that its ranks may use, within the quota of its cgroup."""
    limits = filter(None, (cpus.of_all(), cpus.quota()))
    return min(limits)


_AMOUNTS: dict[str, Callable[[], float]] = {
    "free memory": _available_memory,
    "free space in /dev/shm": partial(_free, "/dev/shm"),  # noqa: S108 - nothing is written there
    "free space in the work folder": partial(_free, "."),
    "memory that may be locked": _locked_memory,
    "CPUs": _cpus,
}


class _Accelerators:
    """The accelerators of this node, and the processes that use them."""

    def __init__(self, pid: int, *, is_rank: bool) -> None:
        self._devices = amd_gpu.devices()
        self._by_device: defaultdict[str, list[Holder]] = defaultdict(list)
        if has_nvidia_smi():
            self._ask_nvidia()
        self._is_rank = is_rank
        # What began before that is not of this job; 0.0 is when the host was started
        self._oldest = (started(pid) or 0.0) - _OLDER

    def _ask_nvidia(self) -> None:
        end = time.monotonic() + _LIMIT
        self._devices += nvidia_smi.devices(_LIMIT)
        for holder in nvidia_smi.holders(end - time.monotonic()):
            self._by_device[holder.uuid].append(holder)

    def describe(self, found: NodeState) -> None:
        """Add what is known of them."""
        if not self._devices:
            return
        kinds: list[str] = []
        for device in self._devices:
            kind = f"{device.name} ({size(device.memory)})"
            kinds.append(kind)
            for problem in self._problems_of(device):
                text = f"accelerator {device.number} {problem}"
                found.problems.append(text)
        counts = Counter(kinds)
        listed = [f"{count} x {kind}" for kind, count in counts.items()]
        found.names["accelerators"] = ", ".join(listed)

    def _problems_of(self, device: Device) -> Iterator[str]:
        yield from device.faults
        own = self._by_device[device.uuid]
        used = f"has {size(device.used)} of {size(device.memory)} in use"
        for holder in filter(self._is_older, own):
            command = short_command(holder.pid)
            whose = f"process {holder.pid} ({command})"
            if _MPS_SERVER not in command:
                yield f"{used}, {size(holder.memory)} by {whose}"
        for_itself = max(
            _MUCH,
            device.memory // _SMALL_PART,
        )
        has_unknown_owner = not self._is_rank and not own
        if has_unknown_owner and device.used > for_itself:
            yield f"{used}, by no process that is visible here"

    def _is_older(self, holder: Holder) -> bool:
        """Whether a process began well before this job."""
        began = started(holder.pid) or inf
        return began < self._oldest
