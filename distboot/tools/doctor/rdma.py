"""Checks of RDMA: InfiniBand, RoCE and EFA.

Every container sees the devices in /sys, but may lack the device files and libraries to use them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...base.text import joined
from .finding import (
    Finding,
    ok,
    problem,
    problem_if,
    warning,
)
from .machine import Machine, Port, describe

_MOST_NAMED = 4  # ports
_INFINIBAND = "0x0207"  # class of PCI devices, include/linux/pci_ids.h
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_EFA_PLUGINS = (
    "opt/*/lib*/libnccl-net*.so",
    "opt/amazon/*/lib*/libnccl-net*.so",
    "opt/amazon/*/lib/*/libnccl-net*.so",
)
_VERBS_FILES = "sys/class/infiniband_verbs/uverbs*"
_VERBS = "apt-get install libibverbs1 ibverbs-providers, or dnf install libibverbs, in the image"


def rdma_devices(machine: Machine) -> Finding:
    """The device files: without them a program finds no RDMA and uses TCP."""
    ports = machine.rdma_ports()
    if not ports:
        return _no_ports(machine)
    with_file = _devices_with_a_file(machine)
    missing = [port for port in ports if port.device not in with_file]
    if not missing:
        return ok(describe(ports))
    whose = "of the RDMA ports of this host"
    all_are_missing = len(missing) == len(ports)
    if all_are_missing:
        whose = "this host has"
    seen = (
        f"{whose} {describe(missing)}, but their files in /dev/infiniband are not here: "
        "NCCL and UCX use TCP"
    )
    kind = missing[0].kind
    remedy = machine.remedy(
        "--device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1",
        _devices_pod(kind, len(ports)),
        "modprobe ib_uverbs",
    )
    # Every Ethernet card of this kind offers RoCE, also where the network does not carry it.
    return problem_if(kind != "RoCE", seen, remedy)


def _devices_with_a_file(machine: Machine) -> set[str]:
    found = set()
    for path in machine.matching(_VERBS_FILES):
        file = f"dev/infiniband/{Path(path).name}"
        if machine.has(file):
            device = machine.text(f"{path}/ibdev")  # that uverbs0 belongs to
            found.add(device)
    return found


def _devices_pod(kind: str, count: int) -> str:
    limit = "rdma/hca_shared_devices_a: 1"
    comment = "  # or as `kubectl describe node` calls it"
    if kind == "EFA":
        limit = f"vpc.amazonaws.com/efa: {count}"
        comment = ""
    security = "securityContext: {capabilities: {add: [IPC_LOCK]}}"
    return f"containers: [{{{security}, resources: {{limits: {{{limit}}}}}}}]{comment}"


def _no_ports(machine: Machine) -> Finding:
    count = sum(device_class.startswith(_INFINIBAND) for _, device_class in machine.pci_devices())
    if not count:
        return ok("none: ranks on several nodes use TCP")
    seen = f"{count} InfiniBand cards on this host, but its kernel has no driver for them"
    if machine.is_azure():
        remedy = "use Azure's HPC image for the hosts, or their extension InfiniBandDriverLinux"
        return problem(seen, remedy)
    return problem(seen, "on the host: modprobe mlx5_ib; lsmod | grep ib_")


def rdma_ports(machine: Machine) -> Finding:
    """Links that are down."""
    ports = machine.rdma_ports()
    if not ports:
        return ok("none")
    down = [port for port in ports if not port.is_active]
    if not down:
        return ok(f"{len(ports)} active")
    listed = joined((f"{port.device} is {port.state}" for port in down), _MOST_NAMED)
    seen = f"{len(down)} of {len(ports)} not active: {listed}"
    remedy = "look at the cable, the switch and, for INIT, the subnet manager (ibstat on the host)"
    return problem_if(len(down) == len(ports), seen, remedy)


def rdma_libraries(machine: Machine) -> Finding:
    """The libraries that NCCL and UCX load at the start; without them both silently use TCP."""
    ports = machine.rdma_ports()
    if not ports:
        return ok("not needed")
    kinds = [port.kind for port in ports]
    if "EFA" in kinds:
        return _efa_plugin(machine)
    if not machine.has_library("libibverbs.so.1"):
        seen = "the image has no libibverbs.so.1, without which NCCL and UCX use TCP"
        return problem(seen, _VERBS)
    for port in ports:
        missing = _missing_driver(machine, port)
        if missing is not None:
            seen = f"libibverbs.so.1 is here, but its driver for {port.device} (/{missing}) is not"
            return problem(seen, _VERBS)
    return ok("libibverbs.so.1 is here")


def _missing_driver(machine: Machine, port: Port) -> str | None:
    """The file that should name the userspace driver of a card of NVIDIA; None if it is here."""
    # DRIVER=mlx5_core
    uevent = machine.text(f"sys/class/infiniband/{port.device}/device/uevent")
    driver = re.search("DRIVER=(mlx[45])_core", uevent)
    if driver is None:  # a card of another vendor
        return None
    file = f"etc/libibverbs.d/{driver[1]}.driver"
    if machine.has(file):
        return None
    return file


def _efa_plugin(machine: Machine) -> Finding:
    given = machine.environ.get("NCCL_NET_PLUGIN")
    names = ["libnccl-net.so"]
    if given:
        names = [given, f"libnccl-net-{given}.so"]
    is_found = any(map(machine.has_library, names))
    if is_found:
        return ok("NCCL's plugin for EFA is here")
    for pattern in _EFA_PLUGINS:
        for path in machine.matching(pattern):
            folder = path.rpartition("/")[0]
            seen = (
                f"NCCL's plugin for EFA is in /{folder}, where the dynamic linker does not look: "
                "NCCL uses TCP"
            )
            return problem(seen, f"LD_LIBRARY_PATH=/{folder}:$LD_LIBRARY_PATH")
    return problem(
        "the image has no NCCL plugin for EFA (libnccl-net.so of aws-ofi-nccl), "
        "without which NCCL uses TCP",
        "in the image, run the EFA installer of AWS: efa_installer.sh -y --skip-kmod --no-verify",
    )


def rdma_gids(machine: Machine) -> Finding:
    """GIDs of RoCE, which are derived from IP addresses in this network namespace."""
    by_device = {}
    for port in machine.rdma_ports():
        if port.kind == "RoCE" and port.is_active:
            by_device[port.device] = _routed_gids(machine, port)
    if not by_device:
        return ok("not needed: no RoCE")
    for device, gids in by_device.items():
        if not gids:
            return _no_gid(machine, device)
    index = machine.environ.get("NCCL_IB_GID_INDEX", "-1")  # -1: NCCL looks for it
    for device, gids in by_device.items():
        if index not in ("-1", *gids):
            seen = (
                f"NCCL_IB_GID_INDEX={index!r} is not a GID of RoCE v2 on {device}, "
                f"which has {', '.join(gids)}"
            )
            return problem(seen, "unset NCCL_IB_GID_INDEX: NCCL finds it (since 2.21)")
    first = next(iter(by_device.values()))
    return ok(f"RoCE v2 at index {', '.join(first)}")


def _no_gid(machine: Machine, device: str) -> Finding:
    seen = f"{device} has no GID of RoCE v2 with an IP address in this network namespace"
    remedy = machine.remedy(
        "--network=host",
        "hostNetwork: true  # or a network of the RDMA CNI plugin",
        "give its network interface an address",
    )
    return warning(seen, remedy)


def _routed_gids(machine: Machine, port: Port) -> list[str]:
    """The indices of the GIDs of RoCE v2 that are derived from an IP address."""
    folder = Path("sys/class/infiniband", port.device, "ports", port.number)
    found = []
    for index in sorted(machine.names(f"{folder}/gids"), key=int):
        gid = machine.text(f"{folder}/gids/{index}")
        if gid in ("", _NO_GID):  # reading the type of one would fail
            continue
        if gid.startswith("fe80:"):  # derived from the card: it passes no router
            continue
        kind = machine.text(f"{folder}/gid_attrs/types/{index}")
        if kind == "RoCE v2":
            found.append(index)
    return found
