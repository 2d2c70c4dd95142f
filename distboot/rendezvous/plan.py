"""How this process joins: what it knows of itself and of rank 0 becomes the plan of its agent.

`plan_of` builds a `JoinPlan` in two parts: the report about this rank (`WorkerInfo`), which rank 0
receives, and how to find rank 0.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..base.dataclass import replace
from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.process import program_above, started
from ..base.settings import heartbeat_timeout, share_env_setting
from ..base.text import cut
from ..base.version import __version__
from ..detection import inherited
from ..detection.node_platform import NODES_OF_WORLD_SIZE
from ..detection.order import LAUNCHERS
from ..detection.placement import OPTIONAL_NUMBERS, Placement, names_one_job
from ..host import (
    FRAMEWORK,
    accelerators,
    cpus,
    derived_port,
    network,
)
from .events import clock_time, own_clock
from .membership import EarlierAgent, JoinPlan
from .messages import WorkerInfo, as_problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..host.shared_variables import Shared

_CANDIDATES = 5
_STDERR = 2
_PATIENCE_WITH_A_PROBLEM = 10.0  # seconds to report it to the others
# Packages whose versions should be the same on all ranks
_FRAMEWORKS = (
    "torch",
    "tensorflow",
    "tensorflow_cpu",
    "jax",
    "horovod",
    "deepspeed",
    "mpi4py",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "nvidia_nccl_cu12",
    "nvidia_nccl_cu13",
)
# torch-2.13.0+cpu.dist-info, or Debian's torch-1.13.1.egg-info
_METADATA = pattern(r"([^-]+)-(.+)\.(?:dist|egg)-info")
_FAMILIES = ("NCCL_", "GLOO_", "FI_")
# These may differ from host to host, or are set for one rank on purpose.
_OWN = pattern(r".*_(SOCKET_IFNAME|HOSTID|IB_HCA|TOPO_FILE|(DEBUG|DUMP)(_.*)?)|.*_DUMP_FILE")
_MOST_SETTINGS = 80  # settings
_LONGEST_FACT = 200  # characters of a name or a value
_LONGEST_HOST = 253  # characters of a name, as in DNS


class _Part(NamedTuple):
    """The part of this process in the job, besides its placement; see `plan_of`."""

    framework: str
    on_cpu: bool
    ranks: int
    round: int
    max_restarts: int


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
    delay: float = 0.0,  # seconds before this round, also where all have joined
) -> tuple[JoinPlan, DistbootError | None]:
    """The plan for a placement with an address and a port, and why this rank cannot take part."""
    problem = problem or _problem_of(environ)
    part = _Part(framework, on_cpu, ranks, round, max_restarts)
    shared: Shared = ()
    unshared: list[str] = []
    patterns = share_env_setting(environ)
    is_sharing = bool(patterns) and placement.rank == 0
    if is_sharing and problem is None:
        from ..host import shared_variables  # here, as few jobs share any

        try:
            shared, unshared = shared_variables.shared(environ, patterns)
        except DistbootError as error:
            problem = error
    own = _own_report(placement, environ, part, problem)
    if problem is not None:
        join_timeout = min(join_timeout, _PATIENCE_WITH_A_PROBLEM)
    plan = JoinPlan(
        own=own,
        job=_job(placement, environ),
        secret=environ.get("DISTBOOT_SECRET", ""),
        hosts=tuple(hosts) or (str(placement.master_addr),),
        ports=_ports_in_round(placement, round),
        is_certain=not hosts,
        source=placement.sources.get("master_addr", ""),
        doubt=_doubt(placement),
        size=_size(placement, environ),
        quiet=_is_quiet(placement, ranks),
        again=inherited.about(placement, environ).met,
        join_timeout=join_timeout,
        earlier=earlier,
        ending=ending,
        delay=delay,
        programs=LAUNCHERS[placement.launcher].programs,
        unbind=LAUNCHERS[placement.launcher].unbind,
        name=placement.job_id or "",
        shared=shared,
        unshared=tuple(unshared),
    )
    return plan, problem


def _problem_of(environ: Mapping[str, str]) -> DistbootError | None:
    try:
        _refuse_long_host(environ)
        network.refuse_unknown(environ)
    except DistbootError as error:
        return error
    return None


def _refuse_long_host(environ: Mapping[str, str]) -> None:
    size = len(environ.get("DISTBOOT_HOST", ""))
    if size > _LONGEST_HOST:
        raise DistbootError(
            "broken-environment",
            f"DISTBOOT_HOST has {size} characters, and a name of a host at most {_LONGEST_HOST}",
            "unset it: the host's own name is used then",
        )


def _own_report(
    placement: Placement,
    environ: Mapping[str, str],
    part: _Part,
    problem: DistbootError | None,
) -> WorkerInfo:
    """What this rank reports to rank 0; or this agent of a node."""
    own_clock.read()
    host = environ.get("DISTBOOT_HOST") or socket.gethostname()
    host = host[:_LONGEST_HOST]
    bound = ""
    if not part.ranks:
        bound = cpus.bound()
    ids = accelerators.visible(environ)
    device = None
    started_at = 0.0
    if not part.on_cpu and not part.ranks:
        device = accelerators.own(ids, environ, placement.local_rank)
    if not part.round:
        started_at = _own_start()
    own = WorkerInfo(
        rank=placement.rank,
        launcher=placement.launcher,
        host=host,
        node=_node(host),
        pid=os.getpid(),
        process=os.urandom(8).hex(),
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        num_nodes=placement.num_nodes,
        facts=environment_facts(environ, len(ids), part.framework),
        device=device,
        started=started_at,
        detected=clock_time(),
        ranks=part.ranks,
        round=part.round,
        max_restarts=part.max_restarts,
        heartbeat_timeout=heartbeat_timeout(environ),
        cpus=bound,
        log=_stderr_file(),
    )
    if problem is not None:
        own = replace(own, problem=as_problem(problem))
    if part.ranks:
        # What an agent of a node knows of itself is not about its ranks.
        unknown: dict[str, Any] = dict.fromkeys(OPTIONAL_NUMBERS)
        own = replace(own, launcher="distboot", **unknown)
    return own


def _stderr_file() -> str:
    """What tells the file that is our stderr from others; empty: a stream that ranks share."""
    try:
        found = os.fstat(_STDERR)
    except OSError:
        return ""
    if stat.S_ISREG(found.st_mode):
        return f"{found.st_dev}:{found.st_ino}"
    return ""


def _ports_in_round(placement: Placement, round_: int) -> tuple[int, ...]:
    """The ports to try; a rank of an earlier round, if one is left, does not find this store."""
    ports = candidate_ports(placement)
    first = round_ % len(ports)
    return tuple(ports[first:] + ports[:first])


def _is_quiet(placement: Placement, ranks: int) -> bool:
    """Whether another process on this node prints what all of them wait for.

    On rank 0's own node that is rank 1, as rank 0 may be missing.
    """
    is_first = placement.local_rank in (None, 0)
    return not any((is_first, placement.rank == 1, ranks))


def candidate_ports(placement: Placement) -> list[int]:
    """The ports to try in this order, the same on all ranks."""
    ports = []
    for number in range(1, _CANDIDATES + 1):
        ports.append(derived_port(f"{placement.job_id}:{placement.master_port}:{number}"))
    if LAUNCHERS[placement.launcher].serves_master_port:
        return ports
    ports[0] = placement.master_port or 0
    return ports


def _doubt(placement: Placement) -> str:
    """Why the number of nodes may be wrong; empty: it is certain."""
    if placement.sources.get("num_nodes") != NODES_OF_WORLD_SIZE:
        return ""
    return (
        f"WORLD_SIZE={placement.num_nodes} was taken for the number of nodes; "
        "if it counts processes or GPUs, set NUM_NODES to the number of nodes"
    )


def _size(placement: Placement, environ: Mapping[str, str]) -> str:
    """`"WORLD_SIZE=4"`: how many processes join; empty if a launcher that counts them has set it."""
    source = placement.sources.get("world_size", "")
    is_counted = LAUNCHERS[placement.launcher].programs
    if is_counted or source not in environ:
        return ""
    return f"{source}={placement.world_size}"


def _job(placement: Placement, environ: Mapping[str, str]) -> str:
    """A digest that other jobs do not have. With the port: torchrun's job id is often "none"."""
    words: list[object] = [placement.job_id, placement.master_port]
    words += _words_of_outer_job(placement, environ)
    words += _words_of_program_above(placement)
    return inherited.digest(":".join(map(str, words)))


