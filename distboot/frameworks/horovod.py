"""`init("horovod.torch")`, `.tensorflow`, `.keras`: Horovod on MPI or Gloo.

On Gloo rank 0 runs Horovod's own rendezvous server, so that horovodrun is not needed. Once Horovod
has started, its numbers are compared with those of the rendezvous: a process of Horovod that finds
no peers is a world of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from ..agent.session import Session
from ..base.errors import DistbootError, rendezvous_needed
from ..base.table import first_that_holds
from ..base.text import ranks_said
from ..context import Context
from ..detection import inherited
from ..detection.export import EnvTransaction
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement
from ..host import network
from ..rendezvous.messages import Ready
from . import Options
from . import _horovod_build as _build
from . import _horovod_gloo as _gloo
from ._base import context, export, raised_as, within_join_timeout
from ._horovod_build import Build
from ._horovod_controller import SAME_MPI, controller, may_use_mpi


class _Prepared(NamedTuple):
    """What a rank has when it is ready to start."""

    hvd: Any
    build: Build
    kind: str  # "mpi" or "gloo"
    device: Any


def on_cpu(_: Options) -> bool:
    """Both of Horovod's backends serve accelerators, too."""
    return False


def exports(session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for `hvd.init()` of an unmodified script; on Gloo rank 0's wrapper serves."""
    if session.placement.world_size == 1:
        return {}
    bare, _ = inherited.restored(environ)

    def step() -> tuple[str, Ready]:
        build = Build(mpi=False, gloo=True)
        if may_use_mpi(session.placement, bare):
            build = _build.asked(session.join_timeout)
        kind = controller(build, session.placement, bare)
        # The server ends with the wrapper
        return kind, Ready(offer=_offer(kind, session, ExitStack()))

    return _exports(session.ready(step), session, bare)


def start(session: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start Horovod, and compare its numbers with those of the rendezvous."""
    before = exported.environ_before()
    bare, _ = inherited.restored(before)
    exported.write(network.variables(session.interface, before))
    exported.write(_build.keras_variables(options.framework, before))
    with ExitStack() as undo:
        prepared = session.ready(partial(_prepare, session, options, before, undo))
        others = _exports(prepared.kind, session, bare, options.timeout)
        # After the end the variables must not lead a process to this job
        undo.callback(exported.write, {name: before.get(name) for name in others})
        export(session, exported, others)
        hvd = prepared.hvd
        undo.callback(hvd.shutdown)
        known = raised_as(
            "process-group-failed",
            "Horovod could not start",
            "look at what it has printed",
            ValueError,
            RuntimeError,
        )
        # On MPI Horovod has no time limit, and on Gloo it aborts without naming a rank
        with within_join_timeout(session, "Horovod did not start"), known:
            hvd.init()
        _compare(prepared, session)
        leave = undo.pop_all().close
    return context(
        session,
        exported,
        options,
        leave=leave,
        is_up=hvd.is_initialized,
        hvd=hvd,
        device=prepared.device,
    )


def _prepare(
    session: Session, options: Options, environ: Mapping[str, str], undo: ExitStack
) -> tuple[_Prepared, Ready]:
    """Import Horovod, choose MPI or Gloo and the device; rank 0 serves until `undo`."""
    bare, _ = inherited.restored(environ)
    hvd = _build.load(options.framework)
    build = _build.of_module(hvd)
    kind = controller(build, session.placement, bare, options.backend)
    if _build.mpi_has_ended() and (kind == "mpi" or hvd.mpi_enabled()):
        raise DistbootError(
            "already-initialized",
            "Horovod has used MPI in this process and ended it, and MPI cannot be started a "
            "second time",
            "keep the context open until the script ends",
        )
    if options.timeout is not None:
        _refuse_timeout(kind, session, options.timeout)
    device = None
    device_id = None
    if options.framework == "horovod.torch":
        device, device_id = _build.set_own_device(hvd, session.placement, environ)
    offer = _offer(kind, session, undo)
    return _Prepared(hvd, build, kind, device), Ready(device_id, offer)


def _is_configured(placement: Placement) -> bool:
    """Whether its launcher has set all that Horovod reads."""
    return LAUNCHERS[placement.launcher].configures_horovod


def _refuse_timeout(kind: str, session: Session, timeout: float) -> None:
    if kind == "mpi":
        problem = f"timeout={timeout:g}, and MPI has none for its operations"
    elif _is_configured(session.placement):
        problem = f"timeout={timeout:g}, and horovodrun has set its own"
    else:
        return
    raise DistbootError("usage", problem, "leave timeout= out")


def _offer(kind: str, session: Session, undo: ExitStack) -> str:
    """What this rank offers to the others: "mpi", "gloo", or "gloo 10.0.0.1:61234" with a server.

    The server runs until `undo`.
    """
    placement = session.placement
    if kind != "gloo" or placement.world_size == 1 or _is_configured(placement):
        return kind
    if session.membership is None:
        raise rendezvous_needed(
            "so no rank can learn where rank 0 runs Horovod's rendezvous server"
        )
    if placement.rank != 0:
        return kind
    return f"{kind} {_gloo.serve_rendezvous(session, undo)}"


def _exports(
    kind: str, session: Session, bare: Mapping[str, str], timeout: float | None = None
) -> dict[str, str]:
    """The variables for Horovod, now that every rank has offered what it will use."""
    _refuse_different(kind, session)
    if _is_configured(session.placement):
        return {}
    if kind == "gloo":
        return _gloo.variables(session, bare, timeout)
    if bare.get("HOROVOD_CONTROLLER"):
        return {}
    return {"HOROVOD_CONTROLLER": "mpi"}


def _refuse_different(kind: str, session: Session) -> None:
    """Refuse ranks of which some would use MPI and some Gloo."""
    same = []
    different = []
    for rank, offer in sorted(session.offers.items()):
        if offer.partition(" ")[0] == kind:
            same.append(rank)
        else:
            different.append(rank)
    if different:
        raise DistbootError(
            "rank-mismatch",
            f"Horovod is about to use {kind} on {ranks_said(same)}, and something else on "
            f"{ranks_said(different)}",
            "use the same Horovod and the same HOROVOD_CONTROLLER on all hosts, or backend='gloo' "
            "for all; `horovodrun --check-build` prints how Horovod was built",
        )


def _compare(prepared: _Prepared, session: Session) -> None:
    """Refuse a Horovod with other numbers than the job's: most likely it is a world of its own."""
    expected = _gloo.numbers(session)
    if prepared.kind == "mpi":
        # On MPI Horovod has local ranks in the order of ranks, whatever those of the launcher are
        expected = {name: expected[name] for name in ("rank", "size", "local_size")}
    found = {name: getattr(prepared.hvd, name)() for name in expected}
    if found == expected:
        return
    use_gloo = "use Gloo: init(…, backend='gloo')"
    alone = f": its MPI ({prepared.build.library}) does not find the other ranks"
    why, hint = first_that_holds(
        ((prepared.kind, found["size"]) == ("mpi", 1), (alone, f"{SAME_MPI}; or {use_gloo}")),
        (
            _is_configured(session.placement),
            (", as horovodrun has told it", "name each host once in horovodrun's -H"),
        ),
        (True, ("", use_gloo)),
    )
    raise DistbootError(
        "rank-mismatch",
        f"launcher {session.placement.launcher!r} says that this is {_describe(expected)}, "
        f"and Horovod that it is {_describe(found)}{why}",
        f"{hint}. {prepared.build.describe()}",
    )


def _describe(found: Mapping[str, int]) -> str:
    """`"rank 1 of 4, local rank 1 of 2, cross rank 0 of 2"`."""
    parts = []
    for name in ("rank", "local_rank", "cross_rank"):
        if name in found:
            size = found[name.replace("rank", "size")]
            parts.append(f"{name.replace('_', ' ')} {found[name]} of {size}")
    return ", ".join(parts)
