"""Limits that a container has and its image does not show: shared memory, locked memory, open files."""

from __future__ import annotations

from collections.abc import Iterator

from .finding import Finding, ok, problem, unknown, warning
from .machine import Machine
from .rdma import ports

_WHERE = "/dev/shm"  # noqa: S108 - not to write to
_MIB = 1 << 20
_GIB = 1 << 30
_DEFAULT_SHARED = 64 * _MIB  # Docker's, containerd's and Podman's
_ENOUGH_SHARED = (
    _GIB  # NVIDIA's user guide for NCCL, Troubleshooting, "Sharing Data": --shm-size=1g --ulimit memlock=-1
)
_FEW_FILES = 1024  # the usual soft limit
_IPC_LOCK = 14  # capability(7), linux/capability.h

_SHARED_POD = """\
volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]
containers: [{volumeMounts: [{name: shm, mountPath: /dev/shm}]}]"""


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """The memory where DataLoader workers pass batches, and NCCL and Gloo data between the ranks of a node."""
    name = "shared-memory"
    remedy = machine.how("--shm-size=8g", _SHARED_POD, "mount -o remount,size=8g /dev/shm")
    if machine.container() == "azureml":
        remedy = "in the job's YAML: resources: {shm_size: 8g}"
    try:
        size, free = machine.shared_memory()
    except OSError as error:
        yield problem(name, f"there is no {_WHERE} ({error.strerror})", remedy)
        return
    seen = f"{_WHERE} has {_size(size)}, {_size(free)} of it free"
    if size <= _DEFAULT_SHARED:
        yield problem(
            name, f"{seen}: too little for DataLoader workers (they end with a bus error) and for NCCL", remedy
        )
    elif size < _ENOUGH_SHARED:
        yield warning(name, f"{seen}; NCCL asks for 1 GiB, and DataLoader workers for room for their batches", remedy)
    elif free < _DEFAULT_SHARED:
        yield problem(name, f"{seen}: it is full", "ls -l /dev/shm, and remove what ended jobs have left there")
    else:
        yield ok(name, seen)


def memlock(machine: Machine) -> Iterator[Finding]:
    """How much memory may be locked, as RDMA locks all that it sends from and receives to."""
    name = "memlock"
    limits = _limits(machine, "Max locked memory")
    if limits is None:
        yield unknown(name, "/proc/self/limits does not say how much memory may be locked")
    elif limits[0] is None:
        yield ok(name, "unlimited")
    elif _may_lock(machine):
        yield ok(name, f"{_size(limits[0])}, and CAP_IPC_LOCK, which lifts the limit")
    elif not ports(machine):
        yield ok(name, f"{_size(limits[0])}, which is enough without RDMA")
    else:
        seen = f"{_size(limits[0])} may be locked: RDMA cannot register more for its buffers (Cannot allocate memory)"
        pod = (
            "containers: [{securityContext: {capabilities: {add: [IPC_LOCK]}}}]\n"
            "# counts for root; else LimitMEMLOCK=infinity in the unit of containerd on the node, which pods inherit"
        )
        bare = "ulimit -l unlimited; for everybody: `* - memlock unlimited` in /etc/security/limits.conf"
        remedy = machine.how("--ulimit memlock=-1 --cap-add=IPC_LOCK", pod, bare)
        yield (problem if limits[0] < _GIB else warning)(name, seen, remedy)


def open_files(machine: Machine) -> Iterator[Finding]:
    """How many files may be open: connections of rank 0, and tensors that DataLoader workers share."""
    name = "open-files"
    limits = _limits(machine, "Max open files")
    if limits is None:
        yield unknown(name, "/proc/self/limits does not say how many files may be open")
        return
    soft, hard = limits
    placement = machine.placement()
    needed = placement.world_size + 64 if placement is not None else 64
    more = machine.how(
        "--ulimit nofile=65536:65536",
        "# has no field for it: raise LimitNOFILE of containerd on the node, or call `ulimit -n` in the command",
        "ulimit -n 65536; for everybody: `* - nofile 65536` in /etc/security/limits.conf",
    )
    if hard is not None and hard < needed:
        yield problem(name, f"{hard} files may be open, and the {needed - 64} ranks need {needed} connections", more)
    elif soft is not None and soft <= _FEW_FILES:
        reachable = "ulimit -n 65536, first in the command" if hard is None or hard >= 65536 else more
        said = "no limit" if hard is None else str(hard)
        seen = f"{soft} files may be open (hard limit: {said}): many DataLoader workers end with `Too many open files`"
        yield warning(name, seen, reachable)
    else:
        yield ok(name, "unlimited" if soft is None else f"{soft} may be open")


def _limits(machine: Machine, title: str) -> tuple[int | None, int | None] | None:
    """Soft and hard limit, None where there is none; None instead if /proc does not say."""
    # Max open files            1024                 1048576              files
    for line in machine.text("proc/self/limits").splitlines():
        if line.startswith(title):
            soft, hard = line.removeprefix(title).split()[:2]
            return _limit(soft), _limit(hard)
    return None


def _limit(word: str) -> int | None:
    return None if word == "unlimited" else int(word)


def _may_lock(machine: Machine) -> bool:
    """Whether the kernel lets this process lock what it likes: the capability counts in the first user namespace."""
    if machine.text("proc/self/uid_map").split() != ["0", "0", "4294967295"]:
        return False
    lines = machine.text("proc/self/status").splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _IPC_LOCK & 1)


def _size(count: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count / 1024:.4g} KiB"
