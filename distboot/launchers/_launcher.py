"""What a launcher is: a record whose one behaviour is a plain function from an environment to a placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..placement import Placement


class Launcher(NamedTuple):
    """One launcher.

    Attributes:
        name: the value of `Placement.launcher`.
        title: what people call it.
        markers: variables of which any one claims the environment for this launcher.
        read: environment -> the whole placement; None when the launcher did not start this process; raises
            `DistbootError` when it did and its variables are broken.
        source: version or documentation page that the facts are from.
        plain: whether its variables have common names that a shell may have left over, so that a more
            specific launcher may win over it, but not silently contradict it.
        rewrites: whether it sets RANK, LOCAL_RANK, MASTER_ADDR and their like anew for every process, so that they
            are never what an outer distboot exported, and are to stay as they are.
        reads_plain: whether RANK and WORLD_SIZE are among its own variables, so that no plain launcher is a rival.
        has_daemons: whether it starts the processes through daemons of its own, which Slurm may have started as a
            step of one task a node. Of two such launchers nothing says which is the inner one.
        local_index: the variable with a number that no other process of the node has. It is what a script wants
            LOCAL_RANK for, although it need not follow the order of ranks as `Placement.local_rank` does.
        local_count: the variable with the number of processes that its daemon here started, of which the node may
            have more.
        passing: how a variable reaches every process of a job of this launcher, with NAME and VALUE in it.
        no_init: why `init` cannot serve the processes of this launcher, with what to do instead; empty if it can.
    """

    name: str
    title: str
    markers: tuple[str, ...]
    read: Callable[[Mapping[str, str]], Placement | None]
    source: str
    plain: bool = False
    rewrites: bool = False
    reads_plain: bool = False
    has_daemons: bool = False
    local_index: str = ""
    local_count: str = ""
    passing: str = "set NAME=VALUE for every process"
    no_init: str = ""


def claims(environ: Mapping[str, str], markers: tuple[str, ...]) -> bool:
    """Whether any of a launcher's markers is set, even if it is empty."""
    return any(marker in environ for marker in markers)
