"""Checks of accelerators: of the host, of the container, the visible ones, and torch's build."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...base.text import counted, short_repr
from ...host import accelerators as host_accelerators
from .finding import (
    Finding,
    ok,
    problem,
    problem_if,
    unknown,
    warning,
)
from .machine import Machine

_CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
_ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
_HIDE_ALL = ("", "-1", "NoDevFiles", "none", "void")  # first words of a choice that names no device

# The oldest driver for each major version of CUDA: NVIDIA's CUDA Compatibility, "Minor Version
# Compatibility".
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
# Of the same document: forward compatibility, for data-center GPUs
_COMPATIBLE = "usr/local/cuda/compat/libcuda.so*"
_BUILDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU", "hpu": "Gaudi"}
_WRONG_GPUS = {"cuda": "AMD", "hip": "NVIDIA"}  # where there are no others
_NEEDED_BUILD = {"NVIDIA": "CUDA", "AMD": "ROCm"}
_WHERE = "pytorch.org, Get started, lists the builds"


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
    has_file_for_each: bool = (
        False  # whether each device has one file that matches the first pattern
    )


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


class TorchBuild(NamedTuple):
    """The torch that Python would import. Its files are read, it is not imported."""

    version: str
    targets: dict[
        str, str
    ]  # key of `_BUILDS` -> version, empty for "hpu"; no key: for the CPU only


def torch_build(machine: Machine) -> TorchBuild | None:
    """None if no torch is installed."""
    for folder in machine.packages:
        # cuda: Optional[str] = '12.6'
        text = machine.text(str(Path(folder, "torch/version.py")))
        values = dict(re.findall(r"^(\w+)[^=\n]*= '([^']*)'$", text, re.MULTILINE))
        if "__version__" not in values:
            continue
        targets = {name: values[name] for name in ("cuda", "hip", "xpu") if name in values}
        if machine.has(str(Path(folder, "habana_frameworks"))):
            targets["hpu"] = ""
        return TorchBuild(values["__version__"], targets)
    return None


def accelerators(machine: Machine) -> list[Finding]:
    """Accelerators of this host, kind by kind, and whether this container has them."""
    found = []
    devices = machine.pci_devices()
    for kind in KINDS:
        count = _count(kind, devices)
        if count or (kind.has_own_files and machine.matching(kind.files[0])):
            found.append(_check_kind(machine, kind, count))
    if not found:
        return [ok("none")]
    return found


def _count(kind: Kind, devices: list[tuple[str, str]]) -> int:
    count = 0
    for vendor, device_class in devices:
        if vendor == kind.vendor and device_class.startswith(kind.classes):
            count += 1
    return count


def _check_kind(machine: Machine, kind: Kind, count: int) -> Finding:
    listed = counted(count, kind.title) if count else f"{kind.title}s"
    for pattern in kind.files:
        if not machine.matching(pattern):
            seen = f"{listed} on this host, but no /{pattern} here"
            return _not_in_container(machine, kind, seen, count)
    files = machine.matching(kind.files[0])
    if not any(machine.may_open(machine.root / file) for file in files):
        return _not_permitted(machine, listed, files[0])
    if kind.has_file_for_each and len(files) < count:
        return ok(f"{len(files)} of the {listed} of this host")
    return ok(listed)


def _not_in_container(machine: Machine, kind: Kind, seen: str, count: int) -> Finding:
    build = torch_build(machine)
    if build is not None and kind.build not in build.targets:
        return ok(f"{seen}; torch {build.version} is not built for them anyway")
    hides_all = machine.environ.get(_CUDA_VISIBLE) in ("", "-1")
    if hides_all and kind.build in ("cuda", "hip"):
        return ok(f"{seen}; CUDA_VISIBLE_DEVICES hides them anyway")
    others = {}
    if kind.apptainer:
        others["apptainer"] = f"apptainer exec {kind.apptainer}"
    remedy = machine.remedy(
        kind.docker,
        f"containers: [{{resources: {{limits: {{{kind.resource}: {max(count, 1)}}}}}}}]",
        "install its driver, or load it: see dmesg",
        **others,
    )
    # Without torch the job may not need them.
    return problem_if(build is not None, seen, remedy)


def _not_permitted(machine: Machine, listed: str, file: str) -> Finding:
    group = (machine.root / file).stat().st_gid
    remedy = machine.remedy(
        f"--group-add {group}",
        f"securityContext: {{supplementalGroups: [{group}]}}",
        f"usermod -aG {group} USER, and log in again",
    )
    return problem(f"{listed} on this host, but this user may not open /{file}", remedy)


def visible_devices(machine: Machine) -> Finding:
    """Whether the visibility variables name devices that are here, and leave enough of them."""
    devices = host_accelerators.visible({}, machine.root)
    choices = {}
    for variable in _variables(machine):
        if variable in machine.environ:
            choices[variable] = machine.environ[variable]
    if devices and choices:
        return _chosen_devices(machine, devices, choices)
    if devices:
        return _enough(machine, devices, f"all {len(devices)}")
    if choices:
        return ok(f"{_listed(choices)}, but no device with a known id is here")
    return ok("none")


def _chosen_devices(machine: Machine, devices: list[str], choices: Mapping[str, str]) -> Finding:
    given = _listed(choices)
    first = next(iter(choices))
    left = host_accelerators.visible(machine.environ, machine.root)
    mig = sum(device.startswith("MIG-") for device in left)
    if mig:
        return _mig(given, mig)
    invalid = _first_invalid(choices, devices)
    if invalid is not None:
        seen = f"{invalid}: {len(left)} of the {len(devices)} here are left"
        return problem(seen, f"fix or unset {first}")
    if not left:
        seen = f"{given} hides all {len(devices)}: the job trains on the CPU"
        return warning(seen, f"unset {first}")
    return _enough(machine, left, f"{given}: {len(left)} of {len(devices)}")


def _listed(choices: Mapping[str, str]) -> str:
    """`"ROCR_VISIBLE_DEVICES='4,5' and HIP_VISIBLE_DEVICES='1'"`."""
    return " and ".join(f"{name}={short_repr(choice)}" for name, choice in choices.items())


def _variables(machine: Machine) -> tuple[str, ...]:
    """The visibility variables that apply to the devices here, in the order of their effect."""
    if machine.matching("proc/driver/nvidia/gpus/*"):
        return (_CUDA_VISIBLE,)
    if not host_accelerators.visible({}, machine.root):
        return host_accelerators.VISIBILITY
    # AMD's: CUDA's variable applies where HIP's is not set.
    if _HIP_VISIBLE in machine.environ:
        return (_ROCR_VISIBLE, _HIP_VISIBLE)
    return (_ROCR_VISIBLE, _CUDA_VISIBLE)


def _mig(given: str, count: int) -> Finding:
    if count > 1:
        seen = f"{given}: CUDA shows a process the first MIG device only"
        return warning(seen, "show each rank one of them")
    seen = "only the driver's library could tell whether this host has such a MIG device"
    return unknown(f"{given}: {seen}")


def _first_invalid(choices: Mapping[str, str], devices: list[str]) -> str | None:
    """The first variable that names a device that is not here."""
    known = devices
    for variable, choice in choices.items():
        why = _why_invalid(choice, known)
        if why is not None:
            return f"{variable}={short_repr(choice)}, but {why}"
        known = host_accelerators.chosen(known, choice)  # HIP counts what ROCm leaves
    return None


def _why_invalid(choice: str, devices: list[str]) -> str | None:
    """The first word that names no device; CUDA and HIP ignore the words after it."""
    words = [word.strip() for word in choice.split(",")]
    if words[0] in _HIDE_ALL:
        return None
    chosen = host_accelerators.chosen(devices, choice)
    for index, word in enumerate(words):
        if index >= len(chosen) or chosen[index] not in devices:
            if word.isascii() and word.isdecimal():
                return f"there is no device {word}"
            return f"no device here is called {short_repr(word)}"
        if word in words[:index]:
            return f"it names {word} twice"
    return None


def _enough(machine: Machine, left: list[str], seen: str) -> Finding:
    """Whether each local rank gets a device."""
    ranks = machine.placement().local_world_size
    if ranks is None:
        return ok(seen)
    if host_accelerators.own_index(len(left), machine.environ, ranks - 1) is not None:
        return ok(seen)
    remedy = f"start {len(left)} per node, or show each rank all of the node's accelerators"
    return problem(f"{seen}; {ranks} ranks are on this node", remedy)


def driver(machine: Machine) -> Finding:
    """Whether torch is built for the GPUs that are here, and for their driver."""
    version = host_accelerators.nvidia_driver(machine.root)
    build = torch_build(machine)
    if build is None:
        if version is None:
            return ok("no torch is installed")
        return ok(f"NVIDIA driver {version}; no torch is installed")
    torch = f"torch {build.version}"
    vendors = _gpu_vendors(machine)
    if not build.targets:
        return _cpu_build(torch, vendors)
    for target, vendor in _WRONG_GPUS.items():
        if target in build.targets and vendors == [vendor]:
            seen = f"{torch} is built for {_BUILDS[target]}, but the GPUs here are {vendor}'s"
            return problem(seen, f"install the build for {_NEEDED_BUILD[vendor]}: {_WHERE}")
    if "cuda" in build.targets and version is not None:
        return _cuda_build(machine, torch, build.targets["cuda"], version)
    listed = [f"{_BUILDS[name]} {target}".rstrip() for name, target in build.targets.items()]
    return ok(f"{torch} for {', '.join(listed)}")


def _gpu_vendors(machine: Machine) -> list[str]:
    """The vendors of the GPUs in this container: NVIDIA, AMD, both or none."""
    found = []
    if machine.matching("dev/nvidia[0-9]*"):
        found.append("NVIDIA")
    if machine.has("dev/kfd"):
        found.append("AMD")
    return found


def _cpu_build(torch: str, vendors: list[str]) -> Finding:
    if not vendors:
        return ok(f"{torch}, for the CPU")
    seen = f"{torch} is built for the CPU only, but {vendors[0]} GPUs are here"
    return warning(seen, f"install a build for {_NEEDED_BUILD[vendors[0]]}: {_WHERE}")


def _cuda_build(machine: Machine, torch: str, cuda: str, version: str) -> Finding:
    oldest = _OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
    if int(version.partition(".")[0]) >= oldest:
        return ok(f"{torch} for CUDA {cuda}, NVIDIA driver {version}")
    seen = (
        f"{torch} for CUDA {cuda} needs NVIDIA driver {oldest} or newer, "
        f"but this host has {version}"
    )
    if machine.matching(_COMPATIBLE):
        seen += "; the image has CUDA's compatibility library"
        return warning(seen, "works on data-center GPUs only")
    return problem(seen, f"a newer driver on the host, or a torch for an older CUDA: {_WHERE}")
