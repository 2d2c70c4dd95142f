"""What several frameworks share: import, exported variables, the time limit, the context.

Also `init("none")`: the environment and the rendezvous, with distboot's own barrier.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from ..agent.session import Session
from ..base.errors import DistbootError, printed
from ..base.text import first_line, short_repr
from ..context import Context
from ..detection import inherited
from ..detection.export import EnvTransaction, variables
from ..detection.order import LAUNCHERS
from ..detection.placement import FIELDS
from ..host import free_port
from ..host.network import NO_PROXIES, PROXIES
from ..rendezvous.messages import BARRIER, Ready
from ..script import crash_hooks, hints, workers
from ..script.preemption import Preemption
from . import Options

_BARRIER_TIMEOUT = 1800.0  # seconds; PyTorch's for a collective operation on Gloo


def imported(module: str, install: str = "") -> Any:
    """Import a framework's module; `install` is the command for one that is missing."""
    collects = gc.isenabled()
    # Most objects of an import live until the end: garbage collection among them costs a tenth
    # of the time of a large import.
    gc.disable()
    try:
        return import_module(module)
    except Exception as error:  # noqa: BLE001 - packages that do not fit each other raise anything
        raise _import_error(module, install, error) from None
    finally:
        if collects:
            gc.enable()


def _import_error(module: str, install: str, error: Exception) -> DistbootError:
    package = module.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return DistbootError(
            "framework-not-installed",
            f"{package} is not installed in this Python",
            install or f"pip install {package}",
        )
    found = sys.modules.get(package)
    if found is not None and not hasattr(found, "__path__"):
        path = short_repr(found.__file__)
        return DistbootError(
            "framework-not-installed",
            f"{module} cannot be imported: the file {path} hides the package {package}",
            "give that file another name",
        )
    # For example a shared library that it needs is missing
    return DistbootError(
        "framework-not-installed",
        f"{module} cannot be imported: {first_line(error)}",
        "look at the installation on that host",
    )


def export(session: Session, exported: EnvTransaction, others: Mapping[str, str] = {}) -> None:
    """Export this rank's place, and `others`, which only the one framework reads."""
    placement = session.placement
    before = exported.environ_before()
    # A wrapper around this process serves this rank until the end, also for the next `init`
    met = inherited.about(placement, before).met
    exported.write(variables(placement, before, joined=os.getpid(), others=others, met=met))


@contextmanager
def raised_as(code: str, problem: str, hint: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds, raised by a framework in this block, into a DistbootError."""
    try:
        yield
    except kinds as error:
        raise DistbootError(code, f"{problem}: {first_line(error)}", hint) from None


@contextmanager
def within_join_timeout(session: Session, late: str) -> Iterator[None]:
    """End this process if the block takes longer than the join timeout: nothing else ends C code.

    Only for code that releases Python's lock while it waits; `deadline` is for other code. `late`
    is the error's text, for example "Horovod did not start".
    """
    error = DistbootError(
        "join-timeout",
        f"{late} within {session.join_timeout:g} s, although all ranks were ready to",
        "look at the output of the other ranks; or for a firewall between the hosts",
    ).of(session.placement.who)

    def end() -> None:
        os.write(2, printed(error).encode())
        crash_hooks.emit_error(first_line(error))
        os._exit(error.exit_code)

    timer = threading.Timer(session.join_timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # the script may fork next


def context(
    session: Session,
    exported: EnvTransaction,
    options: Options,
    *,
    barrier: Callable[[], None] | None = None,
    leave: Callable[[], None] = lambda: None,
    is_up: Callable[[], bool] = lambda: True,
    **fields: Any,
) -> Context:
    """The context of a framework that has started.

    `barrier` is the framework's own, if it has one; `leave` ends the framework, if it is up;
    `fields` are those that the framework adds.
    """
    hints.install()
    workers.install_at_start()
    crash_hooks.install_below_wrapper()
    placement = session.placement
    if session.link is not None and placement.rank == 0:
        session.link.keep()
    after = inherited.after_close(os.environ[inherited.VARIABLE])

    def leave_group() -> None:
        leave()
        session.leave()
        # A process that this one starts from now on may take the rank's place
        exported.write({inherited.VARIABLE: after})

    return Context(
        framework=options.framework,
        **{name: getattr(placement, name) for name in FIELDS},
        hosts=session.hosts,
        **fields,
        _barrier=barrier or partial(session.wait_for, BARRIER, options.timeout or _BARRIER_TIMEOUT),
        _wait_for=session.wait_for,
        _refuse_fork=session.refuse_fork,
        _leave_group=leave_group,
        _is_up=is_up,
        _preemption=Preemption(session.link, placement.who),
    )


def start(session: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start no framework: export, once all ranks joined, a MASTER_PORT that is free."""
    offer = None
    # Under torchrun MASTER_PORT is that of its own store, which torch will use
    is_torchrun = LAUNCHERS[session.placement.launcher].serves_master_port
    if session.placement.rank == 0 and not is_torchrun and session.store_address is not None:
        offer = str(free_port())
    session.ready(lambda: (True, Ready(offer=offer)))
    if 0 in session.offers:
        session.placement = session.placement.with_fields(
            "free on the host of rank 0, for what the script starts",
            {"master_port": int(session.offers[0])},
        )
    export(session, exported)
    return context(session, exported, options)


def past_proxies(environ: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """The variable that keeps gRPC from a proxy, where it would wait for the peers for ever."""
    if not any(map(environ.get, PROXIES)):
        return {}
    given = next(filter(environ.__contains__, NO_PROXIES), "")
    known = environ.get(given, "").split(",")
    missing = [host for host in hosts if host not in known]
    if not missing:
        return {}
    return {NO_PROXIES[0]: ",".join([*filter(None, known), *missing])}
