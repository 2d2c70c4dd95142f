"""What several frameworks have in common: their import, the variables that are exported, the end, and the context.

And what is left without one: `init("none")`, the environment and the roll call, with its barrier.
"""

from __future__ import annotations

import atexit
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
from ..base.text import first_line
from ..context import Context
from ..detection import inherited
from ..detection.env_reader import variable
from ..detection.export import EnvTransaction, variables
from ..detection.placement import FIELDS
from ..host import free_port
from ..host.network import NO_PROXIES, PROXIES
from ..rendezvous.messages import BARRIER, Ready
from ..script import crash_hooks, hints, workers
from ..script.preemption import Preemption
from ..script.sys_exit import EXCEPTION, EXIT, WELL, exit_outcome, watch_exit
from . import Options

_BARRIER_LIMIT = 1800.0  # seconds; what PyTorch gives a collective operation on Gloo


def imported(module: str, install: str = "") -> Any:
    """A framework's module; `install` says how to get it, by default: with pip."""
    package = module.partition(".")[0]
    is_new, collects = module not in sys.modules, gc.isenabled()
    # What an import makes stays; looking for garbage in it costs a tenth of the time of large ones
    gc.disable()
    try:
        return import_module(module)
    except Exception as error:  # noqa: BLE001 - of packages that do not fit each other
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            problem, hint = (
                f"{package} is not installed in this Python",
                install or f"pip install {package}",
            )
        else:  # a library that it needs is not there, say
            problem, hint = (
                f"{module} cannot be imported: {first_line(error)}",
                "look at the installation on that host",
            )
        raise DistbootError("framework-not-installed", problem, hint) from None
    finally:
        if is_new:
            # Nor is it looked through again, which with torch costs 0.4 s at the end of Python
            gc.freeze()
        if collects:
            gc.enable()


def export(job: Session, exported: EnvTransaction, others: Mapping[str, str] = {}) -> None:
    """Export this rank's place, which this process has joined as, and what only the one framework reads."""
    placement, before = job.placement, exported.environ_before()
    # What the wrapper around us does for this rank it does until the end, for the next `init`, too.
    met = inherited.about(placement, before).met
    exported.write(variables(placement, before, joined=os.getpid(), others=others, met=met))


def keep_given(framework: str, wanted: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Refuse to overwrite variables of a framework that are set to different values."""
    different = [name for name in wanted if environ.get(name, wanted[name]) != wanted[name]]
    if not different:
        return
    given = ", ".join(variable(environ, name) for name in different)
    found = ", ".join(f"{name}={wanted[name]}" for name in different)
    raise DistbootError(
        "conflicting-launchers",
        f"{given}, but for this job {framework} needs {found}",
        f"unset {' and '.join(different)} if they are left over from a shell or an image; else start the processes"
        " that they count, one each",
    )


def at_end(
    *,
    well: Callable[[], object] | None = None,
    exited: Callable[[], object] | None = None,  # by `sys.exit`
    failed: Callable[[], object] | None = None,  # with an uncaught exception
) -> None:
    """Do one of these when the script ends, but not in a forked child."""
    watch_exit()
    pid, works = os.getpid(), {WELL: well, EXIT: exited, EXCEPTION: failed}

    def run() -> None:
        work = works[exit_outcome()]
        if os.getpid() == pid and work is not None:
            work()

    atexit.register(run)


@contextmanager
def in_our_words(code: str, problem: str, hint: str, *kinds: type[Exception]) -> Iterator[None]:
    """What a framework raises in this block, if it is one of these kinds, is an error of ours."""
    try:
        yield
    except kinds as error:
        raise DistbootError(code, f"{problem}: {first_line(error)}", hint) from None


@contextmanager
def limited(job: Session, what: str) -> Iterator[None]:
    """End this process if the block has not ended within the join timeout: there is no other way out of C code.

    Only for code that lets go of Python's lock while it waits; for other code there is `deadline`. `what` says for the
    error what did not happen, for example "Horovod did not start".
    """
    late = DistbootError(
        "join-timeout",
        f"{what} within {job.join_timeout:g} s, although all ranks were ready to",
        "look at the output of the other ranks; or for a firewall between the hosts",
    ).of(job.placement.who)

    def end() -> None:
        os.write(2, printed(late).encode())
        crash_hooks.emit_error(first_line(late))
        os._exit(late.exit_code)

    timer = threading.Timer(job.join_timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a script may fork next


def context(
    job: Session,
    exported: EnvTransaction,
    options: Options,
    *,
    barrier: Callable[[], None] | None = None,
    leave: Callable[[], None] = lambda: None,
    is_up: Callable[[], bool] = lambda: True,
    **adds: Any,
) -> Context:
    """The context of a framework that has started.

    `barrier` is the framework's own, if it has one; `leave` ends the framework, if it is up; `adds` are fields.
    """
    hints.install()
    workers.install_at_start()
    crash_hooks.install_below_wrapper()
    placement = job.placement
    if job.link is not None and placement.rank == 0 and not job.is_listener_taken:
        job.link.keep()
    after = inherited.after_close(os.environ[inherited.VARIABLE])

    def stop() -> None:
        leave()
        job.leave()
        # What this process starts from now on may be the rank in its place.
        exported.write({inherited.VARIABLE: after})

    return Context(
        framework=options.framework,
        **{name: getattr(placement, name) for name in FIELDS},
        hosts=job.hosts,
        **adds,
        _barrier=barrier or partial(job.wait_for, BARRIER, options.timeout or _BARRIER_LIMIT),
        _wait_for=job.wait_for,
        _stop=stop,
        _is_up=is_up,
        _preemption=Preemption(job.link, placement.who),
    )


def start(job: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start no framework: export, when all ranks are there, with a MASTER_PORT that is free for the script."""
    placement = job.placement
    # torchrun's is that of its own store, which torch will use.
    needed = (
        placement.rank == 0 and placement.launcher != "torchrun" and job.store_address is not None
    )
    job.ready(lambda: (True, Ready(offer=str(free_port()) if needed else None)))
    if 0 in job.offers:
        ours = {"master_port": int(job.offers[0])}
        job.placement = placement.with_fields(
            "free on the host of rank 0, for what the script starts", ours
        )
    export(job, exported)
    return context(job, exported, options)


def past_proxies(environ: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """What keeps gRPC from connecting to the peers through a proxy, where it would wait for ever."""
    if not any(environ.get(name) for name in PROXIES):
        return {}
    known = next((environ[name].split(",") for name in NO_PROXIES if name in environ), [])
    missing = [host for host in hosts if host not in known]
    return {NO_PROXIES[0]: ",".join([*filter(None, known), *missing])} if missing else {}
