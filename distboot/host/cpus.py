"""How many CPUs this process may use: its affinity, and the quota of its cgroup, which nothing else shows.

OpenMP starts a thread for each CPU of the affinity, in every rank: many times too many where ranks share the CPUs, or
where a quota stops them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

# Where the file system begins, another in tests; pathlib would slow every start
Root = str | os.PathLike[str]

_THREADS = "OMP_NUM_THREADS"


def variables(ranks: int | None, environ: Mapping[str, str], root: Root = "/") -> dict[str, str]:
    """The number of threads for each of the ranks on this node, if it is not set and OpenMP would start too many."""
    found = None if ranks is None or _THREADS in environ else share(ranks, root)
    return {} if found is None else {_THREADS: str(found)}


def share(ranks: int, root: Root = "/") -> int | None:
    """How many CPUs each of so many ranks on this node has, one at least; None where it has all that it sees."""
    own = affinity(root)
    if own is None:
        return None
    # What all of them together cannot have for themselves is shared; else the launcher has bound each to its own.
    is_shared = own * ranks > (of_all(root) or own)
    limits = [own // ranks if is_shared else own]
    limited = quota(root)
    if limited is not None:
        limits.append(int(limited / ranks))
    found = max(min(limits), 1)
    return found if found < own else None


def affinity(root: Root = "/") -> int | None:
    """How many CPUs the kernel may put this process on; None where it does not say."""
    # Cpus_allowed_list:	0-3,8
    with suppress(OSError, ValueError, StopIteration):
        lines = _read(root, "proc/self/status").splitlines()
        return _counted(
            next(line for line in lines if line.startswith("Cpus_allowed_list:")).split()[1]
        )
    return None


def quota(root: Root = "/") -> float | None:
    """How many CPUs' worth of time the cgroups of this process give it, the smallest of them; None: no limit."""
    # 0::/kubepods.slice/…/cri-containerd-5f3c.scope       cpu.max: 200000 100000, or max 100000
    files: list[tuple[str, ...]] = [(f"{folder}/cpu.max",) for folder in _folders(root, "")]
    # 4:cpu,cpuacct:/docker/5f3c…       cpu.cfs_quota_us: 200000, or -1
    files += [
        (f"{folder}/cpu.cfs_quota_us", f"{folder}/cpu.cfs_period_us")
        for folder in _folders(root, "cpu")
    ]
    found = []
    for names in files:
        with suppress(OSError, ValueError):  # no number: no limit
            limit, period = map(int, " ".join(_read(root, name) for name in names).split())
            if limit > 0:
                found.append(limit / period)
    return min(found, default=None)


def of_all(root: Root = "/") -> int | None:
    """How many CPUs there are for all ranks on this node: those of the cgroup, or of the machine."""
    # 0-15,32-47
    files = [f"{folder}/cpuset.cpus.effective" for folder in _folders(root, "")]
    files += [f"{folder}/cpuset.effective_cpus" for folder in _folders(root, "cpuset")]
    for file in (*files, "sys/devices/system/cpu/online"):
        with suppress(OSError, ValueError):
            return _counted(_read(root, file).strip())
    return None


def _counted(listed: str) -> int:
    """The length of a list of CPUs, for example "0-3,8"."""
    spans = [span.split("-") for span in listed.split(",")]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)


def _folders(root: Root, controller: str) -> list[str]:
    """The folders of this process's cgroup and of all that it is in (cgroups(7)); no controller: version 2.

    In a container the path may be the one that the host sees, and what is mounted begins further down.
    """
    with suppress(OSError, ValueError):
        for line in _read(root, "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                names = [name for name in path.split("/") if name]
                return [
                    "/".join(["sys/fs/cgroup", controllers, *names[:end]])
                    for end in range(len(names), -1, -1)
                ]
    return []


def _read(root: Root, path: str) -> str:
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()
