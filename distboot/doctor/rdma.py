"""RDMA: InfiniBand, RoCE and EFA. The kernel shows its devices in every container; what it takes to use them is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .finding import Finding, ok, problem, warning
from .machine import Machine

_INFINIBAND = "0x0207"  # class of PCI devices, include/linux/pci_ids.h
_AMAZON = "0x1d0f"  # vendor of EFA devices, include/linux/pci_ids.h
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_EFA_PLUGINS = ("opt/*/lib*/libnccl-net*.so", "opt/amazon/*/lib*/libnccl-net*.so", "opt/amazon/*/lib/*/libnccl-net*.so")
_VERBS = "apt-get install libibverbs1 ibverbs-providers, or dnf install libibverbs, in the image"


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device.

    Attributes:
        device: for example "mlx5_ib0".
        number: of the port, from 1.
        kind: "InfiniBand", "RoCE" or "EFA".
        active: whether the link is up.
        state: as the kernel says it, for example "4: ACTIVE".
    """

    device: str
    number: str
    kind: str
    active: bool
    state: str


def ports(machine: Machine) -> list[Port]:
    """All ports over which data could go. In Azure Ethernet cards show themselves, too; its network has no RoCE."""
    found, azure = [], machine.azure()
    for device in machine.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{device}"
        for number in machine.names(f"{folder}/ports"):
            link = machine.text(f"{folder}/ports/{number}/link_layer")  # InfiniBand, Ethernet, or Unspecified for EFA
            kind = "EFA" if machine.text(f"{folder}/device/vendor") == _AMAZON else link.replace("Ethernet", "RoCE")
            state = machine.text(f"{folder}/ports/{number}/state")
            if not (azure and kind == "RoCE"):
                found.append(Port(device, number, kind, "ACTIVE" in state, state))
    return found


def said(devices: Sequence[Port]) -> str:
    """`"8 InfiniBand ports (mlx5_ib0 to mlx5_ib7)"`."""
    kinds = " and ".join(dict.fromkeys(port.kind for port in devices))
    names = [port.device for port in devices]
    listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{len(names)} {kinds} port{'s' if len(names) > 1 else ''} ({listed})"


def rdma_devices(machine: Machine) -> Iterator[Finding]:
    """The device files, without which a program sees no RDMA at all and takes TCP."""
    name = "rdma-devices"
    found = ports(machine)
    if not found:
        yield _none(name, machine)
        return
    # uverbs0 belongs to the device that this file names.
    files = {
        machine.text(f"sys/class/infiniband_verbs/{file}/ibdev"): file
        for file in machine.names("sys/class/infiniband_verbs")
        if file.startswith("uverbs")
    }
    here = machine.names("dev/infiniband")
    missing = [port for port in found if files.get(port.device) not in here]
    if not missing:
        yield ok(name, said(found))
        return
    efa = missing[0].kind == "EFA"
    limit = f"vpc.amazonaws.com/efa: {len(found)}" if efa else "rdma/hca_shared_devices_a: 1"
    named = "" if efa else "  # or as `kubectl describe node` calls it"
    remedy = machine.how(
        "--device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1",
        f"containers: [{{securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}, resources: {{limits: {{{limit}}}}}}}]"
        + named,
        "modprobe ib_uverbs",
    )
    whose = "this host has" if len(missing) == len(found) else "of the RDMA ports of this host"
    seen = f"{whose} {said(missing)}, and their files in /dev/infiniband are not here: NCCL and UCX take TCP"
    # A card for Ethernet always offers RoCE; whether the network carries it is not to be seen from here.
    yield (warning if missing[0].kind == "RoCE" else problem)(name, seen, remedy)


def _none(name: str, machine: Machine) -> Finding:
    folder = "sys/bus/pci/devices"
    cards = [card for card in machine.names(folder) if machine.text(f"{folder}/{card}/class").startswith(_INFINIBAND)]
    if not cards:
        return ok(name, "none: ranks on several nodes talk over TCP")
    remedy = "on the host: modprobe mlx5_ib; lsmod | grep ib_"
    if machine.azure():
        remedy = "take Azure's HPC image for the hosts, or add the extension InfiniBandDriverLinux to them"
    return problem(name, f"{len(cards)} InfiniBand cards on this host, and its kernel has no driver for them", remedy)


def rdma_ports(machine: Machine) -> Iterator[Finding]:
    """Links that are down."""
    name = "rdma-ports"
    found = ports(machine)
    down = [port for port in found if not port.active]
    if not down:
        yield ok(name, f"{len(found)} active" if found else "none")
        return
    seen = f"{len(down)} of {len(found)} not active: {', '.join(f'{port.device} is {port.state}' for port in down[:4])}"
    remedy = "look at the cable, the switch and, for INIT, the subnet manager (ibstat on the host)"
    yield (problem if len(down) == len(found) else warning)(name, seen, remedy)


