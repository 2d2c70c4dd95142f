"""What a launcher is: a record whose one behaviour is a plain function from an environment to a placement.

The files of this folder have the records, by their kinds, and never import each other; their order is in `detect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..placement import Placement


class Launcher(NamedTuple):
    """One launcher."""

    name: str  # the value of `Placement.launcher`
    title: str  # what people call it
    markers: tuple[str, ...]  # variables of which any one claims the environment for this launcher
    # Environment -> the whole placement of a process that this launcher started, by its markers or because the user
    # says so. Rank and size are enough. Raises `DistbootError` when they are missing, or what is there is broken.
    # None: it did not start the process after all.
    read: Callable[[Mapping[str, str]], Placement | None]
    source: str  # version or documentation page of these facts
    # Whether its variables have names that a shell may have left over, so that a more specific launcher may win over
    # it, but not silently contradict it.
    generic_names: bool = False
    # Whether it sets RANK, LOCAL_RANK, MASTER_ADDR and their like anew for every process, so that they are never what
    # an outer distboot exported, and are to stay as they are.
    sets_torch_vars: bool = False
    # A variable that it sets in every process, and that distboot does not export, or not with its value; for a launcher
    # of whose other variables distboot exports some.
    own_mark: str = ""
    owns_torch_vars: bool = False  # whether RANK and WORLD_SIZE are its own, so that no generic one contradicts them
    # Whether it starts the processes through daemons of its own, which Slurm may have started as a step of one task a
    # node. Of two such launchers nothing says which is the inner one.
    uses_daemons: bool = False
    # The variable with a number that no other process of the node has. It is what a script wants LOCAL_RANK for,
    # although it need not follow the order of ranks as `Placement.local_rank` does.
    local_index: str = ""
    local_count: str = ""  # the variable with the number of processes of its daemon here; the node may have more
    # How a variable reaches every process of a job of this launcher, with NAME and VALUE in it.
    env_forwarding_hint: str = "set NAME=VALUE for every process"
    unsupported_reason: str = ""  # what to do instead, where `init` cannot serve its processes
    # Whether it started this process, where one of the markers does not say that.
    claim: Callable[[Mapping[str, str]], bool] | None = None

    def claims(self, environ: Mapping[str, str]) -> bool:
        """Whether it started this process, by what its variables say."""
        return claims(environ, self.markers) if self.claim is None else self.claim(environ)

    def found(self, environ: Mapping[str, str]) -> Placement | None:
        """The placement of a process that it started, as `read`; None if it did not."""
        return self.read(environ) if self.claims(environ) else None


def claims(environ: Mapping[str, str], markers: tuple[str, ...]) -> bool:
    """Whether any of a launcher's markers is set, even if it is empty."""
    return any(marker in environ for marker in markers)
