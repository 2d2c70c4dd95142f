"""What all ranks of a job should have alike: versions, settings of the communication libraries, accelerators.

Nothing is imported to learn a version: the names of the installed packages' metadata folders say it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

from .. import __version__
from . import FRAMEWORK
from .accelerators import nvidia_driver

_FRAMEWORKS = (
    "torch",
    "tensorflow",
    "tensorflow_cpu",
    "horovod",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "mpi4py",
    "jax",
    "nvidia_nccl_cu12",
    "nvidia_nccl_cu13",
)
_FAMILIES = ("NCCL_", "GLOO_", "FI_")
# May well differ from host to host, or is set for one rank on purpose.
_OWN = re.compile(r".*_(SOCKET_IFNAME|HOSTID|IB_HCA|TOPO_FILE|(DEBUG|DUMP)(_.*)?)|.*_DUMP_FILE")
_MOST = 80  # settings
_LONGEST = 200  # characters of a name or a value


def environment_facts(environ: Mapping[str, str], accelerators: int, framework: str) -> tuple[tuple[str, str], ...]:
    """Pairs of name and value, for example ("torch", "2.13.0"); a setting's name ends in "="."""
    found = {
        # With its place: another Python on one node explains all other differences.
        "Python": f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}",
        "distboot": __version__,
        FRAMEWORK: framework,
        **_installed(sys.path),
        "accelerators": str(accelerators),
    }
    driver = nvidia_driver()
    if driver is not None:
        found["NVIDIA driver"] = driver
    settings = sorted(name for name in environ if name.startswith(_FAMILIES) and not _OWN.fullmatch(name))
    found |= {f"{name}=": environ[name] for name in settings[:_MOST]}
    return tuple(sorted((name[:_LONGEST], value[:_LONGEST]) for name, value in found.items()))


def _installed(folders: Iterable[str]) -> dict[str, str]:
    """Versions of the frameworks that this Python would import."""
    found: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                # torch-2.13.0+cpu.dist-info, or Debian's torch-1.13.1.egg-info
                package, _, version = name.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")
                if version and name.endswith("-info") and package.lower() in _FRAMEWORKS:
                    found.setdefault(package.lower(), version)  # the first on the path is the one that is imported
    return {name: found[name] for name in _FRAMEWORKS if name in found}
