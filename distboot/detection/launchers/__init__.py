"""What a launcher is: a record of its variables, and a plain function for what is odd about them.

The files of this folder have the records, by their kinds, and never import each other; their order is in `detect`.
Platforms that number nodes have shorter records, `NodePlatform`, of which `of_platform` makes launchers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from .. import node_platform
from ..node_platform import NodePlatform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..env_reader import EnvReader


class Launcher(NamedTuple):
    """One launcher."""

    name: str  # the value of `Placement.launcher`
    title: str  # what people call it
    markers: tuple[str, ...]  # variables of which any one claims the environment for this launcher
    source: str  # version or documentation page of these facts
    # The variables of `NUMBERS`, in this order; None where it has none
    numbers: tuple[str | None, ...] = ()
    optional: tuple[str, ...] = ()  # those of them that it need not set
    instead: Mapping[str, str] = {}  # one of them -> the variable to read where it is missing
    # Another variable that may be there as well -> the one that it must not contradict
    same: Mapping[str, str] = {}
    job_id: tuple[str, ...] = ()  # the variables that hold the job's id, in the order of trust
    more: Callable[[EnvReader], None] = lambda _: None  # reads what is odd about it
    # Which of the local rank and the node rank follow the order of ranks, as most launchers number them.
    in_order: tuple[str, ...] = ("local_rank", "node_rank")
    # Whether its nodes are different machines, which loopback cannot reach
    nodes_are_hosts: bool = False
    # Whether it started this process, where one of the markers does not say that.
    claim: Callable[[Mapping[str, str]], bool] | None = None
    # Other variables by which `claim` may say so; where neither these nor the markers are, it is not asked
    triggers: tuple[str, ...] = ()
    # Whether it did not start what it does not claim, even if the user says so
    needs_claim: bool = False
    # Whether its variables have names that a shell may have left over, so that a more specific launcher may win over
    # it, but not silently contradict it.
    generic_names: bool = False
    # Whether it sets RANK, LOCAL_RANK, MASTER_ADDR and their like again for every process, so that they are never what
    # an outer distboot exported, and are to stay as they are.
    sets_torch_vars: bool = False
    # A variable that it sets in every process, and that distboot does not export, or not with its value; for a launcher
    # of whose other variables distboot exports some.
    own_mark: str = ""
    # Whether RANK and WORLD_SIZE are its own, so that no generic one contradicts them
    owns_torch_vars: bool = False
    # Whether it starts the processes through daemons of its own, which Slurm may have started as a step of one task a
    # node. Of two such launchers nothing says which is the inner one.
    uses_daemons: bool = False
    # Programs (binaries, scripts, modules of Python) of which one is above each process that it starts, waits for it,
    # and ends after it; none: nothing does, or it is not known
    programs: tuple[str, ...] = ()
    # Whether it starts one process a node, and numbers nodes
    numbers_nodes: bool = False
    # The variable with the number of processes of its daemon here; the node may have more
    local_count: str = ""
    # How a variable reaches every process of a job of this launcher, with NAME and VALUE in it.
    env_forwarding_hint: str = "set NAME=VALUE for every process"
    # How its process on each node, the parent of the ranks, survives the signals in SIGNALS; empty: it does, or that is
    # not known.
    signals_hint: str = ""
    unsupported_reason: str = ""  # what to do instead, where `init` cannot serve its processes

    def claims(self, environ: Mapping[str, str]) -> bool:
        """Whether it started this process, by what its variables say."""
        return has_any(environ, self.markers) if self.claim is None else self.claim(environ)


def of_platform(platform: NodePlatform) -> Launcher:
    """The launcher that a platform is for the processes that it starts."""
    return Launcher(
        name=platform.name,
        title=platform.title,
        markers=platform.markers,
        triggers=platform.triggers,
        more=platform.read or partial(node_platform.read, platform),
        claim=platform.claim or partial(node_platform.claims, platform),
        job_id=platform.job_id,
        source=f"documentation: {platform.page}",
        nodes_are_hosts=platform.nodes_are_hosts,
        owns_torch_vars=platform.owns_torch_vars,
        numbers_nodes=True,
        env_forwarding_hint=platform.env_forwarding_hint,
    )


def has_any(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Whether any of these variables is set, even if it is empty."""
    return not environ.keys().isdisjoint(names)
