"""What the start of the job depends on: the launcher's variables, names, addresses and ports, CPUs, the clock; and the
limits that a container has and its image does not show: shared memory, locked memory, open files.
"""

from __future__ import annotations

import re
import time

from .. import surroundings
from ..detection.detect import LAUNCHERS, detect
from ..detection.parse import is_loopback
from ..errors import DistbootError
from ..host import cpus as of_host
from ..host.network import NO_PROXIES, PROXIES
from ..settings import misspelled
from ..text import counted, is_address, short_repr, without_mapping
from . import Check, Finding, Machine, ok, problem, refused, unknown, warning

# 0: 0100007F:81FF 00000000:0000 0A …, where 0A is TCP_LISTEN (linux/net/tcp_states.h).
_LISTENING = r"^\s*\d+: [0-9A-F]+:([0-9A-F]+) \S+ 0A\b"

_MIB = 1 << 20
_GIB = 1 << 30
_DEFAULT_SHARED = 64 * _MIB  # Docker's, containerd's and Podman's
# NVIDIA's user guide for NCCL, Troubleshooting, "Sharing Data": --shm-size=1g --ulimit memlock=-1
_ENOUGH_SHARED = _GIB
_FEW_FILES = 1024  # the usual soft limit
_IPC_LOCK = 14  # capability(7), linux/capability.h

_SHARED_POD = """\
volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]
containers: [{volumeMounts: [{name: shm, mountPath: /dev/shm}]}]"""


def launcher(machine: Machine) -> Finding:
    """Whether the environment says who this process is."""
    try:
        placement = detect(machine.environ)
    except DistbootError as error:
        return refused(error)
    number = f"{placement.rank} of {placement.world_size}"
    if placement.node_level is not None:
        return ok(f"node {number}, and not a rank: {placement.node_level}")
    if placement.launcher == "single":
        return ok("none: one process, alone")
    return ok(f"rank {number}, by {LAUNCHERS[placement.launcher].title}")


def allocation(machine: Machine) -> list[Finding]:
    """Whether a batch system or a hostfile has tasks or hosts that the job leaves unused."""
    placement = machine.placement()
    found = surroundings.unused(placement, machine.environ, read=machine.text)
    if found is None:
        return []
    return [warning(surroundings.described(placement, found), found.remedy)]


def settings(machine: Machine) -> list[Finding]:
    """The variables that look like misspelled settings."""
    found = misspelled(machine.environ).items()
    return [
        warning(f"unknown variable {name} is ignored", f"did you mean {meant}?")
        for name, meant in found
    ]


def host_name(machine: Machine) -> Finding:
    """The own name, which Gloo looks up to find the address that it tells the other ranks."""
    docker = "--network=host, or --add-host NAME:ADDRESS with the address for the other nodes"
    pod = "GLOO_SOCKET_IFNAME=eth0 in the container's env; Kubernetes writes /etc/hosts, unless hostNetwork is on"
    bare = "GLOO_SOCKET_IFNAME=eth0 (the interface to the other nodes), or the right line in /etc/hosts"
    remedy = machine.how(docker, pod, bare, kubernetes=pod, azureml=bare)
    name = short_repr(machine.host)
    try:
        found = [without_mapping(address) for address in machine.look_up(machine.host)]
    except OSError as error:
        seen = f"{name}, the name of this host, does not resolve: {error.strerror or error}"
        slow = isinstance(error, TimeoutError)  # and may yet be found
        return (warning if slow or machine.one_node() else problem)(seen, remedy)
    own = {without_mapping(address) for _, address in machine.addresses()}
    strange = [address for address in found if own and address.partition("%")[0] not in own]
    seen = f"{name} means {', '.join(dict.fromkeys(found))}"
    if all(map(is_loopback, found)):
        return (
            ok(seen)
            if machine.one_node()
            else warning(f"{seen}, which no other host can reach", remedy)
        )
    if strange:
        return problem(f"{seen}, and {strange[0]} is not an address of this host", remedy)
    return ok(seen)


def master_addr(machine: Machine) -> Finding:
    """The name of rank 0's host."""
    placement = machine.placement()
    address = placement.master_addr
    if placement.world_size == 1:
        return ok("not needed")
    if address is None:
        return unknown(
            "nothing here says where rank 0 is", "python -m distboot show says what can be passed"
        )
    if is_address(address):
        return ok(address)
    try:
        return ok(f"{address} means {', '.join(dict.fromkeys(machine.look_up(address)))}")
    except OSError as error:
        source, why = placement.sources["master_addr"], error.strerror or error
        remedy = "wait, if its pod or host is still starting: the ranks try until the join timeout; or check the name"
        return warning(f"{short_repr(address)} ({source}) does not resolve: {why}", remedy)


