"""RDMA (InfiniBand, RoCE, EFA), which the kernel shows in every container, unlike what it takes to use it; and NCCL.

NCCL itself says nothing of settings that contradict each other or the machine, and takes something slower.
Facts: NVIDIA's user guide for NCCL, Environment Variables; NCCL, src/misc/socket.cc and src/graph/xml.cc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import DistbootError
from ..host import network
from ..text import counted, short_repr
from . import Check, Finding, Machine, Port, ok, problem, refused, warning

_INFINIBAND = "0x0207"  # class of PCI devices, include/linux/pci_ids.h
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_EFA_PLUGINS = (
    "opt/*/lib*/libnccl-net*.so",
    "opt/amazon/*/lib*/libnccl-net*.so",
    "opt/amazon/*/lib/*/libnccl-net*.so",
)
_VERBS_FILES = "sys/class/infiniband_verbs/uverbs*"
_VERBS = "apt-get install libibverbs1 ibverbs-providers, or dnf install libibverbs, in the image"
# The interfaces that NCCL leaves out where no variable names some
_NCCLS_CHOICE = "^docker,lo,virbr"
_SEVERAL = 8  # InfiniBand ports, as Azure's ND series has since version 4


def _describe(devices: Sequence[Port]) -> str:
    """`"8 InfiniBand ports (mlx5_ib0 to mlx5_ib7)"`."""
    kinds = " and ".join(dict.fromkeys(port.kind for port in devices))
    listed = " to ".join(dict.fromkeys((devices[0].device, devices[-1].device)))
    return f"{counted(len(devices), f'{kinds} port')} ({listed})"


def rdma_devices(machine: Machine) -> Finding:
    """The device files, without which a program sees no RDMA at all and takes TCP."""
    found = machine.rdma_ports()
    if not found:
        return _no_ports(machine)
    # uverbs0 belongs to the device that this file names.
    device_of = {
        Path(path).name: machine.text(f"{path}/ibdev") for path in machine.matching(_VERBS_FILES)
    }
    here = [device for file, device in device_of.items() if machine.has(f"dev/infiniband/{file}")]
    missing = [port for port in found if port.device not in here]
    if not missing:
        return ok(_describe(found))
    efa = missing[0].kind == "EFA"
    limit = f"vpc.amazonaws.com/efa: {len(found)}" if efa else "rdma/hca_shared_devices_a: 1"
    named = "" if efa else "  # or as `kubectl describe node` calls it"
    security = "securityContext: {capabilities: {add: [IPC_LOCK]}}"
    pod = f"containers: [{{{security}, resources: {{limits: {{{limit}}}}}}}]"
    docker = "--device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
    remedy = machine.how(docker, f"{pod}{named}", "modprobe ib_uverbs")
    whose = "this host has" if len(missing) == len(found) else "of the RDMA ports of this host"
    seen = f"{whose} {_describe(missing)}, and their files in /dev/infiniband are not here: NCCL and UCX take TCP"
    # A card for Ethernet always offers RoCE; whether the network carries it is not to be seen from here.
    return (warning if missing[0].kind == "RoCE" else problem)(seen, remedy)


def _no_ports(machine: Machine) -> Finding:
    count = sum(its.startswith(_INFINIBAND) for _, its in machine.pci_devices())
    if not count:
        return ok("none: ranks on several nodes talk over TCP")
    remedy = "on the host: modprobe mlx5_ib; lsmod | grep ib_"
    if machine.azure():
        remedy = "take Azure's HPC image for the hosts, or add the extension InfiniBandDriverLinux to them"
    return problem(
        f"{count} InfiniBand cards on this host, and its kernel has no driver for them", remedy
    )


def rdma_ports(machine: Machine) -> Finding:
    """Links that are down."""
    found = machine.rdma_ports()
    down = [port for port in found if not port.active]
    if not down:
        return ok(f"{len(found)} active" if found else "none")
    seen = f"{len(down)} of {len(found)} not active: {', '.join(f'{port.device} is {port.state}' for port in down[:4])}"
    remedy = "look at the cable, the switch and, for INIT, the subnet manager (ibstat on the host)"
    return (problem if len(down) == len(found) else warning)(seen, remedy)


def rdma_libraries(machine: Machine) -> Finding:
    """The libraries in the image, which NCCL and UCX load when they start, and do without in silence."""
    found = machine.rdma_ports()
    if not found:
        return ok("not needed")
    if any(port.kind == "EFA" for port in found):
        return _efa_plugin(machine)
    if not machine.library("libibverbs.so.1"):
        return problem(
            "the image has no libibverbs.so.1, without which NCCL and UCX take TCP", _VERBS
        )
    for port in found:
        # DRIVER=mlx5_core
        driver = re.search(
            "DRIVER=(mlx[45])_core",
            machine.text(f"sys/class/infiniband/{port.device}/device/uevent"),
        )
        file = f"etc/libibverbs.d/{driver[1]}.driver" if driver else ""
        if file and not machine.has(file):
            return problem(
                f"libibverbs.so.1 is here, and not its driver for {port.device} (/{file})", _VERBS
            )
    return ok("libibverbs.so.1 is here")


def _efa_plugin(machine: Machine) -> Finding:
    given = machine.environ.get("NCCL_NET_PLUGIN", "")
    names = [given, f"libnccl-net-{given}.so"] if given else ["libnccl-net.so"]
    if any(map(machine.library, names)):
        return ok("NCCL's plugin for EFA is here")
    elsewhere = [path for pattern in _EFA_PLUGINS for path in machine.matching(pattern)]
    if elsewhere:
        folder = elsewhere[0].rpartition("/")[0]
        seen = f"NCCL's plugin for EFA is in /{folder}, where the dynamic linker does not look: NCCL takes TCP"
        return problem(seen, f"LD_LIBRARY_PATH=/{folder}:$LD_LIBRARY_PATH")
    seen = "the image has no NCCL plugin for EFA (libnccl-net.so of aws-ofi-nccl), without which NCCL takes TCP"
    return problem(
        seen,
        "in the image, run the EFA installer of AWS: efa_installer.sh -y --skip-kmod --no-verify",
    )


def rdma_gids(machine: Machine) -> Finding:
    """RoCE finds the other side by a GID, which follows from an IP address in this very network namespace."""
    ports = machine.rdma_ports()
    usable = {
        port.device: _gids(machine, port) for port in ports if port.kind == "RoCE" and port.active
    }
    if not usable:
        return ok("not needed: no RoCE")
    index = machine.environ.get("NCCL_IB_GID_INDEX", "-1")  # -1: NCCL looks for it
    for device in (device for device, gids in usable.items() if not gids):
        pod = "hostNetwork: true  # or a network of the RDMA CNI plugin"
        remedy = machine.how("--network=host", pod, "give its network interface an address")
        return warning(
            f"{device} has no GID of RoCE v2 with an IP address in this network namespace", remedy
        )
    for device, gids in usable.items():
        if index not in ("-1", *gids):
            seen = f"NCCL_IB_GID_INDEX={index!r} is not a GID of RoCE v2 on {device}, which has {', '.join(gids)}"
            return problem(seen, "unset NCCL_IB_GID_INDEX: NCCL finds it (since 2.21)")
    return ok(f"RoCE v2 at index {', '.join(next(iter(usable.values())))}")


def _gids(machine: Machine, port: Port) -> list[str]:
    """The indices of the GIDs of RoCE v2 that follow from an IP address."""
    folder = Path("sys/class/infiniband", port.device, "ports", port.number)
    found = []
    for index in sorted(machine.names(f"{folder}/gids"), key=int):
        gid = machine.text(f"{folder}/gids/{index}")
        # fe80:… follows from the card, and passes no router. Reading the type of an empty one fails.
        is_routed = gid not in ("", _NO_GID) and not gid.startswith("fe80:")
        if is_routed and machine.text(f"{folder}/gid_attrs/types/{index}") == "RoCE v2":
            found.append(index)
    return found


def _settings(machine: Machine) -> dict[str, str]:
    """All NCCL_* settings: the environment, which comes first, ~/.nccl.conf or NCCL_CONF_FILE, and /etc/nccl.conf."""
    environ = machine.environ
    own = environ.get("NCCL_CONF_FILE") or os.path.join(environ.get("HOME", "/"), ".nccl.conf")
    found: dict[str, str] = {}
    for path in ("etc/nccl.conf", own):
        found |= dict(
            re.findall(r"^\s*(NCCL_\w+)\s*=[ \t]*(.*?)\s*$", machine.text(path), re.MULTILINE)
        )
    return found | {name: value for name, value in environ.items() if name.startswith("NCCL_")}


def interfaces(machine: Machine) -> Finding:
    """The interfaces that Gloo, NCCL and TensorPipe are told to use."""
    present = machine.names("sys/class/net") or sorted(
        {interface for interface, _ in machine.addresses()}
    )
    given = _settings(machine)
    try:
        network.refuse_unknown({**machine.environ, **given}, present)
    except DistbootError as error:
        return refused(error)
    text = given.get("NCCL_SOCKET_IFNAME", "")
    if not text.startswith("^") or network.nccl_means(text[1:], "lo"):
        return ok(", ".join(present))
    seen = f"NCCL_SOCKET_IFNAME={short_repr(text)} replaces NCCL's own {_NCCLS_CHOICE}, so that it may take lo"
    remedy = f"NCCL_SOCKET_IFNAME={_NCCLS_CHOICE}, or the name of the interface that leads to the other nodes"
    return (warning if machine.one_node() else problem)(seen, remedy)


def nccl_rdma(machine: Machine) -> Finding:
    """Settings that take RDMA away from NCCL, or name a device that is not there."""
    given = _settings(machine)
    found = [port for port in machine.rdma_ports() if port.active]
    own = [port for port in found if port.kind != "EFA"]  # which a plugin serves, not NCCL itself
    disabled, net, hca = (
        given.get("NCCL_IB_DISABLE") == "1",
        given.get("NCCL_NET", ""),
        given.get("NCCL_IB_HCA", ""),
    )
    if net.upper() == "IB" and (disabled or not own):
        why = (
            "NCCL_IB_DISABLE=1" if disabled else "this host shows no InfiniBand or RoCE that is up"
        )
        return problem(
            f"NCCL_NET={short_repr(net)}, and {why}: NCCL does not start", "unset NCCL_NET"
        )
    if ((disabled and own) or (net.upper() == "SOCKET" and found)) and not machine.one_node():
        setting = "NCCL_IB_DISABLE" if disabled and own else "NCCL_NET"
        seen = f"{setting}={given[setting]}, and this host has {_describe(own or found)}: NCCL takes TCP"
        # A card for Ethernet always offers RoCE, and the network may not carry it.
        return (warning if (own or found)[0].kind == "RoCE" else problem)(seen, f"unset {setting}")
    if (
        hca
        and own
        and not hca.startswith("^")
        and not any(network.nccl_means(hca, port.device) for port in own)
    ):
        here = ", ".join(port.device for port in own)
        seen = f"NCCL_IB_HCA={short_repr(hca)}, and this host has {here}: NCCL takes TCP"
        return problem(seen, "unset NCCL_IB_HCA, or name one of these")
    return ok("nothing is set against it" if found else "no RDMA")


def nccl_settings(machine: Machine) -> list[Finding]:
    """Files that are not there, and settings that make a node slow."""
    given, found = _settings(machine), []
    for setting in ("NCCL_TOPO_FILE", "NCCL_CONF_FILE"):
        path = given.get(setting, "")
        if path and not machine.has(path):
            seen = f"{setting}={short_repr(path)}, and there is no such file here: NCCL continues without it"
            how = machine.how(
                f"-v {path}:{path}:ro", f"# mount {path} of the node (hostPath)", f"unset {setting}"
            )
            found.append(warning(seen, how))
    if (
        machine.azure()
        and not given.get("NCCL_TOPO_FILE")
        and len(machine.rdma_ports()) >= _SEVERAL
    ):
        seen = "NCCL_TOPO_FILE is not set, and Azure's virtual PCI bus does not show which card is close to which GPU"
        docker = "-v /opt/microsoft:/opt/microsoft:ro -v /etc/nccl.conf:/etc/nccl.conf:ro"
        pod = "# mount /opt/microsoft and /etc/nccl.conf of the node (hostPath), as Azure's HPC images have them"
        bare = "NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml, or that of another series (Azure/azhpc-images, topology/)"
        found.append(warning(seen, machine.how(docker, pod, bare)))
    plugin = given.get("NCCL_NET_PLUGIN", "none")
    if plugin != "none" and not any(map(machine.library, (plugin, f"libnccl-net-{plugin}.so"))):
        why = "and the dynamic linker finds no such library: NCCL continues without it"
        remedy = "name the folder of it in LD_LIBRARY_PATH, or unset NCCL_NET_PLUGIN"
        found.append(warning(f"NCCL_NET_PLUGIN={short_repr(plugin)}, {why}", remedy))
    for setting, what in (
        ("NCCL_P2P_DISABLE", "from GPU to GPU"),
        ("NCCL_SHM_DISABLE", "through shared memory"),
    ):
        if given.get(setting) == "1":
            seen = f"{setting}=1: the ranks of a node do not talk {what}"
            found.append(warning(seen, f"unset {setting}, once the reason for setting it is fixed"))
    with suppress(ValueError):
        threads, sockets = (
            int(given.get(each, "1")) for each in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
        )
        if threads * sockets > 64:
            seen = f"NCCL_SOCKET_NTHREADS={threads} times NCCL_NSOCKS_PERTHREAD={sockets} is more than 64, the most"
            found.append(warning(seen, "make one of them smaller"))
    return found or [ok(f"{len(given)} set" if given else "none set")]


ON_LINUX: Sequence[Check] = (
    rdma_devices,
    rdma_ports,
    rdma_libraries,
    rdma_gids,
    interfaces,
    nccl_rdma,
    nccl_settings,
)
