"""Check of torch's build: whether it is for the GPUs that are here, and for their driver."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...base.patterns import pattern
from ...base.table import first_that_holds
from ...host import accelerators as host_accelerators
from .finding import (
    Finding,
    ok,
    problem,
    warning,
)
from .machine import Machine

# The oldest driver for each major version of CUDA: NVIDIA's CUDA Compatibility, "Minor Version
# Compatibility".
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
# Of the same document: forward compatibility, for data-center GPUs
_COMPATIBLE = "usr/local/cuda/compat/libcuda.so*"
_BUILDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU", "hpu": "Gaudi"}
_WITH_VERSION = ("cuda", "hip", "xpu")  # those that torch/version.py has
_WRONG_GPUS = {"cuda": "AMD", "hip": "NVIDIA"}  # where there are no others
_NEEDED_BUILD = {"NVIDIA": "CUDA", "AMD": "ROCm"}
_FILES_OF_VENDOR = {"NVIDIA": "dev/nvidia[0-9]*", "AMD": "dev/kfd"}
_WHERE = "pytorch.org, Get started, lists the builds"
# cuda: Optional[str] = '12.6'
_ASSIGNMENT = pattern(r"^(\w+)[^=\n]*= '([^']*)'$", re.MULTILINE)


class TorchBuild(NamedTuple):
    """The torch that Python would import. Its files are read, it is not imported."""

    version: str
    # The version by key of `_BUILDS`, empty for "hpu"; no key: for the CPU only
    targets: dict[str, str]

    @property
    def name(self) -> str:
        return f"torch {self.version}"

    @property
    def listed_targets(self) -> str:
        """`"CUDA 12.6, Gaudi"`."""
        words = []
        for name, version in self.targets.items():
            title = _BUILDS[name]
            words.append(f"{title} {version}".rstrip())
        return ", ".join(words)


def torch_build(machine: Machine) -> TorchBuild | None:
    """None if no torch is installed."""
    for folder in machine.packages:
        path = Path(folder, "torch/version.py")
        text = machine.text(str(path))
        values = dict(_ASSIGNMENT.findall(text))
        version = values.get("__version__")
        if version is None:
            continue
        targets = {name: values[name] for name in filter(values.__contains__, _WITH_VERSION)}
        gaudi = Path(folder, "habana_frameworks")
        if machine.has(str(gaudi)):
            targets["hpu"] = ""
        return TorchBuild(version, targets)
    return None


def driver(machine: Machine) -> Finding:
    """Whether torch is built for the GPUs that are here, and for their driver."""
    version = host_accelerators.nvidia_driver(machine.root)
    build = torch_build(machine)
    if build is None:
        return _no_torch(version)
    vendors = _gpu_vendors(machine)
    if not build.targets:
        return _cpu_build(build, vendors)
    wrong = _wrong_build(build, vendors)
    if wrong is not None:
        return wrong
    if "cuda" in build.targets and version is not None:
        return _cuda_build(machine, build, version)
    return ok(f"{build.name} for {build.listed_targets}")


def _no_torch(driver_version: str | None) -> Finding:
    seen = "no torch is installed"
    if driver_version is not None:
        seen = f"NVIDIA driver {driver_version}; {seen}"
    return ok(seen)


def _gpu_vendors(machine: Machine) -> list[str]:
    """The vendors of the GPUs in this container: NVIDIA, AMD, both or none."""
    return [vendor for vendor, files in _FILES_OF_VENDOR.items() if machine.matching(files)]


def _cpu_build(build: TorchBuild, vendors: list[str]) -> Finding:
    if not vendors:
        return ok(f"{build.name}, for the CPU")
    vendor = vendors[0]
    seen = f"{build.name} is built for the CPU only, but {vendor} GPUs are here"
    remedy = f"install a build for {_NEEDED_BUILD[vendor]}: {_WHERE}"
    return warning(seen, remedy)


def _wrong_build(build: TorchBuild, vendors: list[str]) -> Finding | None:
    """A problem if torch is built for the GPUs of one vendor, and the other's are here."""
    for target, vendor in _WRONG_GPUS.items():
        has_only_others = vendors == [vendor]
        if target in build.targets and has_only_others:
            seen = f"{build.name} is built for {_BUILDS[target]}, but the GPUs here are {vendor}'s"
            remedy = f"install the build for {_NEEDED_BUILD[vendor]}: {_WHERE}"
            return problem(seen, remedy)
    return None


def _cuda_build(machine: Machine, build: TorchBuild, driver_version: str) -> Finding:
    cuda = build.targets["cuda"]
    oldest = _OLDEST_DRIVER.get(_major(cuda), 0)
    is_new_enough = int(_major(driver_version)) >= oldest
    seen = (
        f"{build.name} for CUDA {cuda} needs NVIDIA driver {oldest} or newer, "
        f"but this host has {driver_version}"
    )
    compatible = f"{seen}; the image has CUDA's compatibility library"
    newer = f"a newer driver on the host, or a torch for an older CUDA: {_WHERE}"
    return first_that_holds(
        (is_new_enough, ok(f"{build.name} for CUDA {cuda}, NVIDIA driver {driver_version}")),
        (
            machine.matching(_COMPATIBLE) != [],
            warning(compatible, "works on data-center GPUs only"),
        ),
        (True, problem(seen, newer)),
    )


def _major(version: str) -> str:
    return version.partition(".")[0]
