"""A machine as a process on it sees it: everything that a check may read."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..detection.detect import detect
from ..detection.placement import Placement, recognise
from ..errors import DistbootError
from ..host import network
from ..text import counted

_LOOK_UP_TIMEOUT = 0.3  # seconds
_AMAZON = "0x1d0f"  # vendor of EFA devices, include/linux/pci_ids.h
_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_DOCKER_FILES = (".dockerenv", "run/.containerenv")


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device."""

    device: str  # for example "mlx5_ib0"
    number: str  # of the port, from 1
    kind: str  # "InfiniBand", "RoCE" or "EFA"
    state: str  # as the kernel reports it, for example "4: ACTIVE"

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in self.state


def describe(ports: Sequence[Port]) -> str:
    """`"8 InfiniBand ports (mlx5_ib0 to mlx5_ib7)"`."""
    kinds = " and ".join(dict.fromkeys(port.kind for port in ports))
    first_and_last = " to ".join(dict.fromkeys((ports[0].device, ports[-1].device)))
    return f"{counted(len(ports), f'{kinds} port')} ({first_and_last})"


def _shared_memory() -> tuple[int, int]:
    found = os.statvfs("/dev/shm")  # noqa: S108 - nothing is written there
    size = found.f_blocks * found.f_frsize
    free = found.f_bavail * found.f_frsize
    return size, free


def _look_up(name: str) -> list[str]:
    return [str(address[0]) for _, address in network.look_up(name, None, _LOOK_UP_TIMEOUT)]


def _package_folders() -> list[str]:
    return [os.path.abspath(folder) for folder in sys.path]


def _installed_at() -> float:
    return Path(__file__).stat().st_mtime


def _may_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


@dataclass(frozen=True)
class Machine:
    """By default the machine that this process runs on."""

    environ: Mapping[str, str]  # environment of the process
    root: Path = Path("/")  # where the file system begins
    system: str = sys.platform
    # Folders where Python looks for packages
    packages: Sequence[str] = field(default_factory=_package_folders)
    host: str = field(default_factory=socket.gethostname)
    now: float = field(default_factory=time.time)  # seconds since the epoch
    # When distboot was installed, in seconds since the epoch
    installed_at: float = field(default_factory=_installed_at)
    # Whether this user may read and write a file
    may_open: Callable[[Path], bool] = _may_open
    # Size of /dev/shm and free space there, in bytes; raises OSError
    shared_memory: Callable[[], tuple[int, int]] = _shared_memory
    # Interface and address, of this host
    addresses: Callable[[], list[tuple[str, str]]] = network.addresses
    # Addresses of a name, within a short time; raises OSError
    look_up: Callable[[str], list[str]] = _look_up

    def text(self, path: str) -> str:
        """Content of a file, stripped; empty if the file cannot be read."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.root / path.lstrip("/")).read_text().strip()
        return ""

    def names(self, path: str) -> list[str]:
        """Names in a folder; none if the folder cannot be read."""
        return [found.rpartition("/")[2] for found in self.matching(f"{path}/*")]

    def matching(self, pattern: str) -> list[str]:
        """Paths that match a pattern, relative to the root."""
        with suppress(OSError):
            return sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern))
        return []

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def placement(self) -> Placement:
        """The placement of this process; that of a single one if the environment is broken."""
        try:
            return detect(self.environ)
        except DistbootError:
            return detect({})._replace(num_nodes=None)

    def is_one_node(self) -> bool:
        """Whether the job is known to stay on one host."""
        return self.placement().num_nodes == 1

    def is_azure(self) -> bool:
        """Whether this is a virtual machine of Azure, or any other of Hyper-V."""
        return self.text("sys/class/dmi/id/sys_vendor") == "Microsoft Corporation"

    def pci_devices(self) -> list[tuple[str, str]]:
        """Vendor and class of each device on the PCI bus, which every container sees."""
        folders = self.matching("sys/bus/pci/devices/*")
        return [(self.text(f"{folder}/vendor"), self.text(f"{folder}/class")) for folder in folders]

    def rdma_ports(self) -> list[Port]:
        """The ports of all RDMA devices, without Azure's Ethernet cards: they cannot use RoCE."""
        found = []
        for path in self.matching("sys/class/infiniband/*/ports/*"):
            *_, device, _, number = path.split("/")
            kind = self._rdma_kind(device, path)
            if kind == "RoCE" and self.is_azure():
                continue
            found.append(Port(device, number, kind, self.text(f"{path}/state")))
        return found

    def _rdma_kind(self, device: str, port: str) -> str:
        if self.text(f"sys/class/infiniband/{device}/device/vendor") == _AMAZON:
            return "EFA"  # its link layer is "Unspecified"
        return self.text(f"{port}/link_layer").replace("Ethernet", "RoCE")

    def has_library(self, name: str) -> bool:
        """Whether the dynamic linker would find a library: "libibverbs.so.1", or a path."""
        with suppress(OSError):
            # ldconfig lists every library that it has found in this file, with its path.
            if f"/{name}\0".encode() in (self.root / "etc/ld.so.cache").read_bytes():
                return True
        if "/" in name:
            return self.has(name)
        for folder in self.environ.get("LD_LIBRARY_PATH", "").split(":"):
            if folder and self.has(f"{folder}/{name}"):
                return True
        return False

    def container(self) -> str | None:
        """What runs this container: "azureml", "kubernetes", "apptainer", "docker", or nothing."""
        platform = recognise(self.environ)
        if platform is not None and platform.name in ("azureml", "kubernetes"):
            return platform.name
        if any(name in self.environ for name in _APPTAINER):
            return "apptainer"
        # systemd asks every container manager to set container=NAME, for example container=podman.
        # The advice for Docker fits systemd-nspawn, too.
        if "container" in self.environ or any(map(self.has, _DOCKER_FILES)):
            return "docker"
        return None

    def remedy(self, docker: str, pod: str, bare: str, **others: str) -> str:
        """The remedy for this container: options of `docker run`, a pod's YAML, or `bare` for none.

        `others` replaces the remedy for a container, named as `container()` names it.
        """
        remedies = {
            "docker": f"docker run {docker}",
            "kubernetes": f"in the pod:\n{pod}",
            "azureml": f'in the job\'s YAML: resources: {{docker_args: "{docker}"}}',
        }
        remedies.update(others)
        return remedies.get(self.container() or "", bare)
