"""Checks of names, addresses, ports and proxies: what the ranks need to connect to each other."""

from __future__ import annotations

import re

from ..detection.parse import is_loopback
from ..detection.placement import Placement
from ..host.network import NO_PROXIES, PROXIES
from ..text import is_address, short_repr, without_mapping
from .finding import Finding, ok, problem, problem_if, unknown, warning
from .machine import Machine

# 0: 0100007F:81FF 00000000:0000 0A …, where 0A is TCP_LISTEN (linux/net/tcp_states.h).
_LISTENING = r"^\s*\d+: [0-9A-F]+:([0-9A-F]+) \S+ 0A\b"


def host_name(machine: Machine) -> Finding:
    """The name of this host, which Gloo resolves to the address that it gives to other ranks."""
    name = short_repr(machine.host)
    remedy = _host_name_remedy(machine)
    try:
        found = [without_mapping(address) for address in machine.look_up(machine.host)]
    except OSError as error:
        seen = f"{name}, the name of this host, does not resolve: {error.strerror or error}"
        may_resolve_later = isinstance(error, TimeoutError)
        return problem_if(not may_resolve_later and not machine.is_one_node(), seen, remedy)
    seen = f"{name} resolves to {', '.join(dict.fromkeys(found))}"
    if all(map(is_loopback, found)):
        if machine.is_one_node():
            return ok(seen)
        return warning(f"{seen}, which no other host can reach", remedy)
    foreign = _foreign_address(machine, found)
    if foreign is not None:
        return problem(f"{seen}, but {foreign} is not an address of this host", remedy)
    return ok(seen)


def _host_name_remedy(machine: Machine) -> str:
    docker = "--network=host, or --add-host NAME:ADDRESS with the address for the other nodes"
    pod = (
        "GLOO_SOCKET_IFNAME=eth0 in the container's env; "
        "Kubernetes writes /etc/hosts, unless hostNetwork is on"
    )
    bare = (
        "GLOO_SOCKET_IFNAME=eth0 (the interface to the other nodes), "
        "or the right line in /etc/hosts"
    )
    return machine.remedy(docker, pod, bare, kubernetes=pod, azureml=bare)


def _foreign_address(machine: Machine, found: list[str]) -> str | None:
    """The first address that no interface of this host has; None also if they are unknown."""
    own = {without_mapping(address) for _, address in machine.addresses()}
    if not own:
        return None
    for address in found:
        if address.partition("%")[0] not in own:
            return address
    return None


def master_addr(machine: Machine) -> Finding:
    """The address of rank 0."""
    placement = machine.placement()
    address = placement.master_addr
    if placement.world_size == 1:
        return ok("not needed")
    if address is None:
        remedy = "python -m distboot show lists what can be passed"
        return unknown("the environment does not tell where rank 0 is", remedy)
    if is_address(address):
        return ok(address)
    try:
        found = machine.look_up(address)
    except OSError as error:
        source = placement.sources["master_addr"]
        why = error.strerror or error
        remedy = (
            "wait, if its pod or host is still starting: the ranks retry until the join timeout; "
            "or check the name"
        )
        return warning(f"{short_repr(address)} ({source}) does not resolve: {why}", remedy)
    return ok(f"{address} resolves to {', '.join(dict.fromkeys(found))}")


def ports(machine: Machine) -> Finding:
    """The port that rank 0 will listen on."""
    placement = machine.placement()
    port = placement.master_port
    if placement.world_size == 1 or port is None:
        return ok("not needed before the ranks meet")
    source = placement.sources.get("master_port", "")
    if _listens_here(placement) and port in _listening_ports(machine):
        return warning(
            f"port {port} ({source}) is already in use: distboot takes another, torch does not",
            f"find the process with: ss -ltnp 'sport = :{port}'; or set MASTER_PORT to a free port",
        )
    low, _, high = machine.text("proc/sys/net/ipv4/ip_local_port_range").partition("\t")
    if source == "MASTER_PORT" and low.isdigit() and int(low) <= port <= int(high):
        return warning(
            f"MASTER_PORT={port} is one of the ports that the kernel uses for outgoing "
            f"connections, {low} to {high}",
            "set MASTER_PORT below or above these, for example 29500",
        )
    return ok(f"{port} ({source})")


def _listens_here(placement: Placement) -> bool:
    # torchrun's agent already listens at this port.
    return placement.rank == 0 and placement.launcher != "torchrun"


def _listening_ports(machine: Machine) -> set[int]:
    """The TCP ports of this network namespace that a process listens on."""
    tables = "\n".join(map(machine.text, ("proc/net/tcp", "proc/net/tcp6")))
    return {int(port, 16) for port in re.findall(_LISTENING, tables, re.MULTILINE)}


def proxies(machine: Machine) -> Finding:
    """Proxies that intercept connections between ranks."""
    proxy = _first_set(machine, PROXIES)
    if proxy is None:
        return ok("none that gRPC would use")
    placement = machine.placement()
    peer = placement.master_addr
    if placement.world_size == 1 or peer is None:
        return ok(f"{proxy} is set; no peer to reach is known")
    no_proxy = ""
    variable = _first_set(machine, NO_PROXIES)
    if variable is not None:
        no_proxy = machine.environ[variable]
    if is_loopback(peer) or _spares(no_proxy, peer):
        return ok(f"{proxy} is set, and no_proxy excludes {peer} from it")
    return warning(
        f"{proxy} is set, but no_proxy does not name {peer}: "
        "gRPC (TensorFlow, JAX) connects through the proxy",
        f"no_proxy={','.join(filter(None, (no_proxy, peer)))}, with all hosts of the job",
    )


def _first_set(machine: Machine, variables: tuple[str, ...]) -> str | None:
    for variable in variables:
        if machine.environ.get(variable):
            return variable
    return None


def _spares(no_proxy: str, host: str) -> bool:
    """Whether gRPC connects directly to a host: `no_proxy` lists endings of names, `*` is all."""
    endings = [word.strip().lstrip("*") for word in no_proxy.split(",") if word.strip()]
    return host.endswith(tuple(endings))
