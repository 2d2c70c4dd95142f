"""Check of the accelerators of this host: whether this container has their device files.

Every container sees the devices on the PCI bus, but may lack the files to use them.
"""

from __future__ import annotations

from typing import NamedTuple

from ...base.text import counted
from .finding import (
    Finding,
    ok,
    problem,
    problem_if,
)
from .machine import Machine

_HIDES_ALL = ("", "-1")  # values of CUDA_VISIBLE_DEVICES, which ROCm reads as well
_HIDDEN_BUILDS = ("cuda", "hip")


class Kind(NamedTuple):
    """One kind of accelerator."""

    title: str
    vendor: str  # of its PCI devices (The PCI ID Repository)
    # Beginnings of the classes of its PCI devices: 03 are display controllers, 12 processing
    # accelerators
    classes: tuple[str, ...]
    files: tuple[str, ...]  # patterns of its device files, all of which are needed
    build: str  # what torch is built for where it can use it, a key of `_BUILDS`
    docker: str  # options of `docker run` that give them to a container
    resource: str  # name of one in a pod's limits
    apptainer: str = ""  # options of `apptainer exec`
    # Whether other devices never have the first of its files: then the files show it where a
    # sandbox hides the bus
    has_own_files: bool = False
    # Whether each device has one file that matches the first pattern
    has_file_for_each: bool = False


# From NVIDIA's Container Toolkit, AMD's "Running ROCm Docker containers", Habana's "Docker
# Installation" and the device plugins for Kubernetes of the four.
KINDS = (
    Kind(
        title="NVIDIA GPU",
        vendor="0x10de",
        classes=("0x0300", "0x0302"),
        files=("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/nvidia-uvm"),
        build="cuda",
        docker="--gpus all",
        resource="nvidia.com/gpu",
        apptainer="--nv",
        has_own_files=True,
        has_file_for_each=True,
    ),
    Kind(
        title="AMD GPU",
        vendor="0x1002",
        classes=("0x0380", "0x1200"),
        files=("dev/kfd", "dev/dri/renderD*"),
        build="hip",
        docker="--device=/dev/kfd --device=/dev/dri",
        resource="amd.com/gpu",
        apptainer="--rocm",
        has_own_files=True,
    ),
    Kind(
        title="Gaudi accelerator",
        vendor="0x1da3",
        classes=("0x1200",),
        files=("dev/accel/accel*",),
        build="hpu",
        docker="--runtime=habana -e HABANA_VISIBLE_DEVICES=all",
        resource="habana.ai/gaudi",
    ),
    Kind(
        title="Intel GPU",
        vendor="0x8086",
        classes=("0x0300", "0x0380"),
        files=("dev/dri/renderD*",),
        build="xpu",
        docker="--device=/dev/dri",
        resource="gpu.intel.com/i915",
    ),
)


def accelerators(machine: Machine) -> list[Finding]:
    """Accelerators of this host, kind by kind, and whether this container has them."""
    found = []
    devices = machine.pci_devices()
    for kind in KINDS:
        count = _count(kind, devices)
        if count or _has_own_file(machine, kind):
            finding = _check_kind(machine, kind, count)
            found.append(finding)
    if not found:
        return [ok("none")]
    return found


def _count(kind: Kind, devices: list[tuple[str, str]]) -> int:
    count = 0
    for vendor, device_class in devices:
        is_of_kind = device_class.startswith(kind.classes)
        if vendor == kind.vendor and is_of_kind:
            count += 1
    return count


def _has_own_file(machine: Machine, kind: Kind) -> bool:
    """Whether a file shows that the host has this kind."""
    if not kind.has_own_files:
        return False
    first = kind.files[0]
    found = machine.matching(first)
    return bool(found)


def _check_kind(machine: Machine, kind: Kind, count: int) -> Finding:
    listed = f"{kind.title}s"
    if count:
        listed = counted(count, kind.title)
    for pattern in kind.files:
        found = machine.matching(pattern)
        if not found:
            seen = f"{listed} on this host, but no /{pattern} here"
            return _not_in_container(machine, kind, seen, count)
    first_pattern = kind.files[0]
    files = machine.matching(first_pattern)
    paths = [machine.root / file for file in files]
    is_permitted = any(map(machine.may_open, paths))
    if not is_permitted:
        first = files[0]
        return _not_permitted(machine, listed, first)
    has_some = len(files) < count
    if kind.has_file_for_each and has_some:
        return ok(f"{len(files)} of the {listed} of this host")
    return ok(listed)


def _not_in_container(machine: Machine, kind: Kind, seen: str, count: int) -> Finding:
    from .torch_build import torch_build  # here, as most containers have the files

    build = torch_build(machine)
    has_torch = build is not None
    if build is not None and kind.build not in build.targets:
        return ok(f"{seen}; {build.name} is not built for them anyway")
    choice = machine.environ.get("CUDA_VISIBLE_DEVICES")
    hides_all = choice in _HIDES_ALL
    if hides_all and kind.build in _HIDDEN_BUILDS:
        return ok(f"{seen}; CUDA_VISIBLE_DEVICES hides them anyway")
    others = {}
    if kind.apptainer:
        others["apptainer"] = f"apptainer exec {kind.apptainer}"
    wanted = max(count, 1)
    limit = f"{kind.resource}: {wanted}"
    remedy = machine.remedy(
        kind.docker,
        f"containers: [{{resources: {{limits: {{{limit}}}}}}}]",
        "install its driver, or load it: see dmesg",
        **others,
    )
    # Without torch the job may not need them
    return problem_if(has_torch, seen, remedy)


def _not_permitted(machine: Machine, listed: str, file: str) -> Finding:
    path = machine.root / file
    group = path.stat().st_gid
    remedy = machine.remedy(
        f"--group-add {group}",
        f"securityContext: {{supplementalGroups: [{group}]}}",
        f"usermod -aG {group} USER, and log in again",
    )
    seen = f"{listed} on this host, but this user may not open /{file}"
    return problem(seen, remedy)
