"""Settings of NCCL that contradict each other or the machine. NCCL itself takes the consequences without a word."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from .. import interfaces
from ..errors import DistbootError, quoted
from .finding import Finding, ok, problem, refused, warning
from .machine import Machine
from .rdma import ports, said

# Facts below: NVIDIA's user guide for NCCL, Environment Variables; NCCL, src/misc/socket.cc and src/graph/xml.cc.
_OWN_CHOICE = "^docker,lo,virbr"  # what NCCL leaves out while nobody says which interfaces it is to take
_SEVERAL = 8  # InfiniBand ports, as Azure's ND series has since version 4


def settings(machine: Machine) -> dict[str, str]:
    """All NCCL_* settings: the environment, which comes first, ~/.nccl.conf or NCCL_CONF_FILE, and /etc/nccl.conf."""
    environ = machine.environ
    own = environ.get("NCCL_CONF_FILE") or os.path.join(environ.get("HOME", "/"), ".nccl.conf")
    found: dict[str, str] = {}
    for path in ("etc/nccl.conf", own):
        pairs = (line.split("=", 1) for line in machine.text(path).splitlines() if "=" in line)
        found |= {name.strip(): value.strip() for name, value in pairs if name.strip().startswith("NCCL_")}
    return found | {name: value for name, value in environ.items() if name.startswith("NCCL_")}


def interface_names(machine: Machine) -> Iterator[Finding]:
    """The interfaces that Gloo, NCCL and TensorPipe are told to use."""
    name = "interfaces"
    present = machine.names("sys/class/net") or sorted({interface for interface, _ in machine.addresses()})
    given = settings(machine)
    try:
        interfaces.refuse_unknown({**machine.environ, **given}, present)
    except DistbootError as error:
        yield refused(name, error)
        return
    text = given.get("NCCL_SOCKET_IFNAME", "")
    if text.startswith("^") and not _names(text[1:], "lo"):
        seen = f"NCCL_SOCKET_IFNAME={quoted(text)} replaces NCCL's own {_OWN_CHOICE}, so that it may take lo"
        remedy = f"NCCL_SOCKET_IFNAME={_OWN_CHOICE}, or the name of the interface that leads to the other nodes"
        yield (warning if machine.one_node() else problem)(name, seen, remedy)
    else:
        yield ok(name, ", ".join(present))


def nccl_rdma(machine: Machine) -> Iterator[Finding]:
    """Settings that take RDMA away from NCCL, or name a device that is not there."""
    name, given = "nccl-rdma", settings(machine)
    found = [port for port in ports(machine) if port.active]
    own = [port for port in found if port.kind != "EFA"]  # which a plugin serves, not NCCL itself
    disabled, net, hca = given.get("NCCL_IB_DISABLE") == "1", given.get("NCCL_NET", ""), given.get("NCCL_IB_HCA", "")
    if net.upper() == "IB" and (disabled or not own):
        why = "NCCL_IB_DISABLE=1" if disabled else "this host shows no InfiniBand or RoCE that is up"
        yield problem(name, f"NCCL_NET={quoted(net)}, and {why}: NCCL does not start", "unset NCCL_NET")
    elif ((disabled and own) or (net.upper() == "SOCKET" and found)) and not machine.one_node():
        said_so = "NCCL_IB_DISABLE" if disabled and own else "NCCL_NET"
        seen = f"{said_so}={given[said_so]}, and this host has {said(own or found)}: NCCL takes TCP"
        # A card for Ethernet always offers RoCE, and the network may not carry it.
        yield (warning if (own or found)[0].kind == "RoCE" else problem)(name, seen, f"unset {said_so}")
    elif hca and own and not hca.startswith("^") and not any(_names(hca, port.device) for port in own):
        here = ", ".join(port.device for port in own)
        seen = f"NCCL_IB_HCA={quoted(hca)}, and this host has {here}: NCCL takes TCP"
        yield problem(name, seen, "unset NCCL_IB_HCA, or name one of these")
    else:
        yield ok(name, "nothing is set against it" if found else "no RDMA")


def nccl_settings(machine: Machine) -> Iterator[Finding]:
    """Files that are not there, and settings that make a node slow."""
    name, given = "nccl-settings", settings(machine)
    found = []
    for setting in ("NCCL_TOPO_FILE", "NCCL_CONF_FILE"):
        path = given.get(setting, "")
        if path and not machine.has(path):
            seen = f"{setting}={quoted(path)}, and there is no such file here: NCCL goes on without it"
            how = machine.how(f"-v {path}:{path}:ro", f"# mount {path} of the node (hostPath)", f"unset {setting}")
            found.append(warning(name, seen, how))
    if machine.azure() and not given.get("NCCL_TOPO_FILE") and len(ports(machine)) >= _SEVERAL:
        seen = "NCCL_TOPO_FILE is not set, and Azure's virtual PCI bus does not show which card is close to which GPU"
        remedy = machine.how(
            "-v /opt/microsoft:/opt/microsoft:ro -v /etc/nccl.conf:/etc/nccl.conf:ro",
            "# mount /opt/microsoft and /etc/nccl.conf of the node (hostPath), as Azure's HPC images have them",
            "NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml, or that of another series (Azure/azhpc-images, topology/)",
        )
        found.append(warning(name, seen, remedy))
    plugin = given.get("NCCL_NET_PLUGIN", "none")
    if plugin != "none" and not any(map(machine.library, (plugin, f"libnccl-net-{plugin}.so"))):
        seen = (
            f"NCCL_NET_PLUGIN={quoted(plugin)}, and the dynamic linker finds no such library: NCCL goes on without it"
        )
        found.append(warning(name, seen, "name the folder of it in LD_LIBRARY_PATH, or unset NCCL_NET_PLUGIN"))
    for setting, what in (("NCCL_P2P_DISABLE", "from GPU to GPU"), ("NCCL_SHM_DISABLE", "through shared memory")):
        if given.get(setting) == "1":
            seen = f"{setting}=1: the ranks of a node do not talk {what}"
            found.append(warning(name, seen, f"unset {setting}, once what it was set for is mended"))
    with suppress(ValueError):
        threads, sockets = (int(given.get(each, "1")) for each in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
        if threads * sockets > 64:
            seen = f"NCCL_SOCKET_NTHREADS={threads} times NCCL_NSOCKS_PERTHREAD={sockets} is more than 64, the most"
            found.append(warning(name, seen, "make one of them smaller"))
    yield from found or [ok(name, f"{len(given)} set" if given else "none set")]


def _names(choice: str, device: str) -> bool:
    """Whether a list of NCCL's means this one: beginnings of names, or after a = whole ones; a port may follow."""
    words = [word.partition(":")[0] for word in choice.removeprefix("=").split(",")]
    return device in words if choice.startswith("=") else device.startswith(tuple(filter(None, words)))
