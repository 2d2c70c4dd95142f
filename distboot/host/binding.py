"""Which CPUs each rank of a node is bound to, so that no two share one.

| `--bind`      | a rank gets |
|---------------|-------------|
| `accelerator` | its part of the CPUs beside its accelerator: those of the same NUMA node |
| `numa`        | its part of all CPUs, in the order of NUMA nodes |
| `auto`        | as `accelerator` where the kernel says that of each rank, else as `numa` |

A part is of whole cores, with all their hardware threads, as long as there is a core for each rank.
Only CPUs count that this process may use.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..base.errors import DistbootError
from ..base.text import listed_cpus
from . import accelerators

Cpus = tuple[int, ...]


class _Core(NamedTuple):
    """A core, with those of its hardware threads that this process may use."""

    numa_node: int
    package: int
    number: int  # in its package
    threads: Cpus


def cpus_of_ranks(
    kind: str,
    ranks: int,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    allowed: Sequence[int] | None = None,
) -> list[Cpus]:
    """The CPUs of each rank of this node, by local rank.

    Args:
        kind: a value of `--bind` other than `none`.
        ranks: how many there are on this node.
        environ: for the accelerators that the ranks see.
        root: where the file system begins; tests use another one.
        allowed: the CPUs to divide; None: those that this process may use.

    Raises:
        DistbootError: `usage`: there are fewer CPUs than ranks, or the kernel does not say which of
            them are beside the accelerators.
    """
    if allowed is None:
        allowed = _allowed()
    if len(allowed) < ranks:
        raise DistbootError(
            "usage",
            f"--bind {kind} for {ranks} ranks, and this process may use only {len(allowed)} CPUs",
            "leave --bind (or DISTBOOT_BIND) out, or start fewer ranks on this node",
        )
    cores = _cores(allowed, root)
    if kind != "numa":
        numa_nodes = _beside_accelerators(ranks, environ, root)
        if _have_room(numa_nodes, cores):
            return _parts_beside(numa_nodes, cores)
    if kind == "accelerator":
        raise DistbootError(
            "usage",
            "--bind accelerator, and the kernel does not say for each of "
            f"{ranks} ranks which CPUs are beside its accelerator",
            "--bind numa divides the CPUs without accelerators",
        )
    return _parts(cores, ranks)


def _allowed() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise DistbootError(
            "usage",
            "--bind (or DISTBOOT_BIND): this system binds no process to CPUs",
            "leave it out",
        )
    return sorted(os.sched_getaffinity(0))


def _cores(allowed: Sequence[int], root: Path) -> list[_Core]:
    numa_node_of = _numa_nodes(root)
    threads: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for cpu in sorted(allowed):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package = _number(topology / "physical_package_id", 0)
        core = _number(topology / "core_id", cpu)
        threads[numa_node_of.get(cpu, 0), package, core].append(cpu)
    return [_Core(*place, tuple(found)) for place, found in sorted(threads.items())]


def _numa_nodes(root: Path) -> dict[int, int]:
    """The NUMA node of each CPU; empty: the kernel knows none."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        with suppress(OSError, ValueError):  # a node without CPUs has an empty list
            listed = (folder / "cpulist").read_text().strip()
            found.update(dict.fromkeys(listed_cpus(listed), number))
    return found


def _beside_accelerators(ranks: int, environ: Mapping[str, str], root: Path) -> list[int | None]:
    """The NUMA node of the accelerator of each rank; None: it is not known."""
    ids = accelerators.visible(environ, root)
    addresses = accelerators.pci_addresses(root)
    found: list[int | None] = []
    for local_rank in range(ranks):
        own = accelerators.own(ids, environ, local_rank)
        address = addresses.get(own or "", "none")
        # -1 where the machine has only one, or does not tell
        number = _number(root / f"sys/bus/pci/devices/{address}/numa_node", -1)
        if number < 0:
            found.append(None)
        else:
            found.append(number)
    return found


def _have_room(numa_nodes: Sequence[int | None], cores: Sequence[_Core]) -> bool:
    """Whether the NUMA node of each rank is known, and all have CPUs for their ranks."""
    cpus: Counter[int | None] = Counter()
    for core in cores:
        cpus[core.numa_node] += len(core.threads)
    ranks = Counter(numa_nodes)
    return ranks <= cpus


def _parts_beside(numa_nodes: Sequence[int | None], cores: Sequence[_Core]) -> list[Cpus]:
    """The CPUs of each rank: a part of those of its NUMA node."""
    cores_of: defaultdict[int | None, list[_Core]] = defaultdict(list)
    for core in cores:
        cores_of[core.numa_node].append(core)
    parts = {}
    for node, count in Counter(numa_nodes).items():
        parts[node] = iter(_parts(cores_of[node], count))
    return [next(parts[node]) for node in numa_nodes]


def _parts(cores: Sequence[_Core], count: int) -> list[Cpus]:
    """So many equal parts of these cores."""
    units = [core.threads for core in cores]
    if len(units) < count:
        units = _single_threads(units)
    found = []
    for place in range(count):
        first = place * len(units) // count
        end = (place + 1) * len(units) // count
        found.append(tuple(cpu for threads in units[first:end] for cpu in threads))
    return found


def _single_threads(cores: Sequence[Cpus]) -> list[Cpus]:
    """Each hardware thread by itself, the first one of each core before any second one."""
    found = []
    for place in range(max(map(len, cores))):
        found += [threads[place : place + 1] for threads in cores if len(threads) > place]
    return found


def _number(path: Path, default: int) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return default
