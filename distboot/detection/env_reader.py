"""`EnvReader`: reads one environment for one launcher. It gathers values and *every* problem.

In the end `placement()` checks that the numbers fit together, derives what follows from them, finds
the address of rank 0, and raises a single error when anything was wrong. Rank and size have to be
there. What else is missing is None, and one note names it: a container has only the variables that
were passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import filterfalse
from types import MappingProxyType
from typing import Any, TypeVar

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import short_repr
from ..host import derived_port
from .numbers import contradictions
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
    NO_LAUNCHER,
    NUMBERS,
    Placement,
    Platform,
    names_one_job,
    recognize,
)

T = TypeVar("T")

_MOST_PROBLEMS = 20  # in one message
_NUMBER_READERS: Mapping[str | None, Callable[[str], int]] = {
    "world_size": parse_count,
    "local_world_size": parse_count,
    "num_nodes": parse_count,
}
_REQUIRED = ("rank", "world_size")
_UNKNOWN = dict.fromkeys(FIELDS)
_REMEDY = (
    "these variables come from the launcher: look for a script, image or shell that changes them, "
    "or name the launcher with DISTBOOT_LAUNCHER"
)


def variable(environ: Mapping[str, str], name: str) -> str:
    """`NAME='value'`, as error messages show it."""
    value = environ[name]
    return f"{name}={short_repr(value)}"


def container_env_hint(*names: str) -> str:
    """How to pass these variables to a container."""
    options = " ".join(f"-e {name}" for name in names)
    values = ",".join(f"{name}=${name}" for name in names)
    listed = ",".join(names)
    return (
        f"docker run {options} (also podman run, enroot start), "
        f"apptainer exec --env {values}, "
        f"srun --container-env={listed} (pyxis)"
    )


class EnvReader:
    """What `launcher` says in `environ`: values by field, their sources, problems and notes."""

    def __init__(
        self,
        environ: Mapping[str, str],
        launcher: str,
        in_order: tuple[str, ...],
        fallbacks: Mapping[str, str],
        *,
        nodes_are_hosts: bool,
    ) -> None:
        self.environ = environ  # never written to
        self.problems: list[str] = []  # sentences for people, each with the variable and its value
        self.notes: list[str] = []  # remarks for people
        self.absent: list[str] = []  # what this launcher sets for each process, and is not there
        self._missing: list[str] = []  # what has to be there, and is not
        # Why the launcher's numbers count nodes or pods and not ranks; None when they count ranks.
        self.node_level: str | None = None
        self.remedy = ""  # the launcher's own hint of the error, when there are problems
        # The host of rank 0 by the launcher, and its source
        self.own_address: tuple[str, str] | None = None
        # A text that is the same for all ranks, and its source: a port is derived from it
        self.port_seed: tuple[str, str] | None = None
        self._own_port: int | None = None  # the launcher's
        self._launcher = launcher
        self._in_order = in_order
        self._fallbacks = fallbacks
        self._nodes_are_hosts = nodes_are_hosts
        self._values: dict[str, Any] = {**_UNKNOWN, "launcher": launcher}
        self._sources: dict[str, str] = {}

    # -- what has been read

    def record(self, source: str, **values: object) -> None:
        """Record values of fields and their source. The first value stays; None is not recorded."""
        for field, value in values.items():
            self._record_one(field, value, source)

    def record_own_port(self, source: str, port: int | None) -> None:
        """Record the launcher's port at rank 0.

        Not if MASTER_PORT is set, or MASTER_ADDR names a different host.
        """
        self._own_port = port
        own_host, _ = self.own_address or (None, "")
        is_same_host = self.environ.get("MASTER_ADDR", own_host) == own_host
        if is_same_host and "MASTER_PORT" not in self.environ:
            self.record(source, master_port=port)

    def _record_one(self, field: str, value: object, source: str) -> None:
        is_new = self._values[field] is None
        if is_new and value is not None:
            self._values[field] = value
            self._sources[field] = source

    def reject(self, name: str, cause: str) -> None:
        """Record a problem of variable `name`, with a cause that reads well after its value."""
        shown = variable(self.environ, name)
        self.problems.append(f"{shown} {cause}")

    def number(self, field: str) -> int | None:
        """The number recorded for a field so far, or None."""
        number: int | None = self._values[field]
        return number

    def source(self, field: str) -> str:
        """Where the value of a field came from; empty where there is none."""
        return self._sources.get(field, "")

    # -- reading

    def integer(self, name: str, field: str | None = None, *, required: bool = False) -> int | None:
        """The integer of 0 or more in a variable, recorded under `field`.

        Rank and world size are required.
        """
        reader = _NUMBER_READERS.get(field, parse_number)
        number = self.parsed(name, reader, required=required or field in _REQUIRED)
        if field is not None:
            self._record_one(field, number, name)
        return number

    def integers(self, *names: str, optional: tuple[str, ...] = ()) -> None:
        """Record the integers in these variables as `NUMBERS`, in order; empty: no variable."""
        left_out = {"", *optional}.difference(self.environ)
        for name, field in zip(names, NUMBERS):  # noqa: B905 - the last ones may be missing
            if name not in left_out:
                self.integer(self.set_name(name), field)

    def set_name(self, name: str) -> str:
        """The variable, or its fallback if only that is there."""
        fallback = self._fallbacks.get(name)
        if fallback is None:
            return name
        return self.first(name, fallback)

    def text(self, name: str, *, required: bool = False) -> str | None:
        """The text of a variable that the launcher always sets.

        A missing one is noted, or is a problem if it is required.
        """
        text = self.environ.get(name)
        if text is None:
            if required:
                self._missing.append(name)
                self.problems.append(f"{name} is missing")
            else:
                self.absent.append(name)
        return text

    def expect(self, *names: str) -> None:
        """Note those of these variables that are missing, which the launcher always sets."""
        missing = filterfalse(self.environ.__contains__, names)
        self.absent.extend(missing)

    def first(self, *names: str) -> str:
        """The first of these variables that is set; if none is, the first of all, to be missed."""
        for name in names:
            if name in self.environ:
                return name
        return names[0]

    def parsed(self, name: str, reader: Callable[[str], T], *, required: bool = False) -> T | None:
        """The result of `reader` for its text; for a ValueError None, and a problem."""
        text = self.text(name, required=required)
        if text is None:
            return None
        try:
            return reader(text)
        except ValueError as cause:
            self.reject(name, str(cause))
            return None

    def given(self, name: str, reader: Callable[[str], T]) -> T | None:
        """As `parsed`, for a variable that need not be set."""
        if name not in self.environ:
            return None
        return self.parsed(name, reader)

    def agree(self, name: str, other: object, source: str) -> None:
        """Record a problem if variable `name` contradicts `other`, the value of `source`."""
        if other is None:
            return
        expected = str(other)
        text = self.environ.get(name, expected)
        if text != expected:
            shown = short_repr(expected)
            self.reject(name, f"contradicts {source}={shown}")

    def job_id(self, *names: str) -> None:
        """Take the job id from the first of these variables that is set and not empty."""
        for name in names:
            text = self.environ.get(name)
            if text:
                self._record_one("job_id", text, name)

    def take_own_address(self, name: str) -> int | None:
        """Take the host of rank 0 from a variable of the launcher; returns the port in it."""
        self.own_address = None
        address = self.parsed(name, parse_address)
        if address is None:
            return None
        host, port = address
        self.own_address = (host, name)
        return port

    # -- the result

    def placement(self) -> Placement:
        """The whole placement, or one `broken-environment` with every problem in it."""
        self._check_numbers()
        if not self.problems:
            self._derive_numbers()
        found = len(self.problems)
        self._locate_rank0()
        self._find_port()
        if self._launcher == NO_LAUNCHER:
            self._ignore_problems(found)
        if self.problems:
            raise self._error()
        if self.absent:
            absent = ", ".join(self.absent)
            note = f"not set, and so unknown here: {absent}"
            self.notes.append(note)
        sources = self._sources
        in_order = {field: sources[field] for field in FIELDS if field in sources}
        return Placement(
            **self._values,
            sources=MappingProxyType(in_order),
            notes=tuple(self.notes),
            node_level=self.node_level,
        )

    def _ignore_problems(self, first: int) -> None:
        """Turn problems of the address into notes, for a process that is alone."""
        ignored = self.problems[first:]
        del self.problems[first:]
        for problem in ignored:
            note = f"{problem}; ignored, as this process is alone"
            self.notes.append(note)

    def _check_numbers(self) -> None:
        numbers = [self._values[field] for field in NUMBERS]
        found = contradictions(
            numbers,
            self._in_order,
            self._describe,
        )
        self.problems += found

    def _describe(self, field: str) -> str:
        """The variable that a value came from, and the value."""
        source = self._sources[field]
        value = self._values[field]
        if source in self.environ:
            return variable(self.environ, source)
        return f"{field}={value}"

    def _derive_numbers(self) -> None:
        known = len(self._sources)
        rank = self.number("rank")
        world_size = self.number("world_size")
        if world_size == 1:
            source = "derived: a job of one process"
            self.record(source, local_rank=0, local_world_size=1, num_nodes=1)
        here = self.number("local_world_size")
        if here == world_size:
            source = "derived: all processes of the job are on this node"
            self._record_one("num_nodes", 1, source)
        elif here == 1 and world_size == 2:
            source = "derived: two processes, and one of them is on this node"
            self._record_one("num_nodes", 2, source)
        nodes = self.number("num_nodes")
        if nodes == 1:
            source = "derived: the job has one node"
            self.record(source, node_rank=0, local_world_size=world_size, local_rank=rank)
        if nodes == world_size:
            # Every node has at least one rank, so each has exactly one, and rank r is the r-th to
            # be met.
            source = "derived: one process per node"
            self.record(source, node_rank=rank, local_rank=0, local_world_size=1)
        if len(self._sources) > known:
            self._check_numbers()

    def _locate_rank0(self) -> None:
        platform = recognize(self.environ)
        if platform is not None:
            marker = self.first(*platform.markers)
            self._record_one("platform", platform.name, marker)
            self.job_id(*platform.job_id_variables)
        if "MASTER_ADDR" in self.environ:
            self._take_given_address()
        elif self.own_address is not None:
            # Before the platform's: it is rank 0's by the launcher's own definition
            host, source = self.own_address
            self._record_one("master_addr", host, source)
        elif platform is not None:
            address, source = self._platforms_address(platform)
            self._record_one("master_addr", address, source)
        nodes = self.number("num_nodes")
        if nodes == 1:
            source = "loopback: the job has one node"
            self._record_one("master_addr", "127.0.0.1", source)

    def _take_given_address(self) -> None:
        address = self.parsed("MASTER_ADDR", parse_address)
        if address is None:
            return
        host, port = address
        spans_hosts = self._nodes_are_hosts and self._spans_nodes()
        if spans_hosts and is_loopback(host):
            self.reject(
                "MASTER_ADDR",
                "is a loopback address, and there are several nodes: the others would connect to "
                "themselves",
            )
        self._record_one("master_addr", host, "MASTER_ADDR")
        self._record_one("master_port", port, "MASTER_ADDR")
        self.agree("MASTER_PORT", port, "the port in MASTER_ADDR")

    def _platforms_address(self, platform: Platform) -> tuple[str | None, str]:
        """The host of rank 0 by the platform, and its source; None: it says none."""
        is_silenced = self.environ.get(platform.silenced_by) == "true"
        # The address is that of the platform's node 0, where a job of one node need not be
        is_on_one_node = self.number("num_nodes") == 1 or self.number("world_size") == 1
        if is_silenced or is_on_one_node:
            return None, ""
        reader: Callable[[str], Any] = parse_address
        if platform.lists_hosts:
            reader = json_hosts
        hosts = []
        last = ""
        for name in platform.addresses:
            parts = self.given(name, reader)
            if parts is None:
                continue
            last = name
            host = parts[0]
            if not is_loopback(host):
                hosts.append((host, name))
        # Localhost is Azure ML's way to say that there is one node
        spans_nodes = self._spans_nodes()
        if last and not spans_nodes:
            hosts.append(("127.0.0.1", last))
        return next(iter(hosts), (None, ""))

    def _find_port(self) -> None:
        name = "MASTER_PORT"
        if name in self.environ:
            port = self.parsed(name, parse_port)
            self._record_one("master_port", port, name)
            return
        seeds = []
        job_id = self._values["job_id"]
        if job_id is not None:
            seeds.append((job_id, self._sources["job_id"]))
        # An allocation has one id, and may have several jobs
        has_own_id = names_one_job(self._sources.get("job_id"))
        if self.port_seed is not None and not has_own_id:
            seeds.append(self.port_seed)
        if not seeds:
            return
        text = ":".join(text for text, _ in seeds)
        source = " and ".join(source for _, source in seeds)
        port = derived_port(text)
        self._record_one("master_port", port, f"derived from {source}")

    def _spans_nodes(self) -> bool:
        nodes = self.number("num_nodes")
        if nodes is not None:
            return nodes > 1
        world_size = self.number("world_size")
        here = self.number("local_world_size")
        if here is None or world_size is None:
            return False
        return here < world_size

    def _error(self) -> DistbootError:
        who = UNKNOWN_RANK
        rank = self.number("rank")
        if rank is not None:
            who = f"rank {rank}"
        return DistbootError("broken-environment", self._report(), self._remedy()).of(who)

    def _report(self) -> str:
        head = f"launcher {self._launcher!r}:"
        problems = list(dict.fromkeys(self.problems))  # launcher and platform may read the same
        count = len(problems)
        shown = problems[:_MOST_PROBLEMS]
        more = count - len(shown)
        if count == 1:
            return f"{head} {shown[0]}"
        lines = [f"{head} {count} problems:", *shown]
        if more:
            lines.append(f"and {more} more")
        return "\n  ".join(lines)

    def _remedy(self) -> str:
        if all(problem.startswith("MASTER_") for problem in self.problems):
            return self._address_remedy()
        if self.remedy:
            return self.remedy
        if not self._missing:
            return _REMEDY
        to_container = container_env_hint(*self._missing)
        return f"to pass it to a container: {to_container}; else {_REMEDY}"

    def _address_remedy(self) -> str:
        from .address_remedy import address_remedy  # here, as few environments are broken

        platform = recognize(self.environ)
        addresses = (
            self.own_address,
            platform is not None and self._platforms_address(platform)[0],
            self.number("num_nodes") == 1,
        )
        ports = (
            self.number("master_port"),  # that in MASTER_ADDR
            self._own_port,
            self._values["job_id"],
            self.port_seed,
            self.number("world_size") == 1,
        )
        can_do_without = {"MASTER_ADDR": any(addresses), "MASTER_PORT": any(ports)}
        return address_remedy(self.problems, can_do_without)
