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

from ...base.errors import DistbootError
from ...base.process import Program, program_above
from ...base.table import first_that_holds
from ...base.text import counted, is_address, without_mapping
from ...cli.output import as_typed
from ...detection.detect import detect
from ...detection.here import detect_here
from ...detection.placement import Placement, recognize
from ...host import network

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
    is_active: bool


def describe(ports: Sequence[Port]) -> str:
    """`"8 InfiniBand ports (mlx5_ib0 to mlx5_ib7)"`."""
    kinds = " and ".join(dict.fromkeys(port.kind for port in ports))
    count = counted(len(ports), f"{kinds} port")
    first = ports[0].device
    last = ports[-1].device
    devices = " to ".join(dict.fromkeys((first, last)))
    return f"{count} ({devices})"


def _shared_memory() -> tuple[int, int]:
    found = os.statvfs("/dev/shm")  # noqa: S108 - nothing is written there
    size = found.f_blocks * found.f_frsize
    free = found.f_bavail * found.f_frsize
    return size, free


def _look_up(name: str) -> list[str]:
    return network.addresses_of(name, _LOOK_UP_TIMEOUT)


@dataclass(frozen=True)
class Machine:
    """By default the machine that this process runs on."""

    environ: Mapping[str, str]  # environment of the process
    # By --launcher, which `environ` has as DISTBOOT_LAUNCHER, too: an error names the option
    named_launcher: str | None = None
    root: Path = Path("/")  # where the file system begins
    system: str = sys.platform
    # Folders where Python looks for packages
    packages: Sequence[str] = field(default_factory=lambda: list(map(os.path.abspath, sys.path)))
    host: str = field(default_factory=socket.gethostname)
    now: float = field(default_factory=time.time)  # seconds since the epoch
    # When distboot was installed, in seconds since the epoch
    installed_at: float = field(default_factory=lambda: Path(__file__).stat().st_mtime)
    # Whether this user may read and write a file
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    # Size of /dev/shm and free space there, in bytes; raises OSError
    shared_memory: Callable[[], tuple[int, int]] = _shared_memory
    # Interface and address, of this host
    addresses: Callable[[], list[tuple[str, str]]] = network.addresses
    # The nearest process above this one that runs one of these programs
    program_above: Callable[[Sequence[str]], Program | None] = program_above
    # Addresses of a name, within a short time; raises OSError
    look_up: Callable[[str], list[str]] = _look_up

    def text(self, path: str) -> str:
        """Content of a file, stripped; empty if the file cannot be read."""
        with suppress(OSError):
            text = (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
            return text.strip()
        return ""

    def names(self, path: str) -> list[str]:
        """Names in a folder; none if the folder cannot be read."""
        return [Path(each).name for each in self.matching(f"{path}/*")]

    def matching(self, pattern: str) -> list[str]:
        """Paths that match a pattern, relative to the root."""
        found = []
        with suppress(OSError):
            for path in self.root.glob(pattern):
                found.append(str(path.relative_to(self.root)))
        return sorted(found)

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def is_own(self, host: str) -> bool:
        """Whether this is the name or an address of this machine."""
        if is_address(host):
            own = [without_mapping(address) for _, address in self.addresses()]
            return without_mapping(host) in own
        first_label = host.partition(".")[0]
        own_label = self.host.partition(".")[0]
        return first_label.lower() == own_label.lower()

    def placement(self) -> Placement:
        """The placement of this process; that of a single one if the environment is broken."""
        try:
            return detect(self.environ, launcher=self.named_launcher)
        except DistbootError:
            single = detect({})
            return single._replace(num_nodes=None)

    def placement_here(self) -> Placement:
        """The same; raises the error of a broken environment, and of one that means other hosts."""
        try:
            return detect_here(
                self.environ,
                launcher=self.named_launcher,
                look_up=self.look_up,
                is_own=self.is_own,
            )
        except DistbootError as error:
            raise as_typed(error) from None

    def is_one_node(self) -> bool:
        """Whether the job is known to stay on one host."""
        placement = self.placement()
        return placement.num_nodes == 1

    def is_azure(self) -> bool:
        """Whether this is a virtual machine of Azure, or any other of Hyper-V."""
        vendor = self.text("sys/class/dmi/id/sys_vendor")
        return vendor == "Microsoft Corporation"

    def pci_devices(self) -> list[tuple[str, str]]:
        """Vendor and class of each device on the PCI bus, which every container sees."""
        found = []
        for folder in self.matching("sys/bus/pci/devices/*"):
            vendor = self.text(f"{folder}/vendor")
            device_class = self.text(f"{folder}/class")
            found.append((vendor, device_class))
        return found

    def rdma_ports(self) -> list[Port]:
        """The ports of all RDMA devices, without Azure's Ethernet cards: they cannot use RoCE."""
        found = []
        for path in self.matching("sys/class/infiniband/*/ports/*"):
            *_, device, _, number = path.split("/")
            kind = self._rdma_kind(device, path)
            is_azures_ethernet = kind == "RoCE" and self.is_azure()
            if is_azures_ethernet:
                continue
            state = self.text(f"{path}/state")
            is_active = "ACTIVE" in state
            found.append(Port(device, number, kind, state, is_active))
        return found

    def _rdma_kind(self, device: str, port: str) -> str:
        vendor = self.text(f"sys/class/infiniband/{device}/device/vendor")
        if vendor == _AMAZON:
            return "EFA"  # its link layer is "Unspecified"
        link_layer = self.text(f"{port}/link_layer")
        return link_layer.replace("Ethernet", "RoCE")

    def has_library(self, name: str) -> bool:
        """Whether the dynamic linker would find a library: "libibverbs.so.1", or a path."""
        # ldconfig lists every library that it has found in this file, with its path.
        if f"/{name}\0" in self.text("etc/ld.so.cache"):
            return True
        if "/" in name:
            return self.has(name)
        folders = self.environ.get("LD_LIBRARY_PATH", "").split(":")
        candidates = [f"{folder}/{name}" for folder in filter(None, folders)]
        return any(map(self.has, candidates))

    def container(self) -> str | None:
        """What runs this container: "azureml", "kubernetes", "apptainer", "docker", or nothing."""
        platform = getattr(recognize(self.environ), "name", None)
        variables = self.environ.keys()
        # systemd asks every container manager to set container=NAME, for example container=podman.
        # The advice for Docker fits systemd-nspawn, too.
        has_docker_file = any(map(self.has, _DOCKER_FILES))
        return first_that_holds(
            (platform in ("azureml", "kubernetes"), platform),
            (not variables.isdisjoint(_APPTAINER), "apptainer"),
            ("container" in variables or has_docker_file, "docker"),
            (True, None),
        )

    def remedy(self, docker: str, pod: str, bare: str, **others: str) -> str:
        """The remedy for this container: options of `docker run`, a pod's YAML, or `bare` for none.

        `others` replaces the remedy for a container, named as `container()` names it.
        """
        remedies: dict[str | None, str] = {
            "docker": f"docker run {docker}",
            "kubernetes": f"in the pod:\n{pod}",
            "azureml": f'in the job\'s YAML: resources: {{docker_args: "{docker}"}}',
        }
        remedies.update(others)
        return remedies.get(self.container(), bare)
