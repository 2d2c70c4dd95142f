"""Checks of NCCL's settings. Where they do not fit, NCCL silently uses something slower.

Facts: NVIDIA's user guide for NCCL, Environment Variables; NCCL, src/misc/socket.cc and
src/graph/xml.cc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...base.errors import DistbootError
from ...base.text import short_repr
from ...host import network
from .finding import (
    Finding,
    ok,
    problem,
    problem_if,
    refused,
    warning,
)
from .machine import Machine, Port, describe

# The interfaces that NCCL leaves out where no variable names some
_LEFT_OUT = "^docker,lo,virbr"
_SEVERAL_PORTS = 8  # of InfiniBand, as Azure's ND series has since version 4
_MOST_SOCKETS = 64
_SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "from GPU to GPU",
    "NCCL_SHM_DISABLE": "through shared memory",
}


def _settings(machine: Machine) -> dict[str, str]:
    """All NCCL_* settings: of the environment, else of ~/.nccl.conf, else of /etc/nccl.conf."""
    environ = machine.environ
    home = environ.get("HOME", "/")
    own = os.path.abspath(environ.get("NCCL_CONF_FILE") or os.path.join(home, ".nccl.conf"))
    found: dict[str, str] = {}
    for path in ("etc/nccl.conf", own):
        lines = re.findall(r"^\s*(NCCL_\w+)\s*=[ \t]*(.*?)\s*$", machine.text(path), re.MULTILINE)
        found.update(lines)
    set_here = {name: value for name, value in environ.items() if name.startswith("NCCL_")}
    return found | set_here


def interfaces(machine: Machine) -> Finding:
    """The interfaces that variables name for Gloo, NCCL and TensorPipe."""
    present = machine.names("sys/class/net")
    if not present:
        present = sorted({interface for interface, _ in machine.addresses()})
    given = _settings(machine)
    try:
        network.refuse_unknown({**machine.environ, **given}, present)
    except DistbootError as error:
        return refused(error)
    text = given.get("NCCL_SOCKET_IFNAME", "")
    if not text.startswith("^") or network.nccl_matches(text[1:], "lo"):
        return ok(", ".join(present))
    seen = (
        f"NCCL_SOCKET_IFNAME={short_repr(text)} replaces NCCL's own {_LEFT_OUT}, "
        "so that NCCL may use lo"
    )
    remedy = f"NCCL_SOCKET_IFNAME={_LEFT_OUT}, or the interface that leads to the other nodes"
    return problem_if(not machine.is_one_node(), seen, remedy)


def nccl_rdma(machine: Machine) -> Finding:
    """Settings that keep NCCL from RDMA, or name a device that is not there."""
    settings = _settings(machine)
    active = []
    own = []
    for port in machine.rdma_ports():
        if not port.is_active:
            continue
        active.append(port)
        if port.kind != "EFA":  # a plugin serves EFA, not NCCL itself
            own.append(port)
    found = [
        *_requires_infiniband(settings, own),
        *_excludes_rdma(machine, settings, active, own),
        *_names_unknown_device(settings, own),
    ]
    if found:
        return found[0]
    if not active:
        return ok("no RDMA")
    return ok("no setting excludes it")


def _requires_infiniband(settings: Mapping[str, str], own: Sequence[Port]) -> list[Finding]:
    net = settings.get("NCCL_NET", "")
    if net.upper() != "IB":
        return []
    if settings.get("NCCL_IB_DISABLE") == "1":
        why = "NCCL_IB_DISABLE=1"
    elif not own:
        why = "this host shows no InfiniBand or RoCE that is up"
    else:
        return []
    seen = f"NCCL_NET={short_repr(net)}, but {why}: NCCL does not start"
    return [problem(seen, "unset NCCL_NET")]


def _excludes_rdma(
    machine: Machine, settings: Mapping[str, str], active: Sequence[Port], own: Sequence[Port]
) -> list[Finding]:
    if settings.get("NCCL_IB_DISABLE") == "1" and own:
        setting = "NCCL_IB_DISABLE"
    elif settings.get("NCCL_NET", "").upper() == "SOCKET" and active:
        setting = "NCCL_NET"
    else:
        return []
    if machine.is_one_node():
        return []
    ports = own or active
    seen = f"{setting}={settings[setting]}, but this host has {describe(ports)}: NCCL uses TCP"
    # Every Ethernet card of this kind offers RoCE, also where the network does not carry it.
    return [problem_if(ports[0].kind != "RoCE", seen, f"unset {setting}")]


def _names_unknown_device(settings: Mapping[str, str], own: Sequence[Port]) -> list[Finding]:
    choice = settings.get("NCCL_IB_HCA", "")
    if not choice or choice.startswith("^") or not own:
        return []
    if any(network.nccl_matches(choice, port.device) for port in own):
        return []
    present = ", ".join(port.device for port in own)
    seen = f"NCCL_IB_HCA={short_repr(choice)}, but this host has {present}: NCCL uses TCP"
    return [problem(seen, "unset NCCL_IB_HCA, or name one of these")]


def nccl_settings(machine: Machine) -> list[Finding]:
    """Files that are not there, and settings that make a node slow."""
    settings = _settings(machine)
    found = [
        *_missing_files(machine, settings),
        *_missing_topology(machine, settings),
        *_missing_plugin(machine, settings),
        *_slow_settings(settings),
        *_too_many_sockets(settings),
    ]
    if found:
        return found
    if not settings:
        return [ok("none set")]
    return [ok(f"{len(settings)} set")]


def _missing_files(machine: Machine, settings: Mapping[str, str]) -> list[Finding]:
    found = []
    for setting in ("NCCL_TOPO_FILE", "NCCL_CONF_FILE"):
        path = settings.get(setting, "")
        if not path or machine.has(os.path.abspath(path)):
            continue
        seen = (
            f"{setting}={short_repr(path)}, but there is no such file here: "
            "NCCL continues without it"
        )
        remedy = machine.remedy(
            f"-v {path}:{path}:ro", f"# mount {path} of the node (hostPath)", f"unset {setting}"
        )
        found.append(warning(seen, remedy))
    return found


def _missing_topology(machine: Machine, settings: Mapping[str, str]) -> list[Finding]:
    if not machine.is_azure() or settings.get("NCCL_TOPO_FILE"):
        return []
    if len(machine.rdma_ports()) < _SEVERAL_PORTS:
        return []
    seen = (
        "NCCL_TOPO_FILE is not set, and Azure's virtual PCI bus does not show "
        "which card is close to which GPU"
    )
    remedy = machine.remedy(
        "-v /opt/microsoft:/opt/microsoft:ro -v /etc/nccl.conf:/etc/nccl.conf:ro",
        "# mount /opt/microsoft and /etc/nccl.conf of the node (hostPath), "
        "as Azure's HPC images have them",
        "NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml, or that of another series "
        "(Azure/azhpc-images, topology/)",
    )
    return [warning(seen, remedy)]


def _missing_plugin(machine: Machine, settings: Mapping[str, str]) -> list[Finding]:
    plugin = settings.get("NCCL_NET_PLUGIN", "none")
    if plugin == "none":
        return []
    if machine.has_library(plugin) or machine.has_library(f"libnccl-net-{plugin}.so"):
        return []
    seen = (
        f"NCCL_NET_PLUGIN={short_repr(plugin)}, but the dynamic linker finds no such library: "
        "NCCL continues without it"
    )
    remedy = "add its folder to LD_LIBRARY_PATH, or unset NCCL_NET_PLUGIN"
    return [warning(seen, remedy)]


def _slow_settings(settings: Mapping[str, str]) -> list[Finding]:
    found = []
    for setting, how in _SLOW_SETTINGS.items():
        if settings.get(setting) == "1":
            seen = f"{setting}=1: the ranks of a node do not send data {how}"
            remedy = f"unset {setting}, once the reason for setting it is fixed"
            found.append(warning(seen, remedy))
    return found


def _too_many_sockets(settings: Mapping[str, str]) -> list[Finding]:
    with suppress(ValueError):
        threads = int(settings.get("NCCL_SOCKET_NTHREADS", "1"))
        sockets = int(settings.get("NCCL_NSOCKS_PERTHREAD", "1"))
        if threads * sockets > _MOST_SOCKETS:
            seen = (
                f"NCCL_SOCKET_NTHREADS={threads} times NCCL_NSOCKS_PERTHREAD={sockets} "
                f"is more than {_MOST_SOCKETS}, NCCL's maximum"
            )
            return [warning(seen, "make one of them smaller")]
    return []
