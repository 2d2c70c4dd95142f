"""What may belong to a job beside its ranks, for a warning.

It may be tasks and hosts of an allocation that have no rank (`allocation`), the other processes of
an outer launcher (`separate_jobs`), or another host by the address of rank 0 (`here`). `detect`
reads variables alone; this module also reads the files that they name, and asks Flux's broker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache

from ..base.text import counted, escape_control, log_line
from . import allocation
from .allocation import PossiblePeers
from .order import LAUNCHERS
from .placement import NO_LAUNCHER, OFF, WRAPPER, Placement

_LONGEST = 1 << 20  # bytes of a list of hosts
_FLUX_LIMIT = 5.0  # seconds for the broker on this host to answer


def read_file(path: str) -> str:
    """The beginning of a file; empty if it cannot be read."""
    try:
        if not os.path.isfile(path):  # a pipe could wait for ever
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST)
    except (OSError, ValueError):
        return ""


def find_possible_peers(
    placement: Placement,
    environ: Mapping[str, str],
    launcher: str | None = None,  # that the caller named
    read: Callable[[str], str] = read_file,
) -> PossiblePeers | None:
    """What shows processes beside the ranks of this job, which may belong to it; None: nothing."""
    named = launcher or environ.get("DISTBOOT_LAUNCHER")
    if named in (OFF, NO_LAUNCHER):
        return None
    is_wrapper = placement.launcher == WRAPPER
    takes_node_list = is_wrapper or LAUNCHERS[placement.launcher].takes_node_list
    if takes_node_list and not named:
        from .separate_jobs import outer_processes  # here, as others know the nodes themselves

        outer = outer_processes(placement, environ)
        if outer is not None:
            return outer
    texts = _texts(placement, environ, read)
    found = allocation.find_unused(
        placement,
        environ,
        texts,
    )
    if found is not None:
        return found
    if named:
        return None
    return _elsewhere(placement, environ)


def _elsewhere(placement: Placement, environ: Mapping[str, str]) -> PossiblePeers | None:
    """The host of rank 0, where that is another one than the one host of this job.

    It does not prove that there are others: a Service before the one pod of a job has such an
    address, too.
    """
    # Where nothing has numbered it, `detect_here` has looked
    is_one = placement.has_launcher and placement.world_size == 1
    is_one_by_hand = is_one and LAUNCHERS[placement.launcher].compared_with_signs
    is_one_of_ours = placement.launcher == WRAPPER and placement.num_nodes == 1
    if not is_one_by_hand and not is_one_of_ours:
        return None
    from .here import other_rank_0  # here, as most jobs have several hosts

    address = other_rank_0(environ)
    if not address:
        return None
    return PossiblePeers(
        address,
        "set RANK and WORLD_SIZE in every process if there are others; "
        "or unset the variable, or set DISTBOOT_LAUNCHER=none, if there are none",
    )


def _texts(
    placement: Placement,
    environ: Mapping[str, str],
    read: Callable[[str], str],
) -> dict[str, str]:
    """What the files hold that variables name, and what Flux answers."""
    texts = {}
    for name in allocation.files(environ):
        path = environ[name]
        texts[name] = read(path)
    may_leave_tasks = placement.launcher in (NO_LAUNCHER, WRAPPER)
    if allocation.FLUX in environ and may_leave_tasks:
        texts[allocation.FLUX] = _flux_size()
    return texts


def warn_of_possible_peers(placement: Placement, found: PossiblePeers | None) -> None:
    """Warn on rank 0 of processes that may belong to this job."""
    if found is None or placement.rank:
        return
    warning = f"warning: {described(placement, found)}: {found.remedy}"
    log_line(placement.who, escape_control(warning))


def described(placement: Placement, found: PossiblePeers) -> str:
    """`"this process is alone, but the Slurm allocation has 4 tasks (SLURM_NTASKS='4')"`."""
    ranks = "this process is alone"
    if placement.world_size > 1:
        hosts = counted(placement.num_nodes or 1, "host")
        count = placement.world_size
        ranks = f"the {count} ranks are on {hosts}"
    return f"{ranks}, but {found.found}"


@cache
def _flux_size() -> str:
    """The number of brokers as text; empty if there is no answer."""
    import subprocess  # here and below, as few processes are in a job of Flux
    from shutil import which

    flux = which("flux")
    if flux is None:
        return ""
    try:
        asked = subprocess.run(
            [flux, "getattr", "size"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FLUX_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout
