"""What every framework's start has in common: the variables that it exports, and the context that it returns."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from .. import ending, handoff
from ..context import Context
from ..errors import DistbootError, first_line
from ..exports import Exported, variables
from ..lifeline import last_words
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
    collects = gc.isenabled()
    gc.disable()  # what an import makes stays; looking for garbage in it costs a tenth of the time of large ones
    try:
        return import_module(module)
    except Exception as error:  # noqa: BLE001 - of packages that do not fit each other
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            said, hint = f"{package} is not installed in this Python", install
        else:  # a library that it needs is not there, say
            said, hint = f"{module} cannot be imported: {first_line(error)}", "look at the installation on that host"
        raise DistbootError("framework-not-installed", said, hint) from None
    finally:
        if collects:
            gc.enable()


def export(meeting: Meeting, exported: Exported, others: Mapping[str, str] = {}) -> None:
    """Export this rank's place, which this process has joined as, and what only the one framework reads."""
    placement, before = meeting.placement, exported.environ_before()
    _, outer = handoff.take(before)
    # What the wrapper around us does for this rank it does until the end, for the next `init`, too.
    wrapper = outer if outer is not None and outer.is_about(placement) else None
    met, watched = wrapper is not None and wrapper.met, wrapper is not None and wrapper.watched
    joined = os.getpid()
    exported.write(variables(placement, before, joined=joined, others=others, met=met, watched=watched))


def at_end(
    *,
    well: Callable[[], object],
    exited: Callable[[], object] | None = None,
    failed: Callable[[], object] | None = None,
) -> None:
    """Do one of these when the script ends, but not in a forked child.

    Args:
        well: if it ends well.
        exited: if it ends with an exit code, by `sys.exit`.
        failed: if it ends with an uncaught exception.
    """
    ending.watch()
    pid, works = os.getpid(), {ending.WELL: well, ending.EXIT: exited, ending.EXCEPTION: failed}

    def run() -> None:
        work = works[ending.outcome()]
        if os.getpid() == pid and work is not None:
            work()

    atexit.register(run)


@contextmanager
def limited(meeting: Meeting, what: str) -> Iterator[None]:
    """End this process if the block has not ended within the join timeout: there is no other way out of C code.

    Only for code that lets go of Python's lock while it waits; for other code there is `deadline`.

    Args:
        meeting: of all ranks.
        what: what did not happen, for example "Horovod did not start".
    """
    late = DistbootError(
        "join-timeout",
        f"{what} within {meeting.join_timeout:g} s, although all ranks were ready to",
        "look at the output of the other ranks; or for a firewall between the hosts",
    ).of(meeting.placement.who)

    def end() -> None:
        os.write(2, f"distboot: {late}\n".encode())
        last_words.say(last_words.EXCEPTION, f"distboot.DistbootError: {first_line(late)}")  # as a traceback ends
        os._exit(late.exit_code)

    timer = threading.Timer(meeting.join_timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a script may fork next


class Meets(Protocol):
    """How the ranks of a framework wait for each other."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def wait_for(
        self, what: str, limit: float, *, opens: bool, node: int | None = None, failure: str | None = None
    ) -> None:
        """Wait, `limit` seconds at most, for rank 0, or the first rank of a node; or be it, which `opens`, or fails."""

    def close(self) -> None:
        """Give back what is needed for it."""


class Gated:
    """At the gate of the roll call.

    Args:
        meeting: of all ranks.
        options: of the caller of `init`.
        barrier: the framework's own; default: that of the gate.
        listener, port: as for `Gate`.
    """

    def __init__(
        self,
        meeting: Meeting,
        options: Options,
        *,
        barrier: Callable[[], object] | None = None,
        listener: socket.socket | None = None,
        port: int | None = None,
    ) -> None:
        gate = Gate(meeting, listener, port)
        self._barrier = barrier or partial(gate.barrier, options.timeout or _BARRIER_LIMIT)
        self.wait_for, self.close = gate.wait_for, gate.close

    def barrier(self) -> None:
        self._barrier()


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
    after = handoff.left(os.environ[handoff.VARIABLE])
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
