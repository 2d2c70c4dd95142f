"""How many CPUs this process may use: its affinity, and the quota of its cgroup.

OpenMP starts a thread for each CPU of the affinity, in every rank: far too many where ranks share
the CPUs, or where a quota limits them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress

from ..base.text import listed_cpus

# Where the file system begins; tests use another one. pathlib would slow down every start.
Root = str | os.PathLike[str]

_THREADS = "OMP_NUM_THREADS"


def variables(
    ranks: int | None,
    environ: Mapping[str, str],
    root: Root = "/",
    bound: Collection[int] = (),
) -> dict[str, str]:
    """OMP_NUM_THREADS for each rank on this node, where OpenMP would start too many threads.

    `bound`: the CPUs to which a rank will be bound; its threads are as many.
    """
    if _THREADS in environ or ranks is None:
        return {}
    found = share(ranks, root)
    count = len(bound)
    if count:
        found = _within_quota(count, ranks, root)
    if found is None:
        return {}
    return {_THREADS: str(found)}


def share(ranks: int, root: Root) -> int | None:
    """CPUs for each of `ranks` ranks on this node, at least 1; None if each has all it sees."""
    own = affinity(root)
    if own is None:
        return None
    found = own
    # If the node has fewer CPUs than all ranks see together, they share them. Else the launcher has
    # bound each rank.
    available = of_all(root) or own
    if own * ranks > available:
        found = own // ranks
    found = _within_quota(found, ranks, root)
    if found >= own:
        return None
    return found


def _within_quota(found: int, ranks: int, root: Root) -> int:
    """So many CPUs, as far as the quota has them for each rank; at least 1."""
    limit = quota(root)
    if limit is not None:
        found = min(found, int(limit / ranks))
    return max(found, 1)


def affinity(root: Root = "/") -> int | None:
    """The number of CPUs that the kernel may run this process on; None if it is unknown."""
    with suppress(OSError, ValueError):
        own = listed_cpus(allowed(root))
        return len(own) or None
    return None


def allowed(root: Root) -> str:
    """The CPUs that the kernel may run this process on: `"0-3,8"`; empty: it does not say."""
    status = _read(root, "proc/self/status")
    # Cpus_allowed_list:	0-3,8
    _, _, rest = status.partition("Cpus_allowed_list:")
    listed, _, _ = rest.partition("\n")
    return listed.strip()


def bound(root: Root = "/") -> str:
    """The CPUs to which this process is bound: `"0-3,8"`; empty: it may use all, or is unknown."""
    if binding(root) is None:
        return ""
    return allowed(root)


def binding(root: Root = "/") -> tuple[int, int] | None:
    """The CPUs that this process may use, and those of the host; None if it may use them all."""
    own = affinity(root)
    every = of_all(root)
    if own is None or every is None:
        return None
    if own >= every:
        return None
    return own, every


def quota(root: Root = "/") -> float | None:
    """The CPU seconds per second that the cgroups of this process allow; None: no limit."""
    files: list[tuple[str, ...]] = []
    # 0::/kubepods.slice/…/cri-containerd-5f3c.scope       cpu.max: 200000 100000, or max 100000
    for folder in _cgroup_folders(root, ""):
        name = f"{folder}/cpu.max"
        files.append((name,))
    # 4:cpu,cpuacct:/docker/5f3c…       cpu.cfs_quota_us: 200000, or -1
    for folder in _cgroup_folders(root, "cpu"):
        limit_file = f"{folder}/cpu.cfs_quota_us"
        period_file = f"{folder}/cpu.cfs_period_us"
        files.append((limit_file, period_file))
    found = []
    for names in files:
        with suppress(OSError, ValueError):  # not a number: no limit
            text = " ".join(_read(root, name) for name in names)
            limit, period = map(int, text.split())
            if limit > 0:
                found.append(limit / period)
    return min(found, default=None)


def of_all(root: Root = "/") -> int | None:
    """The number of CPUs for all ranks on this node: those of the cgroup, or of the machine."""
    # 0-15,32-47
    unified = _cgroup_folders(root, "")
    cpusets = _cgroup_folders(root, "cpuset")
    files = [
        *map("{}/cpuset.cpus.effective".format, unified),
        *map("{}/cpuset.effective_cpus".format, cpusets),
        "sys/devices/system/cpu/online",
    ]
    for file in files:
        with suppress(OSError, ValueError):
            listed = _read(root, file)
            return len(listed_cpus(listed.strip()))
    return None


def _cgroup_folders(root: Root, controller: str) -> list[str]:
    """The folders of this process's cgroup and its parents (cgroups(7)), the innermost first.

    An empty controller stands for version 2. In a container the path may be the one on the host,
    with the mounted folder somewhere above it.
    """
    with suppress(OSError, ValueError):
        for line in _read(root, "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            if controller in names:
                # With several, the folder may have them in another order; systemd has a link
                tops = dict.fromkeys((controllers, controller))
                folders = []
                for top in tops:
                    folders += _with_parents(f"sys/fs/cgroup/{top}", path)
                return folders
    return []


def _with_parents(top: str, path: str) -> list[str]:
    """`("top", "/a/b")` -> `["top/a/b", "top/a", "top"]`."""
    folder = top.rstrip("/")
    found = [folder]
    names = filter(None, path.split("/"))
    for name in names:
        folder = f"{folder}/{name}"
        found.append(folder)
    found.reverse()
    return found


def _read(root: Root, path: str) -> str:
    full_path = os.path.join(root, path)
    with open(full_path, encoding="utf-8") as file:
        return file.read()
