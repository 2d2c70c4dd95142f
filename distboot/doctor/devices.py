"""Accelerators of the host, and whether they got into the container."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .finding import Finding, ok, problem, warning
from .machine import Machine
from .torch_build import torch_build


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of accelerator.

    Attributes:
        title: what people call one.
        vendor: of its PCI devices (The PCI ID Repository).
        classes: beginnings of the classes of its PCI devices: display controllers and processing accelerators.
        files: patterns of its device files, all of which are needed; those of the first are the devices, or stand for
            them.
        build: what torch is built for where it can use it, a key of `TorchBuild.targets`.
        docker: options of `docker run` that give them to a container.
        resource: name of one in a pod's limits.
        apptainer: options of `apptainer exec`; empty where there are none.
    """

    title: str
    vendor: str
    classes: tuple[str, ...]
    files: tuple[str, ...]
    build: str
    docker: str
    resource: str
    apptainer: str = ""


_NVIDIA_FILES = ("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/nvidia-uvm")
_AMD_FILES, _AMD_OPTIONS = ("dev/kfd", "dev/dri/renderD*"), "--device=/dev/kfd --device=/dev/dri"
_GAUDI_OPTIONS = "--runtime=habana -e HABANA_VISIBLE_DEVICES=all"

# From NVIDIA's Container Toolkit, AMD's "Running ROCm Docker containers", Habana's "Docker Installation" and the device
# plugins for Kubernetes of the four. The first number of a class is 03 for display controllers, 12 for accelerators.
KINDS = (
    Kind("NVIDIA GPU", "0x10de", ("0x0300", "0x0302"), _NVIDIA_FILES, "cuda", "--gpus all", "nvidia.com/gpu", "--nv"),
    Kind("AMD GPU", "0x1002", ("0x0380", "0x1200"), _AMD_FILES, "hip", _AMD_OPTIONS, "amd.com/gpu", "--rocm"),
    Kind("Gaudi accelerator", "0x1da3", ("0x1200",), ("dev/accel/accel*",), "hpu", _GAUDI_OPTIONS, "habana.ai/gaudi"),
    Kind(
        "Intel GPU", "0x8086", ("0x0300", "0x0380"), ("dev/dri/renderD*",), "xpu", "--device=/dev/dri",
        "gpu.intel.com/i915",
    ),
)  # fmt: skip


def accelerators(machine: Machine) -> Iterator[Finding]:
    """Accelerators that this host has, kind by kind."""
    there = _on_this_host(machine)
    # A sandbox may hide the bus; the files of the other two kinds may be those of other devices.
    here = [kind for kind in KINDS if there[kind.title] or (kind in KINDS[:2] and _files(machine, kind)[0])]
    found = [_of_kind(machine, kind, there[kind.title]) for kind in here]
    yield from found or [ok("accelerators", "none")]


def _on_this_host(machine: Machine) -> Counter[str]:
    """How many of each kind are on the PCI bus, which every container sees, by title."""
    found: Counter[str] = Counter()
    for device in machine.names("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{device}"
        vendor = machine.text(f"{folder}/vendor")
        kind = next((kind for kind in KINDS if kind.vendor == vendor), None)
        if kind is not None and machine.text(f"{folder}/class").startswith(kind.classes):
            found[kind.title] += 1
    return found


def _files(machine: Machine, kind: Kind) -> list[list[str]]:
    return [machine.matching(pattern) for pattern in kind.files]


def _of_kind(machine: Machine, kind: Kind, count: int) -> Finding:
    name, files = "accelerators", _files(machine, kind)
    said = f"{count} {kind.title}{'s' if count > 1 else ''}" if count else f"{kind.title}s"
    missing = next((pattern for pattern, matching in zip(kind.files, files, strict=True) if not matching), None)
    if missing is not None:
        return _not_here(machine, kind, f"{said} on this host, and no /{missing} here", count)
    if not any(machine.may_open(machine.root / file) for file in files[0]):
        group = (machine.root / files[0][0]).stat().st_gid
        remedy = machine.how(
            f"--group-add {group}",
            f"securityContext: {{supplementalGroups: [{group}]}}",
            f"usermod -aG {group} USER, and log in again",
        )
        return problem(name, f"{said} on this host, and this user may not open /{files[0][0]}", remedy)
    here = len(files[0])
    return ok(name, f"{here} of the {said} of this host" if kind is KINDS[0] and 0 < here < count else said)


def _not_here(machine: Machine, kind: Kind, seen: str, count: int) -> Finding:
    name, build = "accelerators", torch_build(machine)
    if build is not None and kind.build not in build.targets:
        return ok(name, f"{seen}; torch {build.version} is not built for them anyway")
    if machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and kind.build in ("cuda", "hip"):
        return ok(name, f"{seen}; CUDA_VISIBLE_DEVICES hides them anyway")
    pod = f"containers: [{{resources: {{limits: {{{kind.resource}: {count}}}}}}}]"
    remedy = machine.how(kind.docker, pod, "install its driver, or load it: see dmesg")
    if machine.container() == "apptainer" and kind.apptainer:
        remedy = f"apptainer exec {kind.apptainer}"
    # Without torch it may be that nobody wants them.
    return (warning if build is None else problem)(name, seen, remedy)
