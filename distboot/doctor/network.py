"""Names, addresses and ports, as the other ranks will need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ..address import is_address, is_loopback, without_mapping
from ..errors import quoted
from .finding import Finding, ok, problem, unknown, warning
from .machine import Machine

# gRPC (TensorFlow, JAX) goes through these, in this order (gRPC, doc/environment_variables.md).
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")
_LISTENING = "0A"  # TCP_LISTEN, linux/net/tcp_states.h


def host_name(machine: Machine) -> Iterator[Finding]:
    """The own name, which Gloo looks up to find the address that it tells the other ranks."""
    name, host = "host-name", machine.host
    remedy = "GLOO_SOCKET_IFNAME=eth0 (the interface to the other nodes), or the right line in /etc/hosts"
    if machine.container() == "docker":
        remedy = "docker run --network=host, or --add-host NAME:ADDRESS with the address for the other nodes"
    elif machine.container() == "kubernetes":
        remedy = (
            "GLOO_SOCKET_IFNAME=eth0 in the container's env; Kubernetes writes /etc/hosts, unless hostNetwork is on"
        )
    try:
        found = [without_mapping(address) for address in machine.look_up(host)]
    except OSError as error:
        seen = f"{quoted(host)}, the name of this host, does not resolve: {error.strerror or error}"
        slow = isinstance(error, TimeoutError)  # and may yet be found
        yield (warning if slow or machine.one_node() else problem)(name, seen, remedy)
        return
    own = {without_mapping(address) for _, address in machine.addresses()}
    strange = [address for address in found if own and address.partition("%")[0] not in own]
    said = f"{quoted(host)} means {', '.join(dict.fromkeys(found))}"
    if all(map(is_loopback, found)):
        seen = f"{said}, which no other host can reach"
        yield ok(name, said) if machine.one_node() else warning(name, seen, remedy)
    elif strange:
        yield problem(name, f"{said}, and {strange[0]} is no address of this host", remedy)
    else:
        yield ok(name, said)


def master_address(machine: Machine) -> Iterator[Finding]:
    """The name of rank 0's host."""
    name, placement = "master-addr", machine.placement()
    address = placement.master_addr if placement is not None else None
    if placement is None or placement.world_size == 1:
        yield ok(name, "not needed")
    elif address is None:
        yield unknown(name, "nothing here says where rank 0 is", "python -m distboot show says what can be passed")
    elif is_address(address):
        yield ok(name, address)
    else:
        try:
            yield ok(name, f"{address} means {', '.join(dict.fromkeys(machine.look_up(address)))}")
        except OSError as error:
            seen = f"{quoted(address)} ({placement.sources['master_addr']}) does not resolve: {error.strerror or error}"
            remedy = (
                "wait, if its pod or host is still starting: the ranks try until the join timeout; or check the name"
            )
            yield warning(name, seen, remedy)


def proxies(machine: Machine) -> Iterator[Finding]:
    """Proxies that take what one rank sends to another."""
    name, environ = "proxies", machine.environ
    proxy = next((variable for variable in _PROXIES if environ.get(variable)), None)
    if proxy is None:
        yield ok(name, "none that gRPC would use")
        return
    placement = machine.placement()
    peer = placement.master_addr if placement is not None and placement.world_size > 1 else None
    spared = next((environ[variable] for variable in _NO_PROXY if environ.get(variable)), "")
    endings = tuple(word.strip().lstrip("*") for word in spared.split(",") if word.strip())
    if peer is None:
        yield ok(name, f"{proxy} is set; no peer to reach is known")
    elif is_loopback(peer) or peer.endswith(endings) or "" in endings:
        yield ok(name, f"{proxy} is set, and no_proxy spares {peer}")
    else:
        seen = f"{proxy} is set, and no_proxy does not name {peer}: gRPC (TensorFlow, JAX) sends what is for it there"
        yield warning(name, seen, f"no_proxy={','.join(filter(None, (spared, peer)))}, with all hosts of the job")


def ports(machine: Machine) -> Iterator[Finding]:
    """The port at which rank 0 is to listen."""
    name, placement = "ports", machine.placement()
    port = placement.master_port if placement is not None else None
    if placement is None or placement.world_size == 1 or port is None:
        yield ok(name, "none is needed before the ranks meet")
        return
    source = placement.sources.get("master_port", "")
    low, _, high = machine.text("proc/sys/net/ipv4/ip_local_port_range").partition("\t")
    if placement.rank == 0 and placement.launcher != "torchrun" and port in _listeners(machine):
        seen = f"somebody listens at port {port} ({source}) already: distboot takes another, torch alone does not"
        yield warning(name, seen, f"ss -ltnp 'sport = :{port}' names him; or set MASTER_PORT to a free port")
    elif source == "MASTER_PORT" and low.isdigit() and int(low) <= port <= int(high):
        seen = f"MASTER_PORT={port} is among the ports that the kernel gives to outgoing connections, {low} to {high}"
        yield warning(name, seen, "set MASTER_PORT below or above these, for example 29500")
    else:
        yield ok(name, f"{port} ({source})")


def _listeners(machine: Machine) -> set[int]:
    """The TCP ports of this network namespace at which somebody listens."""
    found = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        for line in machine.text(table).splitlines()[1:]:
            with suppress(ValueError, IndexError):
                # 0: 0100007F:81FF 00000000:0000 0A …
                _, local, _, state = line.split()[:4]
                if state == _LISTENING:
                    found.add(int(local.rpartition(":")[2], 16))
    return found
