"""The machine as the checks see it: files below a root, an environment, and a few questions to the kernel and resolver.

A check reads nothing else, so that a test can show it any machine.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import interfaces
from ..detection import detect
from ..errors import DistbootError
from ..placement import Placement
from ..platforms import recognise
from ..resolve import look_up

_LOOK_UP_LIMIT = 0.3  # seconds


@dataclass(frozen=True)
class Machine:
    """One machine, as a process on it sees it.

    Attributes:
        environ: environment of the process.
        root: where the file system begins; another one in tests.
        system: as `sys.platform`.
        packages: folders where Python looks for packages.
        host: name of the host.
        now: seconds since the epoch.
        since: seconds since the epoch when distboot was installed.
        may_open: whether this user may read and write a file.
        shared_memory: bytes of /dev/shm, all and free; raises OSError.
        addresses: interface and address of all addresses of this host.
        look_up: addresses of a name, within a short time; raises OSError.
    """

    environ: Mapping[str, str]
    root: Path
    system: str
    packages: Sequence[str]
    host: str
    now: float
    since: float
    may_open: Callable[[Path], bool]
    shared_memory: Callable[[], tuple[int, int]]
    addresses: Callable[[], list[tuple[str, str]]]
    look_up: Callable[[str], list[str]]

    def text(self, path: str) -> str:
        """What a file holds, without blanks around it; empty if it cannot be read."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.root / path.lstrip("/")).read_text().strip()
        return ""

    def names(self, path: str) -> list[str]:
        """What a folder holds; nothing if it cannot be read."""
        with suppress(OSError):
            return sorted(os.listdir(self.root / path.lstrip("/")))
        return []

    def matching(self, pattern: str) -> list[str]:
        """The paths that a pattern names, without a slash before them."""
        with suppress(OSError):
            return sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern))
        return []

    def has(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return (self.root / path.lstrip("/")).exists()

    def placement(self) -> Placement | None:
        """What the environment proves about the place of this process; None if it is broken."""
        try:
            return detect(self.environ)
        except DistbootError:
            return None

    def one_node(self) -> bool:
        """Whether the job is known to stay on one host."""
        placement = self.placement()
        return placement is not None and placement.num_nodes == 1

    def azure(self) -> bool:
        """Whether this is a virtual machine of Azure, or another one of Hyper-V."""
        return self.text("sys/class/dmi/id/sys_vendor") == "Microsoft Corporation"

    def library(self, name: str) -> bool:
        """Whether the dynamic linker would find a library, for example "libibverbs.so.1", or one with its path."""
        with suppress(OSError):
            # Every library that ldconfig has found is in this file with its name and path.
            if f"/{name}\0".encode() in (self.root / "etc/ld.so.cache").read_bytes():
                return True
        if "/" in name:
            return self.has(name)
        folders = self.environ.get("LD_LIBRARY_PATH", "").split(":")
        return any(folder and self.has(f"{folder}/{name}") for folder in folders)

    def container(self) -> str | None:
        """What runs this container: "azureml", "kubernetes", "apptainer" or "docker"; None: it seems to be none."""
        platform = recognise(self.environ)
        if platform is not None and platform.name in ("azureml", "kubernetes"):
            return platform.name
        if self.environ.keys() & {"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"}:
            return "apptainer"
        # container=podman, as systemd asks of all of them; its own nspawn is no Docker, and takes the same advice.
        if self.has(".dockerenv") or self.has("run/.containerenv") or "container" in self.environ:
            return "docker"
        return None

    def how(self, docker: str, pod: str, bare: str) -> str:
        """The remedy in the words of what runs this container.

        Args:
            docker: options of `docker run`.
            pod: YAML of a container in a pod, or of the pod.
            bare: where there is no container.
        """
        kind = self.container()
        if kind == "kubernetes":
            return f"in the pod:\n{pod}"
        if kind == "azureml":
            return f'in the job\'s YAML: resources: {{docker_args: "{docker}"}}'
        return f"docker run {docker}" if kind == "docker" else bare


def this_machine(environ: Mapping[str, str]) -> Machine:
    """The machine that this process runs on.

    Args:
        environ: environment of the process.
    """
    return Machine(
        environ=environ,
        root=Path("/"),
        system=sys.platform,
        packages=[os.path.abspath(folder) for folder in sys.path],
        host=socket.gethostname(),
        now=time.time(),
        since=Path(__file__).stat().st_mtime,
        may_open=lambda path: os.access(path, os.R_OK | os.W_OK),
        shared_memory=_shared_memory,
        addresses=interfaces.addresses,
        look_up=_look_up,
    )


def _shared_memory() -> tuple[int, int]:
    found = os.statvfs("/dev/shm")  # noqa: S108 - not to write to
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _look_up(name: str) -> list[str]:
    return [str(address[0]) for _, address in look_up(name, None, _LOOK_UP_LIMIT)]
