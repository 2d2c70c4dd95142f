"""What every framework's start has in common: the variables that it exports, and the context that it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from .. import handoff
from ..context import Context
from ..errors import DistbootError, first_line
from ..exports import Exported, variables
from ..placement import FIELDS
from ..rollcall.gate import Gate
from ..rollcall.meeting import Meeting
from ._options import Options

_BARRIER_LIMIT = 1800.0  # seconds; what PyTorch gives a collective operation on Gloo


def imported(module: str, package: str, install: str) -> Any:
    """A framework's module.

    Args:
        module: its name, for example "horovod.torch".
        package: the package that has to be installed for it, for example "horovod".
        install: how that is done.

    Raises:
        DistbootError: `framework-not-installed`.
    """
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            said, hint = f"{package} is not installed in this Python", install
        else:  # a library that it needs is not there, say
            said, hint = f"{module} cannot be imported: {first_line(error)}", "look at the installation on that host"
        raise DistbootError("framework-not-installed", said, hint) from None


def export(meeting: Meeting, exported: Exported, others: Mapping[str, str] = {}) -> None:
    """Export this rank's place, which this process has joined as, and what only the one framework reads."""
    before = exported.environ_before()
    exported.write(variables(meeting.placement, before, joined=os.getpid(), others=others))


class Meets(Protocol):
    """How the ranks of a framework wait for each other."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def wait_for(self, what: str, limit: float, *, opens: bool) -> None:
        """Wait, `limit` seconds at most, for the rank that `opens` it by coming here, too."""

    def close(self) -> None:
        """Give back what is needed for it."""


class Gated:
    """At rank 0's socket, as in the roll call: for a framework that has nothing of its own for it."""

    def __init__(self, meeting: Meeting, options: Options) -> None:
        self._gate = Gate(meeting)
        self._limit = options.timeout or _BARRIER_LIMIT
        self.close = self._gate.close

    def barrier(self) -> None:
        self._gate.wait("barrier()", self._limit)

    def wait_for(self, what: str, limit: float, *, opens: bool) -> None:  # noqa: ARG002 - all meet when it is open
        self._gate.wait(what, limit, first=True)


def context(
    meeting: Meeting,
    exported: Exported,
    options: Options,
    meets: Meets,
    *,
    leave: Callable[[], None] = lambda: None,
    is_up: Callable[[], bool] = lambda: True,
    **adds: Any,
) -> Context:
    """The context of a framework that has started.

    Args:
        meeting: of all ranks.
        exported: what was exported for it.
        options: of the caller of `init`.
        meets: how the ranks wait for each other.
        leave: ends the framework, if it is up.
        is_up: whether it has not ended by itself.
        adds: what the framework adds to the context.
    """
    placement = meeting.placement
    after = variables(placement, exported.environ_before())[handoff.VARIABLE]
    reservation = meeting.take_reservation()

    def stop() -> None:
        leave()
        meets.close()
        if reservation is not None:
            reservation.close()
        # What this process starts from now on may be the rank in its place.
        exported.write({handoff.VARIABLE: after})

    return Context(
        framework=options.framework,
        **{name: getattr(placement, name) for name in FIELDS},
        hosts=meeting.hosts,
        **adds,
        _barrier=meets.barrier,
        _wait_for=meets.wait_for,
        _stop=stop,
        _is_up=is_up,
    )
