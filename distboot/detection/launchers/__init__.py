"""What a launcher is: a record of its facts, and functions for what no field describes.

Each launcher has a file here that is named after it, and in it a record with that name in capital
letters: `openmpi` has `OPENMPI`. Platforms that only number nodes are rows of the table in
`node_platforms`. No file imports another one. `order` has their order, and loads a file only where a
variable of its launcher is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Literal, NamedTuple

from .. import node_platform
from ..left_over import LeftOver
from ..node_platform import NodePlatform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..env_reader import EnvReader


def _nothing(_: object) -> None:
    pass


def always(_: object) -> bool:
    """Claim every process that has a marker."""
    return True


def has_peers(index: str, count: str, environ: Mapping[str, str]) -> bool:
    """False for index 0 (or unset) of count 1, which any single process may have."""
    is_first = environ.get(index, "0") == "0"
    is_one = environ.get(count) == "1"
    is_single = is_first and is_one
    return not is_single


class Step(NamedTuple):
    """A task of a step, which may be a rank or a daemon of an MPI."""

    rank: int
    tasks: int
    nodes: int  # 0: not known, and so not one task per node
    local_rank: str  # as it is in the variable; empty: not known


class Numbers(NamedTuple):
    """The variables that hold `NUMBERS`; empty: there is none."""

    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""


class Launcher(NamedTuple):
    """One launcher."""

    # -- What it is
    name: str  # the value of `Placement.launcher`
    title: str  # what people call it
    source: str  # the version or the documentation page of these facts
    # The variables of one rank, a variable a word, with {rank}, {size}, {local}, {per_node},
    # {node}, {nodes} and {hosts} in the place of numbers; `sample_of` fills these in
    sample: str = ""

    # -- How it is recognized
    markers: tuple[str, ...] = ()  # variables any one of which claims the environment for it
    triggers: tuple[str, ...] = ()  # other variables, which may do so by `claim`
    needed: AbstractSet[str] = frozenset()  # it claims nothing where one of these is missing
    unless: tuple[str, ...] = ()  # nor where one of these is set: something else knows more
    # Whether it started this process, where all that does not prove it
    claim: Callable[[Mapping[str, str]], bool] = always
    needs_claim: bool = False  # whether naming it does not help where it claims nothing
    # What proves that it started this process or one around it, where nothing claims this process
    left_over: tuple[LeftOver, ...] = ()
    # Refuses more of that
    refuse_unclaimed: Callable[[Mapping[str, str]], None] = _nothing

    # -- What is read
    numbers: Numbers = Numbers()
    optional: tuple[str, ...] = ()  # those of them that it does not always set
    fallbacks: Mapping[str, str] = {}  # one of them -> the variable to read where it is missing
    # Another variable that may be there as well -> the one that it must not contradict
    must_equal: Mapping[str, str] = {}
    # The variables that hold the job's id, in the order of trust
    job_id_variables: tuple[str, ...] = ()
    read: Callable[[EnvReader], None] = _nothing  # reads what no other field describes
    # Which of the local rank and the node rank follow the order of ranks
    in_order: tuple[str, ...] = ("local_rank", "node_rank")
    nodes_are_hosts: bool = False  # whether its nodes cannot be two agents on one host
    local_count: str = ""  # the variable with the number of processes of its daemon on this node
    nodes: NodePlatform | None = None  # its row, if it starts one process a node and numbers nodes

    # -- Which of several launchers wins
    # Whether a shell may have left its variables over: a more specific launcher wins over it, but
    # never silently contradicts it
    generic_names: bool = False
    # Whether it sets RANK, LOCAL_RANK, MASTER_ADDR and their like again for every process: then
    # they are never what an outer distboot exported, and stay as they are
    sets_torch_vars: bool = False
    # Whether RANK and WORLD_SIZE are its own, so that no generic ones contradict them
    owns_torch_vars: bool = False
    # A variable that it sets in every process, and that distboot never exports with its value; for
    # a launcher of whose other variables distboot exports some
    own_mark: str = ""
    # Whether daemons of its own start the processes. Slurm may have started these as a step of one
    # task a node. Of two such launchers nothing shows which is the inner one.
    uses_daemons: bool = False
    starts_daemons: bool = False  # whether people start the daemons of an MPI with it
    # The step that started this process or a daemon around it; None: there is none, or anything may
    # have been started in it
    step: Callable[[Mapping[str, str]], Step | None] = _nothing
    # Whether its numbers are compared with those of platforms that number nodes, as a shell or an
    # image may have left them over
    compared_with_nodes: bool = False
    # Whether rank 0 of 1 is refused where the environment shows other processes (`signs`)
    compared_with_signs: bool = False

    # -- What the rest of distboot needs
    # What it sets for one process, besides the torch variables; cleared for an inner launcher
    of_one_process: str = ""
    # Programs (binaries, scripts, modules of Python) one of which is above each process that it
    # starts, waits for it, and ends after it; none: there is no such program, or it is not known
    programs: tuple[str, ...] = ()
    # Whether its processes are in the world of an MPI, which mpi4py may then be asked; empty: not
    # known
    mpi: Literal["yes", "maybe", "no", ""] = ""
    read_by: tuple[str, ...] = ()  # the frameworks that find their rank in its variables
    # Whether it sets all of Horovod's variables, and runs the server that Gloo needs
    configures_horovod: bool = False
    jax_needs_nothing: bool = False  # whether JAX finds all that it needs in its variables
    # The variables in which Lightning finds its numbers, the last one with that of the ranks
    lightning_reads: tuple[str, ...] = ()
    serves_master_port: bool = False  # whether an agent of its own listens at MASTER_PORT
    told_ranks_per_node: bool = False  # whether the user tells it how many ranks each node has
    same_port_for_all_jobs: bool = False  # whether MASTER_PORT does not tell its jobs apart
    # Of its program on each node, the option that tells its jobs apart, where no variable does; the
    # same on all nodes
    job_option: str = ""
    command: str = ""  # what people start it with, if that is not its name
    start_several: str = "start {} processes"  # how to start so many processes
    # How a variable reaches every process of a job, with NAME and VALUE in it
    env_forwarding_hint: str = "set NAME=VALUE for every process"
    # How its process on each node, the parent of the ranks, survives the signals in SIGNALS; empty:
    # it does, or that is not known
    signals_hint: str = ""
    # How it is told not to bind its processes to CPUs
    unbind: str = "mpirun --bind-to none, srun --cpu-bind=none"
    unsupported_reason: str = ""  # what to do instead, where `init` cannot serve its processes

    @property
    def takes_node_list(self) -> bool:
        """Whether the user tells it of the nodes, and may tell it of one on each of them."""
        return any((self.told_ranks_per_node, self.uses_daemons, self.starts_daemons))

    def claims(self, environ: Mapping[str, str]) -> bool:
        """Whether it started this process, by its variables."""
        names = environ.keys()
        asked_for = self.markers + self.triggers
        if names.isdisjoint(asked_for):
            return False
        knows_less = not names.isdisjoint(self.unless)
        if knows_less or not names >= self.needed:
            return False
        return self.claim(environ)

    def set_for_one_process(self, names: Iterable[str]) -> set[str]:
        """Those of these variables that it sets for one process, besides the torch variables."""
        own = re.compile(self.of_one_process or "$")
        return set(filter(own.match, names))

    def serves_lightning(self, environ: Mapping[str, str], world_size: int) -> bool:
        """Whether Lightning finds its numbers for so many ranks."""
        found = [environ.get(name) for name in self.lightning_reads]
        return None not in found and found[-1:] == [str(world_size)]


def of_platform(platform: NodePlatform) -> Launcher:
    """The launcher that a platform is for the processes that it starts."""
    several_nodes = partial(has_peers, platform.index_variable, platform.count_variable)
    return Launcher(
        name=platform.name,
        title=platform.title,
        markers=platform.markers,
        triggers=platform.triggers,
        read=platform.read or partial(node_platform.read, platform),
        claim=platform.claim or several_nodes,
        needed=platform.needed,
        unless=platform.unless,
        left_over=platform.left_over,
        job_id_variables=platform.job_id_variables,
        source=f"documentation: {platform.source}",
        nodes_are_hosts=platform.nodes_are_hosts,
        owns_torch_vars=platform.owns_torch_vars,
        nodes=platform,
        compared_with_nodes=True,
        compared_with_signs=platform.compared_with_signs,
        env_forwarding_hint=platform.env_forwarding_hint,
    )


def sample_of(sample: str, rank: int, nodes: int, per_node: int) -> dict[str, str]:
    """The variables of a rank in a job of so many nodes with so many ranks each, by their sample."""
    node, local = divmod(rank, per_node)
    text = sample.format(
        rank=rank,
        size=nodes * per_node,
        local=local,
        per_node=per_node,
        node=node,
        nodes=nodes,
        hosts=",".join(f"node-{each}" for each in range(nodes)),
    )
    return dict(word.split("=", 1) for word in text.split())


def has_any(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Whether any of these variables is set, even if it is empty."""
    return not environ.keys().isdisjoint(names)
