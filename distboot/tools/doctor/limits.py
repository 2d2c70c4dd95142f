"""Checks of a container's limits: CPUs, shared memory, locked memory, open files."""

from __future__ import annotations

import math
import re

from ...base import units
from ...base.text import counted, short_repr
from ...host import cpus as host_cpus
from .finding import (
    Finding,
    ok,
    problem,
    problem_if,
    unknown,
    warning,
)
from .machine import Machine

_MIB = 1 << 20
_GIB = 1 << 30
_DEFAULT_SHARED = 64 * _MIB  # Docker's, containerd's and Podman's
# NVIDIA's user guide for NCCL, Troubleshooting, "Sharing Data": --shm-size=1g --ulimit memlock=-1
_ENOUGH_SHARED = _GIB
_FEW_FILES = 1024  # the usual soft limit
_MANY_FILES = 65536
_IPC_LOCK = 14  # capability(7), linux/capability.h

_SHARED_POD = """\
volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]
containers: [{volumeMounts: [{name: shm, mountPath: /dev/shm}]}]"""
_MEMLOCK_POD = """\
containers: [{securityContext: {capabilities: {add: [IPC_LOCK]}}}]
# counts for root; else, on the node, LimitMEMLOCK=infinity in the unit of containerd"""
_FILES_POD = (
    "# has no field for it: raise LimitNOFILE of containerd on the node, "
    "or call `ulimit -n` in the command"
)


def cpus(machine: Machine) -> Finding:
    """Threads that each rank starts, compared with the CPUs that it may use."""
    allowed = host_cpus.affinity(machine.root)
    if allowed is None:
        return unknown("/proc/self/status does not tell the number of CPUs")
    usable = min(allowed, host_cpus.quota(machine.root) or allowed)
    ranks = machine.placement().local_world_size or 1
    seen = _cpus_seen(allowed, usable, ranks)
    threads = machine.environ.get("OMP_NUM_THREADS")
    # OpenMP also takes a list, one number for each level of nesting.
    if threads is not None and not (threads.isdecimal() and threads.isascii()):
        return unknown(f"{seen}; OMP_NUM_THREADS={short_repr(threads)}")
    if usable < ranks and usable < allowed:
        pod = f"containers: [{{resources: {{limits: {{cpu: {ranks * 4}}}}}}}]"
        remedy = machine.remedy(f"--cpus={ranks * 4}", pod, "ask the scheduler for more CPUs")
        return problem(f"{seen}: less than one for each rank", remedy)
    return _threads(seen, threads, allowed, host_cpus.share(ranks, machine.root))


def _cpus_seen(allowed: int, usable: float, ranks: int) -> str:
    seen = counted(allowed, "CPU")
    if usable < allowed:
        seen += f", with a quota (cgroup) of {usable:g}"
    if ranks > 1:
        seen += f", for {ranks} ranks"
    return seen


def _threads(seen: str, threads: str | None, allowed: int, share: int | None) -> Finding:
    """Compare OMP_NUM_THREADS, which `init` and the wrapper set to `share` if it is not set."""
    if threads is None and share is None:
        return ok(seen)
    if threads is None:
        return ok(f"{seen}; each rank gets OMP_NUM_THREADS={share}")
    most = share or allowed
    if int(threads) <= most:
        return ok(f"{seen}; OMP_NUM_THREADS={threads}")
    return warning(
        f"{seen}; OMP_NUM_THREADS={threads} is more than the {most} for each rank: "
        "the threads wait for each other",
        f"OMP_NUM_THREADS={most}, or unset it",
    )


