"""`EnvReader`: one launcher's reading of one environment. It gathers values, their sources and *every* problem.

In the end `placement()` checks that the numbers fit together, derives what follows from them, finds the address of
rank 0, and raises a single error when anything was wrong. Rank and size have to be there. What else is missing is None,
and one note names it: a container has only the variables that were passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import short_repr
from ..host import derived_port
from .parse import (
    is_loopback,
    json_hosts,
    parse_address,
    parse_count,
    parse_number,
    parse_port,
)
from .placement import (
    FIELDS,
    NUMBERS,
    Placement,
    Platform,
    recognise,
)

T = TypeVar("T")

_MOST_PROBLEMS = 20  # in one message
_MISSING = " is missing"
_NUMBER_READERS: Mapping[str | None, Callable[[str], int]] = {
    "world_size": parse_count,
    "local_world_size": parse_count,
    "num_nodes": parse_count,
}
_REQUIRED = ("rank", "world_size")
_PLACE = ("local_rank", "local_world_size", "node_rank")
_REMEDY = (
    "these variables come from the launcher; look for a script, image or shell that sets, clears or leaves them over, "
    "or name the launcher with DISTBOOT_LAUNCHER"
)


def variable(environ: Mapping[str, str], name: str) -> str:
    """`NAME='value'`, as error messages show it."""
    return f"{name}={short_repr(environ[name])}"


def container_env_hint(*names: str) -> str:
    """How these variables get into a container, as a hint says it."""
    options = " ".join(f"-e {name}" for name in names)
    values = ",".join(f"{name}=${name}" for name in names)
    return (
        f"docker run {options} (also podman run, enroot start), apptainer exec --env {values}, "
        f"srun --container-env={','.join(names)} (pyxis)"
    )


class EnvReader:
    """What `launcher` says in `environ`: values by field, their sources, problems and notes."""

    def __init__(
        self,
        environ: Mapping[str, str],
        launcher: str,
        in_order: tuple[str, ...],
        *,
        nodes_are_hosts: bool,
    ) -> None:
        self.environ = environ  # never written to
        # Sentences for people, each naming the variable and its value
        self.problems: list[str] = []
        self.notes: list[str] = []  # remarks for people
        # What this launcher sets for each of its processes, and is not there
        self.absent: list[str] = []
        # Why the launcher's numbers count nodes or pods and not ranks; None when they count ranks.
        self.node_level: str | None = None
        self.remedy = _REMEDY  # the hint of the error, when there are problems
        # Host of rank 0 as the launcher knows it, and its source
        self.own_address: tuple[str, str] | None = None
        # A text that all ranks have, and its source: for a port
        self.port_seed: tuple[str, str] | None = None
        self._launcher, self._in_order, self._nodes_are_hosts = launcher, in_order, nodes_are_hosts
        self._values: dict[str, Any] = {**dict.fromkeys(FIELDS), "launcher": launcher}
        self._sources: dict[str, str] = {}

    def put(self, source: str, **values: object) -> None:
        """Record values of fields of `Placement` and their source. The first one stays; None is not recorded."""
        for field, value in values.items():
            self._record(field, value, source)

    def _record(self, field: str, value: object, source: str) -> None:
        if value is not None and self._values[field] is None:
            self._values[field] = value
            self._sources[field] = source

    def reject(self, name: str, cause: str) -> None:
        """Record a problem of variable `name`, with a cause that reads well after its value."""
        self.problems.append(f"{variable(self.environ, name)} {cause}")

    def number(self, field: str) -> int | None:
        """The number recorded for a field so far, or None."""
        number: int | None = self._values[field]
        return number

    def _numbers(self) -> list[int | None]:
        """The numbers recorded so far, in the order of `NUMBERS`."""
        return [self._values[field] for field in NUMBERS]

    def source(self, field: str) -> str:
        """Where the value of a field came from; empty where there is none."""
        return self._sources.get(field, "")

    def integer(self, name: str, field: str | None = None, *, required: bool = False) -> int | None:
        """The integer of 0 or more in variable `name`, recorded under `field`; rank and world size are required."""
        reader = _NUMBER_READERS.get(field, parse_number)
        number = self.parsed(name, reader, required=required or field in _REQUIRED)
        if field is not None:
            self._record(field, number, name)
        return number

    def integers(self, *names: str | None, optional: tuple[str, ...] = ()) -> None:
        """Record the integers in these variables as `NUMBERS`, in their order; None: there is no such variable."""
        for name, field in zip(names, NUMBERS):  # noqa: B905 - the last ones may be missing
            if name is not None and (name in self.environ or name not in optional):
                self.integer(name, field)

    def text(self, name: str, *, required: bool = False) -> str | None:
        """The text of a variable that the launcher sets always; missing it is noted, or a problem if it is required."""
        text = self.environ.get(name)
        if text is None and required:
            self.problems.append(f"{name}{_MISSING}")
        elif text is None:
            self.absent.append(name)
        return text

    def first(self, *names: str) -> str:
        """The first of these variables that is set; if none is, the first of all, which is then the one to miss."""
        for name in names:
            if name in self.environ:
                return name
        return names[0]

    def parsed(self, name: str, reader: Callable[[str], T], *, required: bool = False) -> T | None:
        """What `reader` makes of its `text`; None, and a problem, where it raises ValueError with the cause."""
        text = self.text(name, required=required)
        if text is None:
            return None
        try:
            return reader(text)
        except ValueError as cause:
            self.reject(name, str(cause))
            return None

    def agree(self, name: str, other: object, source: str) -> None:
        """When variable `name` exists, a value other than `other` (which came from `source`) is a problem."""
        text = self.environ.get(name)
        if text is not None and other is not None and text != str(other):
            self.reject(name, f"contradicts {source}={short_repr(str(other))}")

    def job_id(self, *names: str) -> None:
        """Take the job id from the first of these variables that is set and not empty."""
        for name in names:
            self.put(name, job_id=self.environ.get(name) or None)

    def placement(self) -> Placement:
        """The whole placement, or one `broken-environment` with every problem in it."""
        self._check_numbers()
        if not self.problems:
            self._derive_numbers()
        found = len(self.problems)
        self._locate_rank0()
        self._find_port()
        if self._launcher == "single":  # one process, to which no other comes
            self.notes += [
                f"{problem}; ignored, as this process is alone" for problem in self.problems[found:]
            ]
            del self.problems[found:]
        if self.problems:
            rank = self._values["rank"]
            who = UNKNOWN_RANK
            if rank is not None:
                who = f"rank {rank}"
            raise DistbootError("broken-environment", self._report(), self._remedy()).of(who)
        if self.absent:
            self.notes.append(
                f"not set, so that what they say is unknown here: {', '.join(self.absent)}"
            )
        sources = self._sources
        in_order = {field: sources[field] for field in FIELDS if field in sources}
        return Placement(
            **self._values,
            sources=MappingProxyType(in_order),
            notes=tuple(self.notes),
            node_level=self.node_level,
        )

    def _check_numbers(self) -> None:
        rank, world_size, local_rank, here, node_rank, nodes = self._numbers()
        self._check_below("rank", rank, "world_size", world_size)
        if rank is None:
            self._check_part("world_size", world_size, None)
        if here is None:
            self._check_below("local_rank", local_rank, "world_size", world_size)
        else:
            self._check_below("local_rank", local_rank, "local_world_size", here)
        if nodes is None:
            self._check_below("node_rank", node_rank, "world_size", world_size)
        else:
            self._check_below("node_rank", node_rank, "num_nodes", nodes)
        if rank is not None and world_size is not None:
            self._check_order(rank, world_size)
        self._check_part("local_world_size", here, world_size)
        self._check_part("num_nodes", nodes, world_size)
        if world_size is not None and here is not None and nodes is not None:
            self._check_fit(world_size, here, nodes)

    def _check_fit(self, world_size: int, here: int, nodes: int) -> None:
        # Every other node has at least one process; on a single node they are all here.
        others = world_size - here
        if others < nodes - 1 or (nodes == 1 and others > 0):
            fields = ("world_size", "local_world_size", "num_nodes")
            self.problems.append(f"{', '.join(map(self._text, fields))} do not fit together")

    def _check_below(self, index: str, low: int | None, size: str, high: int | None) -> None:
        if low is not None and high is not None and low >= high:
            self.problems.append(f"{self._text(index)} is not below {self._text(size)}")

    def _check_part(self, field: str, count: int | None, world_size: int | None) -> None:
        if count is None:
            return
        if count == 0:
            self.problems.append(f"{self._text(field)} cannot be 0: this process is there")
        elif world_size is not None and count > world_size:
            self.problems.append(f"{self._text(field)} is more than {self._text('world_size')}")

    def _check_order(self, rank: int, world_size: int) -> None:
        """Local ranks and nodes are counted in the order of ranks, as far as the launcher numbers them so."""
        if not self._in_order:
            node_rank = local_rank = None
        else:
            local_rank = self.number("local_rank") if "local_rank" in self._in_order else None
            node_rank = self.number("node_rank") if "node_rank" in self._in_order else None
        _, _, _, here, _, nodes = self._numbers()
        # Below this rank are one of each node before, and all of this node with a lower local rank.
        possible = (node_rank or 0) + (local_rank or 0) <= rank
        if local_rank is not None and here is not None:
            # Above it are those with a higher one
            possible &= here - local_rank <= world_size - rank
        if node_rank == local_rank == 0 or (nodes == 1 and local_rank is not None):
            possible &= rank == local_rank
        if not possible:
            place = (self._text(field) for field in _PLACE if self.number(field) is not None)
            self.problems.append(
                f"{self._text('rank')} of {self._text('world_size')} cannot be at {', '.join(place)}"
            )

    def _derive_numbers(self) -> None:
        known = len(self._sources)
        world_size, rank = self.number("world_size"), self.number("rank")
        if world_size == 1:
            self.put("derived: a job of one process", local_rank=0, local_world_size=1, num_nodes=1)
        here = self.number("local_world_size")
        if here == world_size:
            source = "derived: all processes of the job are on this node"
            self._record("num_nodes", 1, source)
        elif here == 1 and world_size == 2:
            source = "derived: two processes, and one of them is on this node"
            self._record("num_nodes", 2, source)
        nodes = self.number("num_nodes")
        if nodes == 1:
            source = "derived: the job has one node"
            self.put(source, node_rank=0, local_world_size=world_size, local_rank=rank)
        if nodes == world_size:
            # Every node has at least one rank, so each has exactly one, and rank r is the r-th to be met.
            source = "derived: one process per node"
            self.put(source, node_rank=rank, local_rank=0, local_world_size=1)
        if len(self._sources) > known:
            self._check_numbers()

    def _locate_rank0(self) -> None:
        platform = recognise(self.environ)
        if platform:
            self._record("platform", platform.name, self.first(*platform.markers))
            self.job_id(*platform.job_id_variables)
        if "MASTER_ADDR" in self.environ:
            self._take_given_address()
        elif (
            self.own_address
        ):  # before the platform's: it is rank 0's by the launcher's own definition
            self.put(self.own_address[1], master_addr=self.own_address[0])
        elif (
            platform
            and self.number("world_size") != 1
            and self.environ.get(platform.silenced_by) != "true"
        ):
            self._take_platforms_address(platform)
        if self.number("num_nodes") == 1:
            self.put("loopback: the job has one node", master_addr="127.0.0.1")

    def _take_given_address(self) -> None:
        host, port = self.parsed("MASTER_ADDR", parse_address) or (None, None)
        if host and self._nodes_are_hosts and self._spans_nodes() and is_loopback(host):
            why = "is a loopback address, and there are several nodes: the others would connect to themselves"
            self.reject("MASTER_ADDR", why)
        self._record("master_addr", host, "MASTER_ADDR")
        self._record("master_port", port, "MASTER_ADDR")
        self.agree("MASTER_PORT", port, "the port in MASTER_ADDR")

    def _take_platforms_address(self, platform: Platform) -> None:
        reader = json_hosts if platform.lists_hosts else parse_address
        read = {
            name: self.parsed(name, reader) for name in platform.addresses if name in self.environ
        }
        found = {name: str(parts[0]) for name, parts in read.items() if parts is not None}
        for name, host in found.items():
            if not is_loopback(host):
                self.put(name, master_addr=host)
        # Localhost is Azure ML's way to say that there is one node
        if found and not self._spans_nodes():
            self.put([*found][-1], master_addr="127.0.0.1")

    def _find_port(self) -> None:
        job_id = self._values["job_id"]
        seed = (job_id, self._sources["job_id"]) if isinstance(job_id, str) else self.port_seed
        if "MASTER_PORT" in self.environ:
            self.put("MASTER_PORT", master_port=self.parsed("MASTER_PORT", parse_port))
        elif seed:
            self.put(f"derived from {seed[1]}", master_port=derived_port(seed[0]))

    def _text(self, field: str) -> str:
        source = self._sources[field]
        return (
            variable(self.environ, source)
            if source in self.environ
            else f"{field}={self._values[field]}"
        )

    def _spans_nodes(self) -> bool:
        nodes = self.number("num_nodes")
        if nodes is not None:
            return nodes > 1
        world_size = self.number("world_size")
        here = self.number("local_world_size")
        return here is not None and world_size is not None and here < world_size

    def _report(self) -> str:
        head, count = f"launcher {self._launcher!r}:", len(self.problems)
        if count == 1:
            return f"{head} {self.problems[0]}"
        more = []
        if count > _MOST_PROBLEMS:
            more.append(f"and {count - _MOST_PROBLEMS} more")
        return "\n  ".join([f"{head} {count} problems:", *self.problems[:_MOST_PROBLEMS], *more])

    def _remedy(self) -> str:
        if all(problem.startswith("MASTER_") for problem in self.problems):
            return "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or clear them"
        missing = [
            problem.removesuffix(_MISSING)
            for problem in self.problems
            if problem.endswith(_MISSING)
        ]
        if missing and self.remedy == _REMEDY:
            return f"to pass it to a container: {container_env_hint(*missing)}; else {_REMEDY}"
        return self.remedy
