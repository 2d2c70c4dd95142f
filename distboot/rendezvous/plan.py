"""How this process comes to join: what it knows of itself and of rank 0 becomes the plan of its agent."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ..base.errors import DistbootError
from ..base.process import proc_stat, started
from ..base.settings import heartbeat_timeout
from ..base.version import __version__
from ..detection import inherited
from ..detection.node_platform import NODES_OF_WORLD_SIZE
from ..detection.order import LAUNCHERS
from ..detection.placement import LEFT_OPEN, Placement
from ..host import (
    FRAMEWORK,
    accelerators,
    derived_port,
    network,
)
from .membership import EarlierAgent, JoinPlan
from .messages import WorkerInfo, as_problem

_CANDIDATES = 5
_PATIENCE_WITH_A_PROBLEM = 10.0  # seconds to tell the others of it
# Whose versions all ranks should have alike.
_FRAMEWORKS = (
    *("torch", "tensorflow", "tensorflow_cpu", "jax", "horovod", "deepspeed", "mpi4py"),
    *(
        "lightning",
        "pytorch_lightning",
        "accelerate",
        "transformers",
        "nvidia_nccl_cu12",
        "nvidia_nccl_cu13",
    ),
)
_FAMILIES = ("NCCL_", "GLOO_", "FI_")
# May well differ from host to host, or is set for one rank on purpose.
_OWN = re.compile(r".*_(SOCKET_IFNAME|HOSTID|IB_HCA|TOPO_FILE|(DEBUG|DUMP)(_.*)?)|.*_DUMP_FILE")
_MOST_SETTINGS = 80  # settings
_LONGEST_FACT = 200  # characters of a name or a value


def plan_of(
    placement: Placement,
    environ: Mapping[str, str],
    join_timeout: float,
    *,
    hosts: Sequence[str] = (),  # where rank 0 may be, if that is more than `master_addr`
    framework: str = "torch",  # that this rank is about to start
    on_cpu: bool = False,  # whether it will use no accelerator
    problem: DistbootError | None = None,  # why it cannot take part, as far as that is known
    ranks: int = 0,  # how many ranks this process starts, for its node; 0: it is one itself
    round: int = 0,  # noqa: A002 - of the job, that comes next
    max_restarts: int = 0,
    earlier: tuple[EarlierAgent, ...] = (),  # of the round before
    ending: float = 0.0,  # seconds for rank 0's agent to end its ranks of that round
) -> tuple[JoinPlan, DistbootError | None]:
    """The plan for a placement with an address and a port; and why this rank cannot take part, as the others hear."""
    try:
        network.refuse_unknown(environ)
    except DistbootError as error:
        problem = problem or error
    host = environ.get("DISTBOOT_HOST") or socket.gethostname()
    ids = accelerators.visible(environ)
    own = WorkerInfo(
        rank=placement.rank,
        launcher="distboot" if ranks else placement.launcher,
        host=host,
        node=_node(host),
        pid=os.getpid(),
        process=os.urandom(8).hex(),
        world_size=placement.world_size,
        facts=environment_facts(environ, len(ids), framework),
        device=None if on_cpu or ranks else accelerators.own(ids, environ, placement.local_rank),
        problem=None if problem is None else as_problem(problem),
        started=0.0 if round else _own_start(),
        detected=time.time(),
        ranks=ranks,
        round=round,
        max_restarts=max_restarts,
        heartbeat_timeout=heartbeat_timeout(environ),
        # What an agent of a node knows of itself is not about its ranks.
        **({} if ranks else {name: getattr(placement, name) for name in LEFT_OPEN}),
    )
    ports = candidate_ports(placement)
    # A rank of an earlier round, if one is left, does not find the store of this one
    first = round % len(ports)
    plan = JoinPlan(
        own=own,
        job=_job(placement, environ),
        secret=environ.get("DISTBOOT_SECRET", ""),
        hosts=tuple(hosts) or (str(placement.master_addr),),
        ports=tuple(ports[first:] + ports[:first]),
        is_certain=not hosts,
        source=placement.sources.get("master_addr", ""),
        doubt=_doubt(placement),
        size=_size(placement, environ),
        # One process per node says what all of them wait for: on rank 0's own node rank 1, as rank 0 may be missing.
        quiet=bool(placement.local_rank) and placement.rank != 1 and not ranks,
        again=inherited.about(placement, environ).met,
        join_timeout=join_timeout
        if problem is None
        else min(join_timeout, _PATIENCE_WITH_A_PROBLEM),
        earlier=earlier,
        ending=ending,
        programs=LAUNCHERS[placement.launcher].programs,
        name=placement.job_id or "",
    )
    return plan, problem


def candidate_ports(placement: Placement) -> list[int]:
    """The ports to try in this order, the same on all ranks."""
    job = f"{placement.job_id}:{placement.master_port}"
    derived = [derived_port(f"{job}:{number}") for number in range(1, _CANDIDATES + 1)]
    if LAUNCHERS[placement.launcher].serves_master_port:
        return derived
    return [placement.master_port or 0, *derived[1:]]


def _doubt(placement: Placement) -> str:
    """Why the number of nodes may be wrong; empty where it is sure."""
    if placement.sources.get("num_nodes") != NODES_OF_WORLD_SIZE:
        return ""
    return (
        f"WORLD_SIZE={placement.num_nodes} was taken for the number of nodes; if it counts processes or GPUs, set "
        "NUM_NODES to the number of nodes"
    )


def _size(placement: Placement, environ: Mapping[str, str]) -> str:
    """`"WORLD_SIZE=4"`: how many processes join, where no launcher that counts them has set it; else empty."""
    source = placement.sources.get("world_size", "")
    if source not in environ:
        return ""
    if LAUNCHERS[placement.launcher].programs:
        return ""
    return f"{source}={placement.world_size}"


def _job(placement: Placement, environ: Mapping[str, str]) -> str:
    """A digest of what tells this job from others. With the port, as torchrun's job id is often "none"."""
    _, outer = inherited.strip(environ)
    launcher = LAUNCHERS[placement.launcher]
    words = [placement.job_id, placement.master_port]
    # Then all ranks have inherited the same environment, from the same process
    if placement.num_nodes == 1:
        if outer.launches or outer.fields.get("launcher", placement.launcher) != placement.launcher:
            # Each process of an outer job may have started one
            words.append(environ[inherited.VARIABLE])
        elif launcher.same_port_for_all_jobs and placement.job_id is None:
            words.append(_ancestor(launcher.programs[0]))
    return inherited.digest(":".join(map(str, words)))