def proxies(machine: Machine) -> Finding:
    """Proxies that take what one rank sends to another."""
    environ = machine.environ
    proxy = next((variable for variable in PROXIES if environ.get(variable)), None)
    if proxy is None:
        return ok("none that gRPC would use")
    placement = machine.placement()
    peer = placement.master_addr if placement.world_size > 1 else None
    spared = next((environ[variable] for variable in NO_PROXIES if environ.get(variable)), "")
    endings = tuple(word.strip().lstrip("*") for word in spared.split(",") if word.strip())
    if peer is None:
        return ok(f"{proxy} is set; no peer to reach is known")
    # Of "*" nothing is left, with which all names end
    if is_loopback(peer) or peer.endswith(endings):
        return ok(f"{proxy} is set, and no_proxy spares {peer}")
    seen = f"{proxy} is set, and no_proxy does not name {peer}: gRPC (TensorFlow, JAX) connects through the proxy"
    return warning(
        seen, f"no_proxy={','.join(filter(None, (spared, peer)))}, with all hosts of the job"
    )


def ports(machine: Machine) -> Finding:
    """The port at which rank 0 is to listen."""
    placement = machine.placement()
    port = placement.master_port
    if placement.world_size == 1 or port is None:
        return ok("none is needed before the ranks meet")
    source = placement.sources.get("master_port", "")
    low, _, high = machine.text("proc/sys/net/ipv4/ip_local_port_range").partition("\t")
    if placement.rank == 0 and placement.launcher != "torchrun" and port in _listeners(machine):
        seen = f"port {port} ({source}) is in use already: distboot takes another, torch alone does not"
        return warning(
            seen,
            f"find the process with: ss -ltnp 'sport = :{port}'; or set MASTER_PORT to a free port",
        )
    if source == "MASTER_PORT" and low.isdigit() and int(low) <= port <= int(high):
        seen = f"MASTER_PORT={port} is among the ports that the kernel gives to outgoing connections, {low} to {high}"
        return warning(seen, "set MASTER_PORT below or above these, for example 29500")
    return ok(f"{port} ({source})")


def _listeners(machine: Machine) -> set[int]:
    """The TCP ports of this network namespace at which some process listens."""
    tables = "\n".join(map(machine.text, ("proc/net/tcp", "proc/net/tcp6")))
    return {int(port, 16) for port in re.findall(_LISTENING, tables, re.MULTILINE)}


def cpus(machine: Machine) -> Finding:
    """Threads that each rank starts against the CPUs that it may use."""
    allowed, quota = of_host.affinity(machine.root), of_host.quota(machine.root)
    if allowed is None:
        return unknown("/proc/self/status does not say how many CPUs there are")
    usable = min(allowed, quota or allowed)
    ranks = machine.placement().local_world_size or 1
    share = of_host.share(ranks, machine.root)
    seen = counted(allowed, "CPU")
    if usable < allowed:
        seen += f", and by its quota (cgroup) the time of {usable:g}"
    if ranks > 1:
        seen += f", for {ranks} ranks"
    given = machine.environ.get("OMP_NUM_THREADS")
    # OpenMP also takes a list, one number for each level of nesting.
    if given is not None and not (given.isdecimal() and given.isascii()):
        return unknown(f"{seen}; OMP_NUM_THREADS={short_repr(given)}")
    if usable < ranks and usable < allowed:
        pod = f"containers: [{{resources: {{limits: {{cpu: {ranks * 4}}}}}}}]"
        remedy = machine.how(f"--cpus={ranks * 4}", pod, "ask the scheduler for more CPUs")
        return problem(f"{seen}: less than one for each rank", remedy)
    if given is None:
        return ok(seen if share is None else f"{seen}; each rank gets OMP_NUM_THREADS={share}")
    if int(given) <= (share or allowed):
        return ok(f"{seen}; OMP_NUM_THREADS={given}")
    seen = f"{seen}; OMP_NUM_THREADS={given} is more than the {share or allowed} for each rank: they take turns"
    return warning(seen, f"OMP_NUM_THREADS={share or allowed}, or unset it")


def clock(machine: Machine) -> Finding:
    """A clock that is behind: certificates and credentials are not valid yet, or no longer."""
    seen = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(machine.now))
    # In another time zone it may have been set by hand to the local date
    if machine.now >= machine.since - 86400:
        return ok(f"{seen}; doctor --job compares it with those of the other ranks")
    since = time.strftime("%Y-%m-%d", time.gmtime(machine.since))
    remedy = "set the clock of the host (chronyc makestep): a container has the clock of its host"
    return problem(f"{seen}, and distboot was installed here on {since}", remedy)