def rdma_libraries(machine: Machine) -> Iterator[Finding]:
    """The libraries in the image, which NCCL and UCX load when they start, and do without in silence."""
    name = "rdma-libraries"
    found = ports(machine)
    if not found:
        yield ok(name, "not needed")
    elif any(port.kind == "EFA" for port in found):
        yield _efa_plugin(name, machine)
    elif not machine.library("libibverbs.so.1"):
        yield problem(name, "the image has no libibverbs.so.1, without which NCCL and UCX take TCP", _VERBS)
    else:
        drivers = machine.names("etc/libibverbs.d")
        missing = [wanted for wanted in _verbs_drivers(machine, found) if wanted not in drivers]
        if missing:
            seen = f"libibverbs.so.1 is here, and not its driver for {found[0].device} (/etc/libibverbs.d/{missing[0]})"
            yield problem(name, seen, _VERBS)
        else:
            yield ok(name, "libibverbs.so.1 is here")


def _verbs_drivers(machine: Machine, found: Sequence[Port]) -> set[str]:
    """The files that tell libibverbs of the drivers of these devices, as far as their names are known."""
    # DRIVER=mlx5_core
    uevents = [machine.text(f"sys/class/infiniband/{port.device}/device/uevent") for port in found]
    return {
        f"{driver}.driver" for driver in ("mlx4", "mlx5") for uevent in uevents if f"DRIVER={driver}_core" in uevent
    }


def _efa_plugin(name: str, machine: Machine) -> Finding:
    given = machine.environ.get("NCCL_NET_PLUGIN", "")
    names = [given, f"libnccl-net-{given}.so"] if given else ["libnccl-net.so"]
    if any(map(machine.library, names)):
        return ok(name, "NCCL's plugin for EFA is here")
    elsewhere = [path for pattern in _EFA_PLUGINS for path in machine.matching(pattern)]
    if elsewhere:
        folder = elsewhere[0].rpartition("/")[0]
        seen = f"NCCL's plugin for EFA is in /{folder}, where the dynamic linker does not look: NCCL takes TCP"
        return problem(name, seen, f"LD_LIBRARY_PATH=/{folder}:$LD_LIBRARY_PATH")
    seen = "the image has no NCCL plugin for EFA (libnccl-net.so of aws-ofi-nccl), without which NCCL takes TCP"
    return problem(
        name, seen, "in the image, run the EFA installer of AWS: efa_installer.sh -y --skip-kmod --no-verify"
    )


def rdma_gids(machine: Machine) -> Iterator[Finding]:
    """RoCE finds the other side by a GID, which follows from an IP address in this very network namespace."""
    name = "rdma-gids"
    found = [port for port in ports(machine) if port.kind == "RoCE" and port.active]
    if not found:
        yield ok(name, "not needed: no RoCE")
        return
    usable = {port.device: _gids(machine, port) for port in found}
    without = [device for device, gids in usable.items() if not gids]
    index = machine.environ.get("NCCL_IB_GID_INDEX", "-1")  # -1: NCCL looks for it
    if without:
        seen = f"{without[0]} has no GID of RoCE v2 with an IP address in this network namespace"
        pod = "hostNetwork: true  # or a network of the RDMA CNI plugin"
        yield warning(name, seen, machine.how("--network=host", pod, "give its network interface an address"))
    elif index != "-1" and any(index not in gids for gids in usable.values()):
        device, gids = next((device, gids) for device, gids in usable.items() if index not in gids)
        seen = f"NCCL_IB_GID_INDEX={index!r} is no GID of RoCE v2 on {device}, which has {', '.join(gids)}"
        yield problem(name, seen, "unset NCCL_IB_GID_INDEX: NCCL finds it (since 2.21)")
    else:
        yield ok(name, f"RoCE v2 at index {', '.join(next(iter(usable.values())))}")


def _gids(machine: Machine, port: Port) -> list[str]:
    """The indices of the GIDs of RoCE v2 that follow from an IP address."""
    folder = Path("sys/class/infiniband", port.device, "ports", port.number)
    found = []
    for index in sorted(machine.names(f"{folder}/gids"), key=int):
        gid = machine.text(f"{folder}/gids/{index}")
        # fe80:… follows from the card, and reaches nobody behind a router. Reading the type of an empty one fails.
        if gid not in ("", _NO_GID) and not gid.startswith("fe80:"):
            found += [index] if machine.text(f"{folder}/gid_attrs/types/{index}") == "RoCE v2" else []
    return found
