"""`Reading`: one launcher's reading of one environment. It gathers values, their sources and *every* problem.

A launcher's function makes one, takes its variables from it, and ends with `placement()`, which checks that
the numbers fit together, derives what follows from them, finds the address of rank 0, and raises a single
error when anything was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .address import derived_port, is_loopback, is_whole_number, parse_address, parse_port
from .errors import DistbootError, quoted
from .placement import FIELDS, Placement
from .platforms import recognise

TYPE_CHECKING = False  # type checkers take the name for typing's, whose import would slow every start
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

# Larger than any job; a bound so that a garbled size is named and not believed.
_MOST_PROCESSES = 1 << 24
_MOST_PROBLEMS = 20  # in one message


def variable(environ: Mapping[str, str], name: str) -> str:
    """`NAME='value'`, as error messages show it."""
    return f"{name}={quoted(environ[name])}"


class Reading:
    """What `launcher` says in `environ`: values by field, their sources, problems and notes.

    Attributes:
        environ: the environment; never written to.
        problems: sentences for people, each naming the variable and its value.
        notes: remarks for people that are no problems.
        node_level: why the launcher's numbers count nodes or pods and not ranks; None when they count ranks.
        remedy: the hint of the error, when there are problems.
    """

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self.environ = environ
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.node_level: str | None = None
        self.remedy = (
            "these variables come from the launcher; look for a script, image or shell that sets, clears or leaves "
            "them over, or name the launcher with DISTBOOT_LAUNCHER"
        )
        self._launcher = launcher
        self._values: dict[str, object] = dict.fromkeys(FIELDS)
        self._values["launcher"] = launcher
        self._sources: dict[str, str] = {}

    def put(self, field: str, value: object, source: str) -> None:
        """Record the value of a field of `Placement` and where it came from. The first value stays; None is none."""
        if self._values[field] is None and value is not None:
            self._values[field] = value
            self._sources[field] = source

    def number(self, field: str) -> int | None:
        """The number recorded for a field so far, or None."""
        value = self._values[field]
        return value if isinstance(value, int) else None

    def integer(self, name: str, field: str | None = None, *, required: bool = True) -> int | None:
        """The non-negative integer in variable `name`, recorded under `field`; None when there is none.

        A variable that is malformed, or required and missing, becomes a problem.
        """
        text = self.text(name, required=required)
        if text is None:
            return None
        if not is_whole_number(text):
            cause = "is empty" if not text else "is not a whole number of 0 or more"
            self.problems.append(f"{variable(self.environ, name)} {cause}")
            return None
        if len(text) > 8 or int(text) > _MOST_PROCESSES:
            self.problems.append(f"{variable(self.environ, name)} is larger than any job")
            return None
        if field is not None:
            self.put(field, int(text), name)
        return int(text)

    def text(self, name: str, *, required: bool = True) -> str | None:
        """The text of variable `name`. Required and missing is a problem."""
        text = self.environ.get(name)
        if text is None and required:
            self.problems.append(f"{name} is missing")
        return text

    def parsed(self, name: str, reader: Callable[[str], T]) -> T | None:
        """What `reader` makes of variable `name`; None, and a problem, when it is missing or `reader` refuses it.

        `reader` raises ValueError with a cause that reads well after `NAME='value' `.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            return reader(text)
        except ValueError as cause:
            self.problems.append(f"{variable(self.environ, name)} {cause}")
            return None

    def agree(self, name: str, other: object, source: str) -> None:
        """When variable `name` exists, a value other than `other` (which came from `source`) is a problem."""
        text = self.environ.get(name)
        if text is not None and other is not None and text != str(other):
            self.problems.append(f"{variable(self.environ, name)} contradicts {source}={quoted(str(other))}")

    def job_id(self, *names: str) -> None:
        """Take the job id from the first of these variables that is set and not empty."""
        for name in names:
            if self.environ.get(name):
                self.put("job_id", self.environ[name], name)
                return

    def placement(
        self,
        *,
        own_address: tuple[str, str] | None = None,
        port_seed: tuple[str, str] | None = None,
        nodes_are_hosts: bool = False,
    ) -> Placement:
        """The whole placement.

        Args:
            own_address: host of rank 0 as the launcher itself knows it, and the source of that.
            port_seed: a text that is the same on all ranks, and its source, to derive a port from when there
                is no job id.
            nodes_are_hosts: whether different nodes of this launcher are different machines for certain, so
                that a loopback address cannot be right for several of them.

        Raises:
            DistbootError: `broken-environment`, with every problem in it.
        """
        self._check_numbers()
        if not self.problems:
            self._derive_numbers()
        found = len(self.problems)
        self._locate_rank0(own_address, nodes_are_hosts)
        self._find_port(port_seed)
        if self._launcher == "single":  # one process, to which nobody else comes
            self.notes += [f"{problem}; ignored, as this process is alone" for problem in self.problems[found:]]
            del self.problems[found:]
        if self.problems:
            rank = self.number("rank")
            who = f"rank {'?' if rank is None else rank}"
            raise DistbootError("broken-environment", self._report(), self._remedy()).of(who)
        order = {field: self._sources[field] for field in FIELDS if field in self._sources}
        sources = MappingProxyType(order)
        return Placement(**self._values, sources=sources, notes=tuple(self.notes), node_level=self.node_level)  # type: ignore[arg-type]

    def _check_numbers(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes")):
            self._below(index, "world_size" if self.number(size) is None else size)
        world_size, here, nodes = map(self.number, ("world_size", "local_world_size", "num_nodes"))
        if world_size is not None:
            self._check_order(nodes)
        for part, count in (("local_world_size", here), ("num_nodes", nodes)):
            if count == 0:
                self.problems.append(f"{self._said(part)} cannot be 0: this process is there")
            elif count is not None and world_size is not None and count > world_size:
                self.problems.append(f"{self._said(part)} is more than {self._said('world_size')}")
        if world_size is not None and here is not None and nodes is not None:
            # Every other node has at least one process; on a single node they are all here.
            others = world_size - here
            if others < nodes - 1 or (nodes == 1 and others > 0):
                said = ", ".join(map(self._said, ("world_size", "local_world_size", "num_nodes")))
                self.problems.append(f"{said} do not fit together")

    def _check_order(self, nodes: int | None) -> None:
        """Local ranks and nodes are counted in the order of ranks; but a person may have numbered them as they like."""
        rank, local_rank, node_rank = map(self.number, ("rank", "local_rank", "node_rank"))
        world_size, here = self.number("world_size"), self.number("local_world_size")
        if rank is None or self._launcher == "torch":
            return
        # Below this rank are one of each node before, and all of this node with a lower local rank.
        possible = (node_rank or 0) + (local_rank or 0) <= rank
        if local_rank is not None and here is not None and world_size is not None:
            possible &= here - local_rank <= world_size - rank  # above it are those with a higher one
        if node_rank == 0 and local_rank == 0:
            possible &= rank == 0
        if nodes == 1 and local_rank is not None:
            possible &= local_rank == rank
        if not possible:
            named = [
                index for index in ("local_rank", "local_world_size", "node_rank") if self.number(index) is not None
            ]
            place = ", ".join(map(self._said, named))
            self.problems.append(f"{self._said('rank')} of {self._said('world_size')} cannot be at {place}")

    def _below(self, index: str, size: str) -> None:
        low, high = self.number(index), self.number(size)
        if low is not None and high is not None and low >= high:
            self.problems.append(f"{self._said(index)} is not below {self._said(size)}")

    def _derive_numbers(self) -> None:
        world_size, rank = self.number("world_size"), self.number("rank")
        if world_size == 1:
            for field, value in (("local_rank", 0), ("local_world_size", 1), ("num_nodes", 1)):
                self.put(field, value, "derived: a job of one process")
        if self.number("local_world_size") == world_size:
            self.put("num_nodes", 1, "derived: all processes of the job are on this node")
        elif self.number("local_world_size") == 1 and world_size == 2:
            self.put("num_nodes", 2, "derived: two processes, and one of them is on this node")
        if self.number("num_nodes") == 1:
            self.put("node_rank", 0, "derived: the job has one node")
            self.put("local_world_size", world_size, "derived: the job has one node")
            self.put("local_rank", rank, "derived: the job has one node")
        if self.number("num_nodes") == world_size:
            # Every node has at least one rank, so each has exactly one, and rank r is the r-th to be met.
            self.put("node_rank", rank, "derived: one process a node")
            self.put("local_rank", 0, "derived: one process a node")
            self.put("local_world_size", 1, "derived: one process a node")
        self._check_numbers()

    def _locate_rank0(self, own_address: tuple[str, str] | None, nodes_are_hosts: bool) -> None:
        platform = recognise(self.environ)
        if platform:
            self.put("platform", platform.name, next(m for m in platform.markers if m in self.environ))
            self.job_id(*platform.job_id_variables)
        if "MASTER_ADDR" in self.environ:
            self._take_given_address(nodes_are_hosts=nodes_are_hosts)
        elif own_address:  # before the platform's: it is rank 0's by the launcher's own definition
            self.put("master_addr", *own_address)
        elif platform and self.number("world_size") != 1 and self.environ.get(platform.silenced_by) != "true":
            for name, reader in platform.addresses:
                self._take_platform_address(name, reader)
        if self.number("num_nodes") == 1:
            self.put("master_addr", "127.0.0.1", "loopback: the job has one node")

    def _take_given_address(self, *, nodes_are_hosts: bool) -> None:
        name = "MASTER_ADDR"
        address = self.parsed(name, parse_address)
        if address is None:
            return
        host, port = address
        if nodes_are_hosts and self._spans_nodes() and is_loopback(host):
            problem = f"{variable(self.environ, name)} is a loopback address, and there are several nodes"
            self.problems.append(f"{problem}: the others would call themselves")
        self.put("master_addr", host, name)
        if port is not None:
            self.put("master_port", port, name)
            self.agree("MASTER_PORT", port, f"the port in {name}")

    def _take_platform_address(self, name: str, reader: Callable[[str], str]) -> None:
        host = self.parsed(name, reader) if name in self.environ else None
        if host is None or host.lower() == "localhost":
            return  # the latter is Azure ML's way to say that there is one node
        if self.number("num_nodes") == 1 or not is_loopback(host):
            self.put("master_addr", host, name)

    def _find_port(self, port_seed: tuple[str, str] | None) -> None:
        if "MASTER_PORT" in self.environ:
            self.put("master_port", self.parsed("MASTER_PORT", parse_port), "MASTER_PORT")
        elif isinstance(job_id := self._values["job_id"], str):
            self.put("master_port", derived_port(job_id), f"derived from {self._sources['job_id']}")
        elif port_seed:
            self.put("master_port", derived_port(port_seed[0]), f"derived from {port_seed[1]}")

    def _said(self, field: str) -> str:
        source = self._sources[field]
        return variable(self.environ, source) if source in self.environ else f"{field}={self._values[field]}"

    def _spans_nodes(self) -> bool:
        world_size, here, nodes = map(self.number, ("world_size", "local_world_size", "num_nodes"))
        if nodes is not None:
            return nodes > 1
        return here is not None and world_size is not None and here < world_size

    def _report(self) -> str:
        count, shown = len(self.problems), self.problems[:_MOST_PROBLEMS]
        if count == 1:
            return f"launcher {self._launcher!r}: {self.problems[0]}"
        more = [f"and {count - len(shown)} more"] if count > len(shown) else []
        head = f"launcher {self._launcher!r}: {count} things are wrong:"
        return head + "".join(f"\n  {line}" for line in (*shown, *more))

    def _remedy(self) -> str:
        if all(problem.startswith("MASTER_") for problem in self.problems):
            return "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or clear them"
        return self.remedy