def shared_memory(machine: Machine) -> Finding:
    """The memory where DataLoader workers pass batches, and NCCL and Gloo data between the ranks of a node."""
    azureml = "in the job's YAML: resources: {shm_size: 8g}"
    remedy = machine.how(
        "--shm-size=8g", _SHARED_POD, "mount -o remount,size=8g /dev/shm", azureml=azureml
    )
    try:
        size, free = machine.shared_memory()
    except OSError as error:
        return problem(f"there is no /dev/shm ({error.strerror})", remedy)
    seen = f"/dev/shm has {_size(size)}, {_size(free)} of it free"  # noqa: S108 - not to write to
    if size <= _DEFAULT_SHARED:
        return problem(
            f"{seen}: too little for DataLoader workers (they end with a bus error) and for NCCL",
            remedy,
        )
    if size < _ENOUGH_SHARED:
        return warning(
            f"{seen}; NCCL asks for 1 GiB, and DataLoader workers for room for their batches",
            remedy,
        )
    if free < _DEFAULT_SHARED:
        return problem(
            f"{seen}: it is full", "ls -l /dev/shm, and remove what ended jobs have left there"
        )
    return ok(seen)


def memlock(machine: Machine) -> Finding:
    """How much memory may be locked, as RDMA locks all that it sends from and receives to."""
    limits = _limits(machine, "Max locked memory")
    if not limits:
        return unknown("/proc/self/limits does not say how much memory may be locked")
    soft = limits[0]
    if soft is None:
        return ok("unlimited")
    if _may_lock(machine):
        return ok(f"{_size(soft)}, and CAP_IPC_LOCK, which lifts the limit")
    if not machine.rdma_ports():
        return ok(f"{_size(soft)}, which is enough without RDMA")
    seen = f"{_size(soft)} may be locked: RDMA cannot register more for its buffers (Cannot allocate memory)"
    pod = (
        "containers: [{securityContext: {capabilities: {add: [IPC_LOCK]}}}]\n"
        "# counts for root; else LimitMEMLOCK=infinity in the unit of containerd on the node, which pods inherit"
    )
    bare = (
        "ulimit -l unlimited; for all users: `* - memlock unlimited` in /etc/security/limits.conf"
    )
    remedy = machine.how("--ulimit memlock=-1 --cap-add=IPC_LOCK", pod, bare)
    return (problem if soft < _GIB else warning)(seen, remedy)


def open_files(machine: Machine) -> Finding:
    """How many files may be open: connections of rank 0, and tensors that DataLoader workers share."""
    limits = _limits(machine, "Max open files")
    if not limits:
        return unknown("/proc/self/limits does not say how many files may be open")
    soft, hard = limits
    ranks = machine.placement().world_size
    needed = ranks + 64  # some for the script
    pod = "# has no field for it: raise LimitNOFILE of containerd on the node, or call `ulimit -n` in the command"
    bare = "ulimit -n 65536; for all users: `* - nofile 65536` in /etc/security/limits.conf"
    more = machine.how("--ulimit nofile=65536:65536", pod, bare)
    if hard is not None and hard < needed:
        return problem(
            f"{hard} files may be open, and the {ranks} ranks need {needed} connections", more
        )
    if soft is None:
        return ok("unlimited")
    if soft > _FEW_FILES:
        return ok(f"{soft} may be open")
    limit = "no limit" if hard is None else str(hard)
    seen = f"{soft} files may be open (hard limit: {limit}): many DataLoader workers end with `Too many open files`"
    return warning(
        seen, "ulimit -n 65536, first in the command" if hard is None or hard >= 65536 else more
    )


def _limits(machine: Machine, title: str) -> list[int | None]:
    """Soft and hard limit, None where it is unlimited; nothing if /proc does not say."""
    # Max open files            1024                 1048576              files
    pattern = rf"^{title}\s+(\d+|unlimited)\s+(\d+|unlimited)\s"
    found = re.search(pattern, machine.text("proc/self/limits"), re.MULTILINE)
    return [None if word == "unlimited" else int(word) for word in found.groups()] if found else []


def _may_lock(machine: Machine) -> bool:
    """Whether the kernel lets this process lock what it likes: the capability counts in the first user namespace."""
    if machine.text("proc/self/uid_map").split() != ["0", "0", "4294967295"]:
        return False
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", machine.text("proc/self/status"), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _IPC_LOCK & 1)


def _size(count: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count / 1024:.4g} KiB"


CHECKS: tuple[Check, ...] = (
    launcher,
    allocation,
    settings,
    host_name,
    master_addr,
    ports,
    proxies,
    clock,
)
ON_LINUX: tuple[Check, ...] = (cpus, shared_memory, memlock, open_files)
