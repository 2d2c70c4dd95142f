"""`run --nproc-per-node`: one process a node, pod or container starts the ranks there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from ..detection.detect import detect, launcher_of
from ..detection.export import merged, of_one_process
from ..detection.placement import NUMBERS, Placement
from ..errors import DistbootError
from ..host import accelerators, cpus
from ..rendezvous.job_info import JobInfo
from ..settings import RANK
from ..text import log_line

T = TypeVar("T")
S = TypeVar("S")

# The variables for a platform that types mpirun itself: Open MPI 4, and 5.
_UNBOUND = (
    "mpirun --bind-to none, srun --cpu-bind=none; where a platform starts mpirun, set in the environment of the job "
    "OMPI_MCA_hwloc_base_binding_policy=none and PRTE_MCA_hwloc_default_binding_policy=none"
)


def count_of(wanted: str, placement: Placement, environ: Mapping[str, str]) -> int:
    """How many ranks this process is to start.

    Raises:
        DistbootError: `usage`, it is not the only one on its node, or what is to be counted is not there.
    """
    launcher = launcher_of(placement)
    here = environ.get(launcher.local_count) or str(placement.local_world_size or 1)
    if here != "1" or placement.local_rank:
        many = here if here.isdigit() and here != "1" else "several"
        raise DistbootError(
            "usage",
            f"--nproc-per-node, but {placement.launcher} started {many} processes on this node",
            "start one process a node, or leave --nproc-per-node out",
        )
    if wanted.isdigit():
        return int(wanted)
    found, all_cpus = len(accelerators.visible(environ)), cpus.affinity() or os.cpu_count()
    count = {"gpu": found, "cpu": all_cpus}.get(wanted, found or all_cpus)
    if not count:
        why = ": no accelerator is visible" if wanted == "gpu" else ", and the number of CPUs is not known"
        raise DistbootError("usage", f"--nproc-per-node {wanted}{why} here", "give the number of processes")
    return count


def warn_if_bound(placement: Placement) -> None:
    """Say that the ranks will be slow, as they inherit that the launcher has bound this process to a few CPUs."""
    own, there = cpus.affinity(), cpus.of_all()
    if placement.launcher != "single" and own is not None and there is not None and own < there:
        bound = f"{placement.launcher} has bound this process to {own} of {there} CPUs, and so all ranks of this node"
        log_line(placement.who, f"warning: {bound}: {_UNBOUND}")


def base_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for all ranks: without what says that each of them is this one process."""
    others = merged(of_one_process(environ), environ).items()
    # PET_* are torchrun's options; TORCHELASTIC_* those of an agent further out, whose store no rank must use.
    of_nodes = ("PET_", "TORCHELASTIC_")
    return {name: value for name, value in others if name not in (*RANK, "TF_CONFIG") and not name.startswith(of_nodes)}


def jobs_of(job: JobInfo, ranks: Sequence[int], environ: Mapping[str, str]) -> list[tuple[JobInfo, dict[str, str]]]:
    """What each rank of this node holds, once the nodes have met, and the environment with its numbers."""
    membership = job.membership
    assert membership is not None
    found = []
    for rank in ranks:
        numbers = {"rank": rank, "world_size": membership.world_size, **asdict(membership.place(rank))}
        own = {name: str(numbers[field]) for name, field in zip(RANK, NUMBERS, strict=True)}
        where = {"MASTER_ADDR": str(job.placement.master_addr), "MASTER_PORT": str(job.placement.master_port)}
        one = job.of_rank(detect({**environ, **own, **where}, launcher="distboot"))
        found.append((one, {**environ, **own}))
    return found


def at_once(work: Callable[[T], S], each: Sequence[T]) -> list[S]:
    """Do something for each rank at the same time, as they may wait for each other."""
    if len(each) == 1:
        return [work(each[0])]
    from concurrent.futures import ThreadPoolExecutor  # here, as only several ranks need it

    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(work, each))
