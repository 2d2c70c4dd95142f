"""The options of `run`, and where they end, as the rest is the script's; and how many ranks --nproc-per-node means."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from .. import frameworks
from ..base import settings
from ..base.errors import DistbootError
from ..base.text import did_you_mean, log_line
from ..detection.detect import LAUNCHERS, NODE_PLATFORMS
from ..detection.export import LOCAL_RANK, empty_local_rank
from ..detection.node_platform import ranks_per_node
from ..detection.placement import Placement
from ..host import cpus
from .main import Parser
from .target import Nested, Target

# The variables for a platform that types mpirun itself: Open MPI 4, and 5.
_UNBOUND = (
    "mpirun --bind-to none, srun --cpu-bind=none; where a platform starts mpirun, set in the environment of the job "
    "OMPI_MCA_hwloc_base_binding_policy=none and PRTE_MCA_hwloc_default_binding_policy=none"
)
_OPTION = re.compile(r"--?[A-Za-z][\w-]*", re.ASCII)
_WITH_EXEC = "cannot be used with --exec, because the wrapper is replaced by the command"


def _text(holds: Callable[[str], object], problem: str) -> Callable[[str], str]:
    """What an option has to be; `problem` is what it is not, "{} is not a number", say."""

    def check(text: str) -> str:
        if not holds(text):
            raise ArgumentTypeError(problem.format(repr(text)))
        return text

    return check


def _framework(text: str) -> str:
    """The name of a framework for the wrapper; the names for `init` will do."""
    name, names = frameworks.FILES.get(text, text), tuple(dict.fromkeys(frameworks.FILES.values()))
    if name not in names:
        meant = did_you_mean(text, names)
        raise ArgumentTypeError(
            f"{text!r} is not a valid framework: {meant}they are {', '.join(names)}"
        )
    return name


_OPTIONS = f"""\
--join-timeout SECONDS  how long to wait for all ranks to join (default: DISTBOOT_JOIN_TIMEOUT, or 300)
--grace SECONDS  how long the child may take to exit after TERM, before KILL (default: DISTBOOT_GRACE, or 30)
--framework NAME  what the script uses: torch (the default, also for frameworks built on it), deepspeed, horovod,
  tensorflow, jax, mpi, none; distboot also exports the variables that it reads: HOROVOD_*, TF_CONFIG, …
--pass-local-rank NAME  pass the local rank to the script, for example as {LOCAL_RANK}=3 (=NAME: in another spelling);
  without it, the local rank that torch.distributed.launch or DeepSpeed's launcher passes is removed; with
  --framework deepspeed, a script that has such an option gets it
--exec  replace the wrapper by the command: no failure detection and no grace; not with --framework horovod or
  tensorflow, because the wrapper holds a port for their scripts
--log-prefix  begin each line of the output with its rank and host
--log-json  write each line of distboot's own as JSON, like DISTBOOT_LOG=json
--log-dir DIR  also append the output to a file for each rank: DIR/rank-3.log
--report FILE  write a report of the job, on rank 0's host: where each rank ran, how it started and ended, which one
  failed first; one HTML page if FILE ends in .html, else JSON (default: DISTBOOT_REPORT, or none)
to restart the ranks after a rank fails or a node is lost
--max-restarts N  end all ranks when one fails, let the agents meet, and start the command again, at most N times
  (default: DISTBOOT_MAX_RESTARTS, or 0); the script continues from its checkpoint
--restart-delay SECONDS  how long to wait before each restart (default: DISTBOOT_RESTART_DELAY, or 0)
--restart-window SECONDS  a second failure at the same place in the code within this time counts as a bug, and stops
  the job instead; 0: never (default: DISTBOOT_RESTART_WINDOW, or 600)
