"""What the start of the job itself depends on: the launcher's variables, CPUs and threads, the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

from .. import cpus as machine_cpus
from ..detection import detect, launcher_of
from ..errors import DistbootError, printable, quoted
from .finding import Finding, ok, problem, refused, unknown, warning
from .machine import Machine


def launcher(machine: Machine) -> Iterator[Finding]:
    """Whether the environment says who this process is."""
    name = "launcher"
    try:
        placement = detect(machine.environ)
    except DistbootError as error:
        yield refused(name, error)
        return
    if placement.node_level is not None:
        yield ok(
            name, f"node {placement.rank} of {placement.world_size}, and no rank: {printable(placement.node_level)}"
        )
    elif placement.launcher == "single":
        yield ok(name, "none: one process, alone")
    else:
        yield ok(name, f"rank {placement.rank} of {placement.world_size}, by {launcher_of(placement).title}")


def cpus(machine: Machine) -> Iterator[Finding]:
    """Threads that each rank starts against the CPUs that it may use."""
    name = "cpus"
    allowed, quota = machine_cpus.affinity(machine.root), machine_cpus.quota(machine.root)
    if allowed is None:
        yield unknown(name, "/proc/self/status does not say how many CPUs there are")
        return
    usable = min(allowed, quota or allowed)
    placement = machine.placement()
    ranks = (placement.local_world_size if placement is not None else None) or 1
    share = machine_cpus.share(ranks, machine.root)
    said = f"{allowed} CPU{'s' if allowed > 1 else ''}"
    if usable < allowed:
        said += f", and by its quota (cgroup) the time of {usable:g}"
    if ranks > 1:
        said += f", for {ranks} ranks"
    given = machine.environ.get("OMP_NUM_THREADS")
    # OpenMP also takes a list, one number for each level of nesting.
    if given is not None and not (given.isdecimal() and given.isascii()):
        yield unknown(name, f"{said}; OMP_NUM_THREADS={quoted(given)}")
    elif usable < ranks and usable < allowed:
        pod = f"containers: [{{resources: {{limits: {{cpu: {ranks * 4}}}}}}}]"
        remedy = machine.how(f"--cpus={ranks * 4}", pod, "ask the scheduler for more CPUs")
        yield problem(name, f"{said}: less than one for each rank", remedy)
    elif given is None:
        yield ok(name, said if share is None else f"{said}; each rank gets OMP_NUM_THREADS={share}")
    elif int(given) <= (share or allowed):
        yield ok(name, f"{said}; OMP_NUM_THREADS={given}")
    else:
        seen = f"{said}; OMP_NUM_THREADS={given} is more than the {share or allowed} for each rank: they take turns"
        yield warning(name, seen, f"OMP_NUM_THREADS={share or allowed}, or unset it")


def clock(machine: Machine) -> Iterator[Finding]:
    """A clock that is behind: certificates are not valid yet, and credentials not or no more."""
    name = "clock"
    said = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(machine.now))
    if machine.now < machine.since - 86400:  # in another time zone somebody may have set the date by hand
        since = time.strftime("%Y-%m-%d", time.gmtime(machine.since))
        seen = f"{said}, and distboot was installed here on {since}"
        yield problem(name, seen, "set the clock of the host (chronyc makestep): a container has the clock of its host")
    else:
        yield ok(name, f"{said}; doctor --job compares it with those of the other ranks")
