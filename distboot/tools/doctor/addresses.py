"""Checks of names, addresses, ports and proxies: what the ranks need to connect to each other."""

from __future__ import annotations

import re

from ...base.errors import reason_of
from ...base.table import first_that_holds
from ...base.text import is_address, short_repr, without_mapping
from ...detection.order import LAUNCHERS
from ...detection.parse import is_loopback
from ...host.network import NO_PROXIES, PROXIES
from .finding import (
    Finding,
    ok,
    problem,
    problem_if,
    unknown,
    warning,
)
from .machine import Machine

# 0: 0100007F:81FF 00000000:0000 0A …, where 0A is TCP_LISTEN (linux/net/tcp_states.h).
_LISTENING = r"^\s*\d+: [0-9A-F]+:([0-9A-F]+) \S+ 0A\b"


def host_name(machine: Machine) -> Finding:
    """The name of this host, which Gloo resolves to the address that it gives to other ranks."""
    try:
        found = machine.look_up(machine.host)
    except OSError as error:
        return _does_not_resolve(machine, error)
    addresses = dict.fromkeys(map(_plain, found))
    seen = f"{short_repr(machine.host)} resolves to {', '.join(addresses)}"
    remedy = _host_name_remedy(machine)
    is_one_node = machine.is_one_node()
    only_loopback = all(map(is_loopback, addresses))
    own = _own_addresses(machine)
    loopback = next(filter(is_loopback, addresses), "")
    outer = [address for address in addresses if not is_loopback(address)]
    foreign = next((address for address in sorted(outer) if address not in own), "")
    return first_that_holds(
        (only_loopback and is_one_node, ok(seen)),
        (only_loopback, warning(f"{seen}, which no other host can reach", remedy)),
        (
            own != set() and foreign != "",
            problem(f"{seen}, but {foreign} is not an address of this host", remedy),
        ),
        (
            loopback != "" and not is_one_node,
            warning(f"{seen}, and no other host can reach {loopback}", remedy),
        ),
        (True, ok(seen)),
    )


def _does_not_resolve(machine: Machine, error: OSError) -> Finding:
    name = short_repr(machine.host)
    seen = f"{name}, the name of this host, does not resolve: {reason_of(error)}"
    may_resolve_later = isinstance(error, TimeoutError)
    is_severe = not may_resolve_later and not machine.is_one_node()
    return problem_if(is_severe, seen, _host_name_remedy(machine))


def _own_addresses(machine: Machine) -> set[str]:
    """Empty if the kernel does not tell."""
    return {_plain(address) for _, address in machine.addresses()}


def _plain(address: str) -> str:
    """`"fe80::1%eth0"` -> `"fe80::1"`, `"::ffff:10.0.0.1"` -> `"10.0.0.1"`."""
    without_zone, _, _ = address.partition("%")
    return without_mapping(without_zone)


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
        remedy = (
            "wait, if its pod or host is still starting: the ranks retry until the join timeout; "
            "or check the name"
        )
        return warning(
            f"{short_repr(address)} ({source}) does not resolve: {reason_of(error)}", remedy
        )
    return ok(f"{address} resolves to {', '.join(dict.fromkeys(found))}")


def ports(machine: Machine) -> Finding:
    """The port that rank 0 will listen on."""
    placement = machine.placement()
    port = placement.master_port
    if placement.world_size == 1 or port is None:
        return ok("not needed before the ranks meet")
    source = placement.sources.get("master_port", "")
    # torchrun's agent already listens at this port.
    will_listen = placement.rank == 0 and not LAUNCHERS[placement.launcher].serves_master_port
    if will_listen and port in _listening_ports(machine):
        return warning(
            f"port {port} ({source}) is already in use: distboot takes another, torch does not",
            f"find the process with: ss -ltnp 'sport = :{port}'; or set MASTER_PORT to a free port",
        )
    ephemeral = _ephemeral_ports(machine)
    if source == "MASTER_PORT" and port in ephemeral:
        return warning(
            f"MASTER_PORT={port} is one of the ports that the kernel uses for outgoing "
            f"connections, {ephemeral[0]} to {ephemeral[-1]}",
            "set MASTER_PORT below or above these, for example 29500",
        )
    return ok(f"{port} ({source})")


def _ephemeral_ports(machine: Machine) -> range:
    """The ports that the kernel gives to outgoing connections; none if it does not tell."""
    # 32768	60999
    text = machine.text("proc/sys/net/ipv4/ip_local_port_range")
    low, _, high = text.partition("\t")
    if not low.isdigit():
        return range(0)
    return range(int(low), int(high) + 1)


def _listening_ports(machine: Machine) -> set[int]:
    """The TCP ports of this network namespace that a process listens on."""
    tables = "\n".join(map(machine.text, ("proc/net/tcp", "proc/net/tcp6")))
    return {int(port, 16) for port in re.findall(_LISTENING, tables, re.MULTILINE)}


def proxies(machine: Machine) -> Finding:
    """Proxies that intercept connections between ranks."""
    proxy, _ = _first_set(machine, PROXIES)
    if not proxy:
        return ok("none that gRPC would use")
    placement = machine.placement()
    peer = placement.master_addr
    if placement.world_size == 1 or peer is None:
        return ok(f"{proxy} is set; no peer to reach is known")
    _, no_proxy = _first_set(machine, NO_PROXIES)
    if is_loopback(peer) or _spares(no_proxy, peer):
        return ok(f"{proxy} is set, and no_proxy excludes {peer} from it")
    seen = (
        f"{proxy} is set, but no_proxy does not name {peer}: "
        "gRPC (TensorFlow, JAX) connects through the proxy"
    )
    hosts = ",".join(filter(None, (no_proxy, peer)))
    return warning(seen, f"no_proxy={hosts}, with all hosts of the job")


def _first_set(machine: Machine, variables: tuple[str, ...]) -> tuple[str, str]:
    """Name and value of the first of these variables that is set; both empty if none is."""
    variable = next(filter(machine.environ.get, variables), "")
    return variable, machine.environ.get(variable, "")


def _spares(no_proxy: str, host: str) -> bool:
    """Whether gRPC connects directly to a host: `no_proxy` lists endings of names, `*` is all."""
    words = map(str.strip, no_proxy.split(","))
    endings = tuple(word.lstrip("*") for word in filter(None, words))
    return host.endswith(endings)
