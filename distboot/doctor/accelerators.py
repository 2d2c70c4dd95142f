"""Accelerators: on the host, in the container, in what is visible, and in what torch was built for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..host import accelerators as of_host
from ..text import counted, short_repr
from . import Check, Finding, Machine, ok, problem, unknown, warning

_HIP = "HIP_VISIBLE_DEVICES"
# The oldest driver for each major version of CUDA: NVIDIA's CUDA Compatibility, "Minor Version Compatibility".
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
# Of the same document: forward compatibility, for data-center GPUs
_COMPATIBLE = "usr/local/cuda/compat/libcuda.so*"
_TARGETS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU", "hpu": "Gaudi"}
_HOW = "pytorch.org, Get started, names the builds"


class Kind(NamedTuple):
    """One kind of accelerator."""

    title: str  # what people call one
    vendor: str  # of its PCI devices (The PCI ID Repository)
    # Beginnings of the classes of its PCI devices: display controllers and processing accelerators.
    classes: tuple[str, ...]
    # Patterns of its device files, all of which are needed; those of the first stand for the devices.
    files: tuple[str, ...]
    build: str  # what torch is built for where it can use it, a key of `_TARGETS`
    docker: str  # options of `docker run` that give them to a container
    resource: str  # name of one in a pod's limits
    apptainer: str = ""  # options of `apptainer exec`, or empty


_NVIDIA_FILES = ("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/nvidia-uvm")
_AMD_FILES, _AMD_OPTIONS = ("dev/kfd", "dev/dri/renderD*"), "--device=/dev/kfd --device=/dev/dri"
_INTEL_FILES, _GAUDI_FILES = ("dev/dri/renderD*",), ("dev/accel/accel*",)
_GAUDI_OPTIONS = "--runtime=habana -e HABANA_VISIBLE_DEVICES=all"

# From NVIDIA's Container Toolkit, AMD's "Running ROCm Docker containers", Habana's "Docker Installation" and the device
# plugins for Kubernetes of the four. The first number of a class is 03 for display controllers, 12 for accelerators.
KINDS = (
    Kind(
        "NVIDIA GPU",
        "0x10de",
        ("0x0300", "0x0302"),
        _NVIDIA_FILES,
        "cuda",
        "--gpus all",
        "nvidia.com/gpu",
        "--nv",
    ),
    Kind(
        "AMD GPU",
        "0x1002",
        ("0x0380", "0x1200"),
        _AMD_FILES,
        "hip",
        _AMD_OPTIONS,
        "amd.com/gpu",
        "--rocm",
    ),
    Kind(
        "Gaudi accelerator",
        "0x1da3",
        ("0x1200",),
        _GAUDI_FILES,
        "hpu",
        _GAUDI_OPTIONS,
        "habana.ai/gaudi",
    ),
    Kind(
        "Intel GPU",
        "0x8086",
        ("0x0300", "0x0380"),
        _INTEL_FILES,
        "xpu",
        "--device=/dev/dri",
        "gpu.intel.com/i915",
    ),
)


def torch_build(machine: Machine) -> tuple[str, dict[str, str]] | None:
    """The version of the torch that Python would import, and for what it was built: a key of `_TARGETS`, its version.

    Its files are read, it is not imported; they do not tell the version of "hpu".
    """
    for folder in machine.packages:
        # cuda: Optional[str] = '12.6'
        text = machine.text(str(Path(folder, "torch/version.py")))
        values = dict(re.findall(r"^(\w+)[^=\n]*= '([^']*)'$", text, re.MULTILINE))
        if "__version__" in values:
            targets = {name: values[name] for name in ("cuda", "hip", "xpu") if name in values}
            if machine.has(str(Path(folder, "habana_frameworks"))):
                targets["hpu"] = ""
            return values["__version__"], targets
    return None


def accelerators(machine: Machine) -> list[Finding]:
    """Accelerators that this host has, kind by kind."""
    found, devices = [], machine.pci_devices()
    for kind in KINDS:
        count = sum(
            vendor == kind.vendor and its.startswith(kind.classes) for vendor, its in devices
        )
        # A sandbox may hide the bus; the files of the other two kinds may be those of other devices.
        if count or (kind in KINDS[:2] and machine.matching(kind.files[0])):
            found.append(_of_kind(machine, kind, count))
    return found or [ok("none")]


def _of_kind(machine: Machine, kind: Kind, count: int) -> Finding:
    files = [machine.matching(pattern) for pattern in kind.files]
    listed = counted(count, kind.title) if count else f"{kind.title}s"
    missing = next(
        (pattern for pattern, matching in zip(kind.files, files, strict=True) if not matching), None
    )
    if missing is not None:
        return _not_here(machine, kind, f"{listed} on this host, and no /{missing} here", count)
    if not any(machine.may_open(machine.root / file) for file in files[0]):
        group = (machine.root / files[0][0]).stat().st_gid
        pod = f"securityContext: {{supplementalGroups: [{group}]}}"
        remedy = machine.how(
            f"--group-add {group}", pod, f"usermod -aG {group} USER, and log in again"
        )
        return problem(f"{listed} on this host, and this user may not open /{files[0][0]}", remedy)
    here = len(files[0])
    return ok(
        f"{here} of the {listed} of this host" if kind is KINDS[0] and 0 < here < count else listed
    )


def _not_here(machine: Machine, kind: Kind, seen: str, count: int) -> Finding:
    build = torch_build(machine)
    if build is not None and kind.build not in build[1]:
        return ok(f"{seen}; torch {build[0]} is not built for them anyway")
    if machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and kind.build in ("cuda", "hip"):
        return ok(f"{seen}; CUDA_VISIBLE_DEVICES hides them anyway")
    pod = f"containers: [{{resources: {{limits: {{{kind.resource}: {count}}}}}}}]"
    apptainer = kind.apptainer and f"apptainer exec {kind.apptainer}"
    remedy = machine.how(
        kind.docker, pod, "install its driver, or load it: see dmesg", apptainer=apptainer
    )
    # Without torch they may not be wanted.
    return (warning if build is None else problem)(seen, remedy)


def visible_devices(machine: Machine) -> Finding:
    """Whether the visibility variables, in all their forms, name what is here, and leave enough of it."""
    environ = machine.environ
    everything, left = (of_host.visible(each, machine.root) for each in ({}, environ))
    variables = [variable for variable in _variables(machine) if variable in environ]
    given = " and ".join(f"{variable}={short_repr(environ[variable])}" for variable in variables)
    if not everything:
        return ok(f"{given}, and no device here whose id is known" if given else "none")
    if not variables:
        return _enough(machine, left, f"all {len(everything)}")
    mig = [each for each in left if each.startswith("MIG-")]
    if len(mig) > 1:
        return warning(
            f"{given}: CUDA shows a process the first MIG device only", "show each rank one of them"
        )
    if mig:
        return unknown(
            f"{given}: only the driver's library could say whether this host has such a MIG device"
        )
    if fault := _first_fault(environ, variables, everything):
        return problem(
            f"{fault}: {len(left)} of the {len(everything)} here are left",
            f"fix or unset {variables[0]}",
        )
    if not left:
        return warning(
            f"{given} hides all {len(everything)}: the job trains on the CPU",
            f"unset {variables[0]}",
        )
    return _enough(machine, left, f"{given}: {len(left)} of {len(everything)}")


def _variables(machine: Machine) -> tuple[str, ...]:
    """The variables that count for what is here, in the order in which they do."""
    if machine.matching("proc/driver/nvidia/gpus/*"):
        return ("CUDA_VISIBLE_DEVICES",)
    if of_host.visible({}, machine.root):  # AMD's; CUDA's variable counts where HIP's is not set
        return ("ROCR_VISIBLE_DEVICES", _HIP if _HIP in machine.environ else "CUDA_VISIBLE_DEVICES")
    return of_host.VISIBILITY


def _first_fault(
    environ: Mapping[str, str], variables: Sequence[str], everything: list[str]
) -> str | None:
    known = everything
    for variable in variables:
        if fault := _fault(environ[variable], known):
            return f"{variable}={short_repr(environ[variable])}, and {fault}"
        known = of_host.chosen(known, environ[variable])  # HIP counts what ROCm leaves
    return None


def _fault(choice: str, everything: list[str]) -> str | None:
    """The first word of a choice that names no device; what follows it is not visible either, in CUDA as in HIP."""
    words, chosen = [word.strip() for word in choice.split(",")], of_host.chosen(everything, choice)
    if words[0] in ("", "-1", "NoDevFiles", "none", "void"):  # the ways to hide all of them
        return None
    for index, word in enumerate(words):
        if index >= len(chosen) or chosen[index] not in everything:
            is_index = word.isascii() and word.isdecimal()
            return (
                f"there is no device {word}"
                if is_index
                else f"no device here is called {short_repr(word)}"
            )
        if word in words[:index]:
            return f"it names {word} twice"
    return None


def _enough(machine: Machine, left: list[str], seen: str) -> Finding:
    """Whether each local rank gets one."""
    ranks = machine.placement().local_world_size
    if ranks is not None and of_host.own_index(len(left), machine.environ, ranks - 1) is None:
        remedy = f"start {len(left)} per node, or show each rank all of the node's accelerators"
        return problem(f"{seen}; {ranks} ranks are on this node", remedy)
    return ok(seen)


def driver(machine: Machine) -> Finding:
    """The driver of the host against the CUDA of the image; and a build for something else than what is here."""
    build, version = torch_build(machine), of_host.nvidia_driver(machine.root)
    has_nvidia, has_amd = bool(machine.matching("dev/nvidia[0-9]*")), machine.has("dev/kfd")
    if build is None:
        return ok(
            f"NVIDIA driver {version}; no torch is installed"
            if version
            else "no torch is installed"
        )
    torch, targets = f"torch {build[0]}", build[1]
    if not targets:
        if not (has_nvidia or has_amd):
            return ok(f"{torch}, for the CPU")
        seen = f"{torch} is built for the CPU only, and there are {'NVIDIA' if has_nvidia else 'AMD'} GPUs here"
        return warning(seen, f"install a build for {'CUDA' if has_nvidia else 'ROCm'}: {_HOW}")
    if "cuda" in targets and has_amd and not has_nvidia:
        return problem(
            f"{torch} is built for CUDA, and there are AMD GPUs here", f"install ROCm's: {_HOW}"
        )
    if "hip" in targets and has_nvidia and not has_amd:
        return problem(
            f"{torch} is built for ROCm, and there are NVIDIA GPUs here", f"install CUDA's: {_HOW}"
        )
    if "cuda" in targets and version:
        return _against_cuda(
            machine, f"{torch} for CUDA {targets['cuda']}", targets["cuda"], version
        )
    listed = ", ".join(f"{_TARGETS[target]} {its}".rstrip() for target, its in targets.items())
    return ok(f"{torch} for {listed}")


def _against_cuda(machine: Machine, torch: str, cuda: str, version: str) -> Finding:
    oldest = _OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
    if int(version.partition(".")[0]) >= oldest:
        return ok(f"{torch}, NVIDIA driver {version}")
    seen = f"{torch} needs NVIDIA driver {oldest} or newer, and this host has {version}"
    if machine.matching(_COMPATIBLE):
        return warning(
            f"{seen}; the image has CUDA's compatibility library", "works on data-center GPUs only"
        )
    return problem(seen, f"a newer driver on the host, or a torch for an older CUDA: {_HOW}")


ON_LINUX: tuple[Check, ...] = (accelerators, visible_devices, driver)
