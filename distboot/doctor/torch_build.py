"""What the installed torch was built for, against what is here. Its files are read; it is not imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..accelerators import nvidia_driver
from .finding import Finding, ok, problem, warning
from .machine import Machine

# The oldest driver for each major version of CUDA: NVIDIA's CUDA Compatibility, "Minor Version Compatibility".
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_COMPATIBLE = "usr/local/cuda/compat/libcuda.so*"  # of the same document: forward compatibility, for data-center GPUs
_NAMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU", "hpu": "Gaudi"}
_HOW = "pytorch.org, Get started, names the builds"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch/version.py says.

    Attributes:
        version: for example "2.13.0+cpu".
        targets: "cuda", "hip", "xpu" or "hpu" -> version, for what it is built for, for example {"cuda": "12.6"}; of
            "hpu" the version is not known.
    """

    version: str
    targets: dict[str, str]


def torch_build(machine: Machine) -> TorchBuild | None:
    """The build that Python would import; None if there is none."""
    for folder in machine.packages:
        # cuda: Optional[str] = '12.6'
        said = dict(
            re.findall(r"^(\w+)[^=\n]*= '([^']*)'$", machine.text(str(Path(folder, "torch/version.py"))), re.MULTILINE)
        )
        if "__version__" in said:
            targets = {name: said[name] for name in ("cuda", "hip", "xpu") if name in said}
            if machine.has(str(Path(folder, "habana_frameworks"))):
                targets["hpu"] = ""
            return TorchBuild(said["__version__"], targets)
    return None


def driver(machine: Machine) -> Iterator[Finding]:
    """The driver of the host against the CUDA of the image; and a build for something else than what is here."""
    name, build, version = "driver", torch_build(machine), nvidia_driver(machine.root)
    has_nvidia, has_amd = bool(machine.matching("dev/nvidia[0-9]*")), machine.has("dev/kfd")
    if build is None:
        yield ok(name, f"NVIDIA driver {version}; no torch is installed" if version else "no torch is installed")
        return
    said = f"torch {build.version}"
    if not build.targets:
        if has_nvidia or has_amd:
            seen = f"{said} is built for the CPU only, and there are {'NVIDIA' if has_nvidia else 'AMD'} GPUs here"
            yield warning(name, seen, f"install a build for {'CUDA' if has_nvidia else 'ROCm'}: {_HOW}")
        else:
            yield ok(name, f"{said}, for the CPU")
    elif "cuda" in build.targets and has_amd and not has_nvidia:
        yield problem(name, f"{said} is built for CUDA, and there are AMD GPUs here", f"install ROCm's: {_HOW}")
    elif "hip" in build.targets and has_nvidia and not has_amd:
        yield problem(name, f"{said} is built for ROCm, and there are NVIDIA GPUs here", f"install CUDA's: {_HOW}")
    elif "cuda" in build.targets and version:
        yield _against_cuda(name, machine, f"{said} for CUDA {build.targets['cuda']}", build.targets["cuda"], version)
    else:
        yield ok(
            name, f"{said} for {', '.join(f'{_NAMES[target]} {its}'.rstrip() for target, its in build.targets.items())}"
        )


def _against_cuda(name: str, machine: Machine, said: str, cuda: str, version: str) -> Finding:
    oldest = 0
    with suppress(ValueError):
        oldest = _OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0)
    if int(version.partition(".")[0]) >= oldest:
        return ok(name, f"{said}, NVIDIA driver {version}")
    seen = f"{said} needs NVIDIA driver {oldest} or newer, and this host has {version}"
    if machine.matching(_COMPATIBLE):
        return warning(name, f"{seen}; the image has CUDA's compatibility library", "works on data-center GPUs only")
    return problem(name, seen, f"a newer driver on the host, or a torch for an older CUDA: {_HOW}")
