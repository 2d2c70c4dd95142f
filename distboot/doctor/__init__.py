"""Whether this container is ready for a distributed job: what a check reads, and what it finds.

A check is a small function from the machine to its findings, named after it. It reads files below a root, an
environment, and a few answers of the kernel and the resolver; nothing else, so that a test can show it any machine. It
does not take long, imports no framework, and changes nothing.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..detection.detect import detect
from ..detection.placement import Placement, recognise
from ..errors import DistbootError
from ..host import network
from ..rendezvous.protocol import of, text, valid
from ..text import is_address, without_mapping

_LOOK_UP_LIMIT = 0.3  # seconds
_AMAZON = "0x1d0f"  # vendor of EFA devices, include/linux/pci_ids.h

LONGEST = 2000  # characters of one text of a finding
# The worst first, as they are shown. A problem: the job will fail, hang, or fall back to something many times slower.
STATUSES = ("problem", "warning", "unknown", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check, and what it found."""

    name: str = of(text(LONGEST))  # of the check, kebab-case, stable; `examine` adds it
    status: str = of(valid(STATUSES.__contains__, "status"))
    seen: str = of(text(LONGEST))  # what was found, in one line
    # What to do, as exact as may be; may have several lines
    remedy: str = of(text(LONGEST), default="")


ok = partial(Finding, "", "ok")  # nothing to be done
warning = partial(Finding, "", "warning")  # may be slow, or not what was meant
problem = partial(Finding, "", "problem")
unknown = partial(Finding, "", "unknown")  # the machine does not say


def refused(error: DistbootError) -> Finding:
    """What the job itself would refuse with this error."""
    return problem(error.message.replace("\n", "; "), error.hint)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device, over which data could go."""

    device: str  # for example "mlx5_ib0"
    number: str  # of the port, from 1
    kind: str  # "InfiniBand", "RoCE" or "EFA"
    state: str  # as the kernel says it, for example "4: ACTIVE"

    @property
    def active(self) -> bool:
        """Whether the link is up."""
        return "ACTIVE" in self.state


def _shared_memory() -> tuple[int, int]:
    found = os.statvfs("/dev/shm")  # noqa: S108 - not to write to
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _look_up(name: str) -> list[str]:
    return [str(address[0]) for _, address in network.look_up(name, None, _LOOK_UP_LIMIT)]


@dataclass(frozen=True)
class Machine:
    """One machine, as a process on it sees it; by default this one."""

    environ: Mapping[str, str]  # environment of the process
    root: Path = Path("/")  # where the file system begins
    system: str = sys.platform
    # Folders where Python looks for packages.
    packages: Sequence[str] = field(
        default_factory=lambda: [os.path.abspath(folder) for folder in sys.path]
    )
    host: str = field(default_factory=socket.gethostname)
    now: float = field(default_factory=time.time)  # seconds since the epoch
    # When distboot was installed
    since: float = field(default_factory=lambda: Path(__file__).stat().st_mtime)
    # To read and write it
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    # Bytes of /dev/shm, all and free; raises OSError
    shared_memory: Callable[[], tuple[int, int]] = _shared_memory
    # Interface and address, of this host
    addresses: Callable[[], list[tuple[str, str]]] = network.addresses
    # Addresses of a name, within a short time; raises OSError
    look_up: Callable[[str], list[str]] = _look_up

    def text(self, path: str) -> str:
        """What a file holds, without blanks around it; empty if it cannot be read."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.root / path.lstrip("/")).read_text().strip()
        return ""

    def names(self, path: str) -> list[str]:
        """What a folder holds; nothing if it cannot be read."""
        return [found.rpartition("/")[2] for found in self.matching(f"{path}/*")]

    def matching(self, pattern: str) -> list[str]:
        """The paths that a pattern names, without a slash before them."""
        with suppress(OSError):
            return sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern))
        return []

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def is_own(self, host: str) -> bool:
        """Whether this is the name or an address of this machine."""
        own = {without_mapping(address) for _, address in self.addresses()}
        is_name = host.partition(".")[0].lower() == self.host.partition(".")[0].lower()
        return without_mapping(host) in own or (is_name and not is_address(host))

    def placement(self) -> Placement:
        """What the environment proves about the place of this process; of one that is alone if it is broken."""
        try:
            return detect(self.environ)
        except DistbootError:
            return detect({})._replace(num_nodes=None)

    def one_node(self) -> bool:
        """Whether the job is known to stay on one host."""
        return self.placement().num_nodes == 1

    def azure(self) -> bool:
        """Whether this is a virtual machine of Azure, or another one of Hyper-V."""
        return self.text("sys/class/dmi/id/sys_vendor") == "Microsoft Corporation"

    def pci_devices(self) -> list[tuple[str, str]]:
        """Vendor and class of each device on the PCI bus, which every container sees."""
        folders = self.matching("sys/bus/pci/devices/*")
        return [(self.text(f"{folder}/vendor"), self.text(f"{folder}/class")) for folder in folders]

    def rdma_ports(self) -> list[Port]:
        """All of them. In Azure Ethernet cards show themselves, too; its network has no RoCE."""
        found = []
        for path in self.matching("sys/class/infiniband/*/ports/*"):
            *_, device, _, number = path.split("/")
            link = self.text(f"{path}/link_layer")  # InfiniBand, Ethernet, or Unspecified for EFA
            is_efa = self.text(f"sys/class/infiniband/{device}/device/vendor") == _AMAZON
            kind = "EFA" if is_efa else link.replace("Ethernet", "RoCE")
            found.append(Port(device, number, kind, self.text(f"{path}/state")))
        return [port for port in found if port.kind != "RoCE" or not self.azure()]

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
        """What runs this container: "azureml", "kubernetes", "apptainer" or "docker"; None: no sign of one."""
        platform = recognise(self.environ)
        if platform is not None and platform.name in ("azureml", "kubernetes"):
            return platform.name
        if self.environ.keys() & {"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"}:
            return "apptainer"
        # container=podman, as systemd asks of all of them; the advice fits its own nspawn, too.
        if self.has(".dockerenv") or self.has("run/.containerenv") or "container" in self.environ:
            return "docker"
        return None

    def how(self, docker: str, pod: str, bare: str, **others: str) -> str:
        """The remedy for what runs this container: options of `docker run`, YAML of a pod; `bare` is for none.

        What `others` say for one of them, and is not empty, comes before that.
        """
        kind = self.container() or ""
        remedies = {
            "docker": f"docker run {docker}",
            "kubernetes": f"in the pod:\n{pod}",
            "azureml": f'in the job\'s YAML: resources: {{docker_args: "{docker}"}}',
        }
        return others.get(kind) or remedies.get(kind, bare)


Check = Callable[[Machine], Finding | Iterable[Finding]]