def _words_of_outer_job(placement: Placement, environ: Mapping[str, str]) -> list[object]:
    """What differs between jobs that the processes of an outer job have started; empty: none has.

    On one node all ranks have inherited the same environment, from the same process.
    """
    _, outer = inherited.restored(environ)
    outer_launcher = outer.fields.get("launcher", placement.launcher)
    is_inner = outer.launches or outer_launcher != placement.launcher
    if placement.num_nodes == 1 and is_inner:
        return [environ[inherited.VARIABLE]]
    return []


def _words_of_program_above(placement: Placement) -> list[object]:
    """What differs between jobs that start out with the same environment; empty: nothing does.

    The launcher has given no id: an allocation, in which several jobs may run, has the same for
    all.
    """
    launcher = LAUNCHERS[placement.launcher]
    has_own_id = names_one_job(placement.sources.get("job_id"))
    tells_jobs_apart = launcher.job_option or launcher.same_port_for_all_jobs
    if has_own_id or not tells_jobs_apart:
        return []
    program = program_above(launcher.programs)
    if program is None:  # in a container of its own
        return []
    value = program.option(launcher.job_option)
    if value is not None:
        return [value]
    if placement.num_nodes == 1:  # all ranks are below this very process
        return [program.pid]
    return []


def environment_facts(
    environ: Mapping[str, str], devices: int, framework: str
) -> tuple[tuple[str, str], ...]:
    """What should be the same on all ranks, as pairs like ("torch", "2.13.0").

    The name of a setting ends in "=". Nothing is imported to learn a version: the folders with the
    metadata of the installed packages have it in their names.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    found = {
        # With its place: a different Python on one node explains all other differences.
        "Python": f"{version} in {sys.prefix}",
        "distboot": __version__,
        FRAMEWORK: framework,
        **_installed(sys.path),
        "accelerators": str(devices),
    }
    driver = accelerators.nvidia_driver()
    if driver is not None:
        found["NVIDIA driver"] = driver
    for name in list(filter(_is_setting, sorted(environ)))[:_MOST_SETTINGS]:
        found[f"{name}="] = environ[name]
    facts = []
    for name, value in found.items():
        facts.append((name[:_LONGEST_FACT], cut(value, _LONGEST_FACT)))
    return tuple(sorted(facts))


def _is_setting(name: str) -> bool:
    return name.startswith(_FAMILIES) and not _OWN.fullmatch(name)


def _installed(folders: Iterable[str]) -> dict[str, str]:
    """Versions of the frameworks that this Python would import."""
    versions: dict[str, str] = {}
    for folder in folders:
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(folder or ".")
        for match in filter(None, map(_METADATA.fullmatch, names)):
            # The first on the path is the one that is imported.
            versions.setdefault(match[1].lower(), match[2])
    found = {}
    for name in _FRAMEWORKS:
        if name in versions:
            found[name] = versions[name]
    return found


def _own_start() -> float:
    """When this process began, in seconds since the epoch; 0.0 without /proc."""
    try:
        begin = started()
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    # 0: this /proc does not count it
    if not begin or begin > now:
        return 0.0
    return max(clock_time() - (now - begin), 0.0)


def _node(host: str) -> str:
    """A text that is the same for two ranks on one host, or in one container with its network."""
    boot = os.uname().nodename
    own_network = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()  # tells two hosts of the same name apart
    # Tells two containers of the same name on one host apart: each has its own, or is one node
    with suppress(OSError):
        own_network = str(os.stat("/proc/self/ns/net").st_ino)
    return f"{host}/{boot}/{own_network}"
