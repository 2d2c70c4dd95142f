"""A platform that starts one process on each node and numbers the nodes.

Several ranks per node are then the wrapper's to start (`--nproc-per-node`), and the platform's own
count of processes or GPUs per node is its default. A platform whose count is 1, or one process of
which uses a whole node, has one rank a node. Without a count the number is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..base.text import digits
from .left_over import LeftOver
from .parse import (
    parse_hosts,
    parse_number,
    parse_port,
    repeated_host,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .env_reader import EnvReader

# What numbers processes itself, and is more exact than any number of a node.
OF_PROCESSES = ("RANK", "LOCAL_RANK", "TF_CONFIG")
# Where the number of nodes came from, if WORLD_SIZE had to be taken for it.
NODES_OF_WORLD_SIZE = "WORLD_SIZE, taken for the number of nodes"
_SEVERAL = ("auto", "gpu", "cpu", "xpu")  # torchrun's words for a number of processes


class NodePlatform(NamedTuple):
    """One platform, as data."""

    name: str  # the value of `Placement.launcher`
    title: str  # what people call it
    source: str  # the page that these facts are from
    index_variable: str  # has the number of this node, from 0
    count_variable: str  # has the number of nodes
    sample: str  # what the second of two nodes finds, one variable a word
    address: str = ""  # with the address of node 0
    hosts: str = ""  # with the addresses of all nodes, that of node 0 first
    port: str = ""  # with a port that is free on node 0
    # With the number of processes or GPUs per node, in the order of trust
    per_node: tuple[str, ...] = ()
    job_id_variables: tuple[str, ...] = ()
    also_reads: tuple[str, ...] = ()  # other variables that it reads
    own_markers: tuple[str, ...] = ()  # the variables that show it, if not the index and the count
    triggers: tuple[str, ...] = ()  # as in `Launcher`
    one_rank: bool = False  # whether one process uses all of a node
    # Reads all of it, where some need special handling
    read: Callable[[EnvReader], None] | None = None
    # The same as in `Launcher`; by default it claims nothing where it has one node
    claim: Callable[[Mapping[str, str]], bool] | None = None
    needed: AbstractSet[str] = frozenset()
    unless: tuple[str, ...] = OF_PROCESSES
    left_over: tuple[LeftOver, ...] = ()
    owns_torch_vars: bool = False
    compared_with_signs: bool = False
    nodes_are_hosts: bool = False
    env_forwarding_hint: str = "set NAME=VALUE for the process of every node"
    note: str = ""  # for the reference

    @property
    def markers(self) -> tuple[str, ...]:
        """The variables of which any one shows this platform."""
        usual = tuple(filter(None, (self.index_variable, self.count_variable)))
        return self.own_markers or usual


def read(platform: NodePlatform, reader: EnvReader) -> None:
    """Read what a platform says of this node."""
    reader.integer(platform.index_variable, "rank")
    nodes = _count(platform, reader)
    locate(platform, reader, nodes)
    check_world_size(reader, nodes)
    if nodes != 1:
        reader.node_level = node_level(platform, reader)


def _count(platform: NodePlatform, reader: EnvReader) -> int | None:
    """Record the number of nodes; without a count it is that of the hosts listed."""
    if platform.count_variable in reader.environ or platform.hosts not in reader.environ:
        nodes = reader.integer(platform.count_variable, "world_size")
        reader.record(platform.count_variable, num_nodes=nodes)
        return nodes
    hosts = reader.parsed(platform.hosts, parse_hosts)
    if not hosts:
        return None
    source = f"hosts of {platform.hosts}"
    reader.record(source, world_size=len(hosts), num_nodes=len(hosts))
    return len(hosts)


def locate(platform: NodePlatform, reader: EnvReader, nodes: int | None) -> None:
    """Read where node 0 is, and at which port."""
    if platform.address in reader.environ:
        reader.take_own_address(platform.address)
    hosts = reader.given(platform.hosts, parse_hosts)
    if hosts:
        _take_hosts(platform, reader, hosts, nodes)
    if "MASTER_PORT" not in reader.environ:
        port = reader.given(platform.port, parse_port)
        reader.record_own_port(platform.port, port)
    reader.port_seed = reader.own_address  # the same on all nodes


def check_world_size(reader: EnvReader, nodes: int | None) -> None:
    """Refuse a WORLD_SIZE that cannot be that of so many nodes."""
    name = "WORLD_SIZE"
    if not nodes:
        return
    ranks = reader.given(name, parse_number)
    if ranks is None:
        return
    possible = range(nodes, ranks + 1, nodes)
    if ranks not in possible:
        source = reader.source("world_size")
        why = f"is not a multiple of the {nodes} nodes of {source}"
        reader.reject(name, why)


def node_level(platform: NodePlatform, reader: EnvReader) -> str | None:
    """Why the process stands for its node; None: it is the one rank there."""
    if platform.one_rank:
        return None
    name = next(filter(reader.environ.__contains__, platform.per_node), None)
    if name is None:
        return (
            f"{platform.index_variable} counts nodes, "
            "and no variable has the number of processes per node"
        )
    from .env_reader import variable  # here, as few processes stand for a node

    shown = variable(reader.environ, name)
    if reader.environ[name] in _SEVERAL:
        return f"{shown} asks for several processes on each node"
    if reader.parsed(name, parse_number) in (0, 1):
        return None
    return f"{shown}, and one process was started on each node"


def ranks_per_node(
    platforms: Iterable[NodePlatform], environ: Mapping[str, str]
) -> tuple[str, int] | None:
    """The variable with a platform's number of ranks per node, and the number; or None."""
    for platform in platforms:
        names = (*platform.markers, *platform.triggers)
        if environ.keys().isdisjoint(names):
            continue
        for name in platform.per_node:
            text = environ.get(name, "")
            count = digits(text)
            if count:
                return name, count
        if platform.one_rank:
            index = platform.index_variable
            return index, 1
    return None


def _take_hosts(
    platform: NodePlatform, reader: EnvReader, hosts: list[str], nodes: int | None
) -> None:
    """Take the address of node 0 from the list of all nodes."""
    name = platform.hosts
    count = len(hosts)
    twice = repeated_host(hosts)
    if twice is not None:
        reader.reject(name, f"names a host twice: {twice}")
    elif nodes not in (None, count):
        expected = f"{platform.count_variable}={nodes}"
        reader.reject(name, f"does not name {expected} hosts")
    elif reader.own_address is None:
        source = f"first host of {name}"
        reader.own_address = (hosts[0], source)