def _ancestor(module: str) -> int | None:
    """The process that runs this module, above this one; None: no process does, or it cannot be seen from here."""
    pid = os.getppid()
    with suppress(OSError, ValueError, IndexError):
        while pid > 1:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if module.encode() in file.read().split(b"\0"):
                    return pid
            pid = int(proc_stat(pid)[1])
    return None


def environment_facts(
    environ: Mapping[str, str], devices: int, framework: str
) -> tuple[tuple[str, str], ...]:
    """What all ranks should have alike, as pairs like ("torch", "2.13.0"); a setting's name ends in "=".

    Nothing is imported to learn a version: the names of the installed packages' metadata folders say it.
    """
    found = {
        # With its place: another Python on one node explains all other differences.
        "Python": f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}",
        "distboot": __version__,
        FRAMEWORK: framework,
        **_installed(sys.path),
        "accelerators": str(devices),
    }
    driver = accelerators.nvidia_driver()
    if driver is not None:
        found["NVIDIA driver"] = driver
    settings = sorted(
        name for name in environ if name.startswith(_FAMILIES) and not _OWN.fullmatch(name)
    )
    found |= {f"{name}=": environ[name] for name in settings[:_MOST_SETTINGS]}
    return tuple(
        sorted((name[:_LONGEST_FACT], value[:_LONGEST_FACT]) for name, value in found.items())
    )


def _installed(folders: Iterable[str]) -> dict[str, str]:
    """Versions of the frameworks that this Python would import."""
    found: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                # torch-2.13.0+cpu.dist-info, or Debian's torch-1.13.1.egg-info
                package, _, version = (
                    name.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")
                )
                if version and name.endswith("-info") and package.lower() in _FRAMEWORKS:
                    # The first on the path is the one that is imported
                    found.setdefault(package.lower(), version)
    return {name: found[name] for name in _FRAMEWORKS if name in found}


def _own_start() -> float:
    """When this process began, in seconds since the epoch; 0.0 where there is no /proc."""
    try:
        begin = started()
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    # 0: this /proc does not count it
    if not begin or begin > now:
        return 0.0
    return time.time() - (now - begin)


def _node(host: str) -> str:
    """What is equal on two ranks on one host, or in one container with its network."""
    boot = os.uname().nodename
    own_network = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()  # tells two hosts of the same name apart
    # Tells two containers of the same name on one host apart: each has its own, or is one node
    with suppress(OSError):
        own_network = str(os.stat("/proc/self/ns/net").st_ino)
    return f"{host}/{boot}/{own_network}"