for launches of one process per node, pod or container
--nproc-per-node N|auto  start N processes here, each a rank, with the node rank, the number of nodes and the address
  found (gpu: one per accelerator; cpu: one per CPU; auto: as many as the platform says, else gpu, or cpu if there
  are none; default: DISTBOOT_NPROC_PER_NODE)"""
_VARIABLES = {
    "join_timeout": "DISTBOOT_JOIN_TIMEOUT",
    "grace": "DISTBOOT_GRACE",
    "max_restarts": "DISTBOOT_MAX_RESTARTS",
    "restart_delay": "DISTBOOT_RESTART_DELAY",
    "restart_window": "DISTBOOT_RESTART_WINDOW",
}
_MORE: dict[str, dict[str, Any]] = {
    "--framework": {"type": _framework, "default": "torch"},
    "--pass-local-rank": {
        "type": _text(_OPTION.fullmatch, "{} is not a valid name of an option, as --local_rank is"),
        "nargs": "?",
        "const": LOCAL_RANK,
    },
    "--log-dir": {"type": _text(bool, "the name of a folder is needed")},
    "--report": {"type": _text(bool, "the name of a file is needed")},
    "--nproc-per-node": {
        "type": _text(settings.is_nproc, "{} is neither a number of processes nor auto, gpu or cpu")
    },
}


def parse(words: list[str]) -> tuple[Namespace, list[str]]:
    """Our own options, and the target."""
    parser = Parser(
        "run",
        "Export the variables of torch.distributed and run a script or command as a child: signals are forwarded to "
        "it, and its exit code is ours (128 + n when signal n ended it, 127 not found, 126 not executable).",
        _OPTIONS,
        more=_MORE,
        usage="python -m distboot [run] [options] (script.py | -m module | -- command) [arguments …]",
    )
    own, target = parser.split(words)
    if "--log-json" in own:  # for what we start, too, and for what is wrong with the other options
        os.environ["DISTBOOT_LOG"] = "json"
    options = parser.parse_args(own)
    nproc = settings.nproc_setting(os.environ)
    os.environ.pop("DISTBOOT_NPROC_PER_NODE", None)  # it is not for the ranks
    options.nproc_per_node = options.nproc_per_node or nproc
    if not target:
        parser.error("no script, module or command to run")
    if options.exec and options.framework in ("horovod", "tensorflow"):
        parser.error(
            f"--framework {options.framework}, for which the wrapper holds a port, {_WITH_EXEC}"
        )
    for name in ("grace", "log_dir", "log_prefix", "report", "nproc_per_node", "max_restarts"):
        if options.exec and getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} {_WITH_EXEC}")
    return options, target


def count_of(wanted: str, placement: Placement, environ: Mapping[str, str]) -> int:
    """How many ranks this process is to start; `usage`: it is not alone on its node, or there is nothing to count."""
    launcher = LAUNCHERS[placement.launcher]
    here = environ.get(launcher.local_count) or str(placement.local_world_size or 1)
    if here != "1" or placement.local_rank:
        many = here if here.isdigit() and here != "1" else "several"
        problem = (
            f"--nproc-per-node, but {placement.launcher} started {many} processes on this node"
        )
        hint = (
            "start one process per node, or leave --nproc-per-node (or DISTBOOT_NPROC_PER_NODE) out"
        )
        raise DistbootError("usage", problem, hint)
    if wanted.isdigit():
        return int(wanted)
    if wanted == "auto":
        per_node = ranks_per_node(NODE_PLATFORMS, environ)
        if per_node is not None:
            return per_node[1]
    return _count_here(wanted, environ)


def _count_here(wanted: str, environ: Mapping[str, str]) -> int:
    """How many accelerators or CPUs this process sees."""
    from ..host import accelerators  # here, as most processes start no others

    found, all_cpus = len(accelerators.visible(environ)), cpus.affinity() or os.cpu_count()
    count = {"gpu": found, "cpu": all_cpus}.get(wanted, found or all_cpus)
    if not count:
        why = (
            ": no accelerator is visible"
            if wanted == "gpu"
            else ", and the number of CPUs is not known"
        )
        raise DistbootError(
            "usage", f"--nproc-per-node {wanted}{why} here", "give the number of processes"
        )
    return count


def complete(options: Namespace, environ: Mapping[str, str]) -> None:
    """Set what the environment says where no option does; `DistbootError`: it is not valid, or cannot be had here."""
    settings.refuse_invalid(environ, _overridden(options))
    options.join_timeout = settings.join_timeout_setting(options.join_timeout, "--join-timeout")
    options.grace = settings.grace_setting(environ, options.grace)
    options.restarts = _restarts_of(options, environ)


def _overridden(options: Namespace) -> list[str]:
    """The variables whose options were given."""
    found = []
    for option, variable in _VARIABLES.items():
        if getattr(options, option) is not None:
            found.append(variable)
    return found


def _restarts_of(options: Namespace, environ: Mapping[str, str]) -> settings.RestartSettings:
    """How often the job may be started again, and when."""
    found = settings.restart_settings(
        environ, options.max_restarts, options.restart_delay, options.restart_window
    )
    if not found.most:
        return found
    off = "--max-restarts (or DISTBOOT_MAX_RESTARTS) "
    if options.exec:
        raise DistbootError("usage", f"{off}{_WITH_EXEC}", "leave one of them out")
    if options.framework == "mpi":
        why = "its launcher lets each of its processes call MPI_Init once"
        raise DistbootError(
            "usage", f"{off}cannot be used with MPI: {why}", "let the platform start the job again"
        )
    for name in ("DISTBOOT_RENDEZVOUS", "DISTBOOT_FAILURE_DETECTION"):
        if environ.get(name) == "0":
            problem = f"{off}needs what {name}=0 switches off: the agents of all ranks know when one fails"
            raise DistbootError("usage", problem, f"unset {name}, or give no restarts")
    return found


def warn_if_bound(placement: Placement) -> None:
    """Say that the ranks will be slow, as they inherit that the launcher has bound this process to a few CPUs."""
    own, there = cpus.affinity(), cpus.of_all()
    if placement.launcher != "single" and own is not None and there is not None and own < there:
        bound = f"{placement.launcher} has bound this process to {own} of {there} CPUs, and so all ranks of this node"
        log_line(placement.who, f"warning: {bound}: {_UNBOUND}")


def check_local_rank(
    options: Namespace, target: Target, nested: Nested | None, placement: Placement
) -> None:
    """Refuse to pass it to a launcher, and say that an argument for it is empty."""
    if options.pass_local_rank:
        if nested is not None:
            problem = f"--pass-local-rank passes the local rank of this process, and {nested.name} starts others"
            raise DistbootError("usage", problem, f"give it to a wrapper that {nested.name} starts")
        return
    empty = empty_local_rank((target.of_python or target.words)[1:])
    if empty is not None and placement.rank == 0:
        log_line(
            placement.who,
            f"{empty}: leave it out, and pass it with python -m distboot run --pass-local-rank",
        )