def shared_memory(machine: Machine) -> Finding:
    """Shared memory: DataLoader workers pass batches in it, NCCL and Gloo data within a node."""
    remedy = machine.remedy(
        "--shm-size=8g",
        _SHARED_POD,
        "mount -o remount,size=8g /dev/shm",
        azureml="in the job's YAML: resources: {shm_size: 8g}",
    )
    try:
        size, free = machine.shared_memory()
    except OSError as error:
        return problem(f"there is no /dev/shm ({error.strerror})", remedy)
    seen = f"/dev/shm has {units.size(size)}, {units.size(free)} of it free"  # noqa: S108 - a text
    if size <= _DEFAULT_SHARED:
        why = "too little for DataLoader workers (they end with a bus error) and for NCCL"
        return problem(f"{seen}: {why}", remedy)
    if size < _ENOUGH_SHARED:
        why = "NCCL needs 1 GiB, and DataLoader workers need room for their batches"
        return warning(f"{seen}; {why}", remedy)
    if free < _DEFAULT_SHARED:
        remedy = "ls -l /dev/shm, and remove what ended jobs have left there"
        return problem(f"{seen}: it is full", remedy)
    return ok(seen)


def memlock(machine: Machine) -> Finding:
    """How much memory may be locked: RDMA locks all buffers that it sends or receives."""
    limits = _limits(machine, "Max locked memory")
    if limits is None:
        return unknown("/proc/self/limits does not tell how much memory may be locked")
    soft, _ = limits
    if soft == math.inf:
        return ok("unlimited")
    if _has_ipc_lock(machine):
        return ok(f"{units.size(soft)}, and CAP_IPC_LOCK, which lifts the limit")
    if not machine.rdma_ports():
        return ok(f"{units.size(soft)}, which is enough without RDMA")
    seen = (
        f"{units.size(soft)} may be locked: RDMA cannot register more for its buffers "
        "(Cannot allocate memory)"
    )
    remedy = machine.remedy(
        "--ulimit memlock=-1 --cap-add=IPC_LOCK",
        _MEMLOCK_POD,
        "ulimit -l unlimited; for all users: `* - memlock unlimited` in /etc/security/limits.conf",
    )
    return problem_if(soft < _GIB, seen, remedy)


def open_files(machine: Machine) -> Finding:
    """How many files may be open: rank 0's connections, tensors that DataLoader workers share."""
    limits = _limits(machine, "Max open files")
    if limits is None:
        return unknown("/proc/self/limits does not tell how many files may be open")
    soft, hard = limits
    ranks = machine.placement().world_size
    needed = ranks + 64  # some for the script
    remedy = machine.remedy(
        f"--ulimit nofile={_MANY_FILES}:{_MANY_FILES}",
        _FILES_POD,
        f"ulimit -n {_MANY_FILES}; for all users: `* - nofile {_MANY_FILES}` "
        "in /etc/security/limits.conf",
    )
    if hard < needed:
        seen = f"{hard:.0f} files may be open, but the {ranks} ranks need {needed} connections"
        return problem(seen, remedy)
    if soft == math.inf:
        return ok("unlimited")
    if soft > _FEW_FILES:
        return ok(f"{soft:.0f} may be open")
    if hard >= _MANY_FILES:
        remedy = f"ulimit -n {_MANY_FILES}, first in the command"
    return warning(
        f"{soft:.0f} files may be open (hard limit: {_no_limit_or(hard)}): "
        "many DataLoader workers end with `Too many open files`",
        remedy,
    )


def _limits(machine: Machine, title: str) -> tuple[float, float] | None:
    """Soft and hard limit, infinite where there is none; None if /proc does not tell."""
    # Max open files            1024                 1048576              files
    pattern = rf"^{title}\s+(\d+|unlimited)\s+(\d+|unlimited)\s"
    found = re.search(pattern, machine.text("proc/self/limits"), re.MULTILINE)
    if found is None:
        return None
    soft, hard = (float(word.replace("unlimited", "inf")) for word in found.groups())
    return soft, hard


def _no_limit_or(limit: float) -> str:
    if limit == math.inf:
        return "no limit"
    return f"{limit:.0f}"


def _has_ipc_lock(machine: Machine) -> bool:
    """Whether this process has CAP_IPC_LOCK in the first user namespace: it lifts the limit."""
    if machine.text("proc/self/uid_map").split() != ["0", "0", "4294967295"]:
        return False
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", machine.text("proc/self/status"), re.MULTILINE)
    if effective is None:
        return False
    return bool(int(effective[1], 16) >> _IPC_LOCK & 1)
