"""`init("horovod.torch")`, `.tensorflow`, `.keras`: Horovod on MPI under an MPI launcher, and everywhere else on Gloo.

On Gloo rank 0 runs Horovod's own rendezvous server, so that nobody needs horovodrun. Whichever it is: Horovod's numbers
are compared with those of the roll call, as a process that finds no peers is a world of its own for Horovod.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from .. import handoff, interfaces
from ..context import Context
from ..errors import DistbootError, first_line
from ..exports import Exported
from ..rendezvous import MPI_LAUNCHERS
from ..rollcall.meeting import Meeting
from ..rollcall.ready import Ready
from ..roster import ranks_said
from . import _horovod_module
from ._horovod_build import Build, mpi_has_ended, of_files, of_module
from ._horovod_controller import SAME_MPI, controller
from ._horovod_rendezvous import Rendezvous, numbers, variables
from ._joined import Gated, context, export, limited
from ._options import Options


def on_cpu(_: Options) -> bool:
    """Both of Horovod's backends serve accelerators, too."""
    return False


def exports(meeting: Meeting, environ: Mapping[str, str]) -> dict[str, str]:
    """What `hvd.init()` of an unmodified script reads. On Gloo, rank 0's wrapper serves the rendezvous."""
    if meeting.placement.world_size == 1:
        return {}
    placement, bare = meeting.placement, handoff.take(environ)[0]

    def step() -> tuple[str, Ready]:
        kind = controller(of_files(ask_mpi=placement.launcher in MPI_LAUNCHERS), placement, bare)
        return kind, Ready(offer=_offer(kind, _server(kind, meeting)))

    return _exports(meeting.ready(step), meeting, bare)


def start(meeting: Meeting, exported: Exported, options: Options) -> Context:
    """Start Horovod, and see that it has the numbers of the roll call."""
    placement, before = meeting.placement, exported.environ_before()
    bare = handoff.take(before)[0]
    exported.write(interfaces.variables(meeting.interface, before))
    exported.write(_horovod_module.variables(options.framework, before))
    with ExitStack() as undo:

        def step() -> tuple[tuple[Any, Build, str, Any], Ready]:
            hvd = _horovod_module.module(options.framework)
            build = of_module(hvd)
            kind = controller(build, placement, bare, options.backend)
            _refuse_second_start(hvd, kind)
            _refuse_timeout(options, kind, meeting)
            device, device_id = None, None
            if options.framework == "horovod.torch":
                device, device_id = _horovod_module.device(hvd, placement, before)
            server = _server(kind, meeting)
            if server is not None:
                undo.callback(server.close)
            return (hvd, build, kind, device), Ready(device_id, _offer(kind, server))

        hvd, build, kind, device = meeting.ready(step)
        others = _exports(kind, meeting, bare, options.timeout)
        undo.callback(exported.write, {name: before.get(name) for name in others})  # what is over is not to be joined
        export(meeting, exported, others)
        undo.callback(hvd.shutdown)
        _begin(hvd, meeting)
        _compare(hvd, build, kind, meeting)
        leave = undo.pop_all().close
    meets = Gated(meeting, options)
    return context(meeting, exported, options, meets, leave=leave, is_up=hvd.is_initialized, hvd=hvd, device=device)


def _refuse_second_start(hvd: Any, kind: str) -> None:
    if mpi_has_ended() and (kind == "mpi" or hvd.mpi_enabled()):
        raise DistbootError(
            "already-initialized",
            "Horovod has used MPI in this process and ended it, and MPI cannot be started a second time",
            "keep the context open until the script ends",
        )


def _refuse_timeout(options: Options, kind: str, meeting: Meeting) -> None:
    """Refuse a time limit that nobody would heed."""
    if options.timeout is not None and (kind == "mpi" or _brings_its_own(meeting)):
        where = "MPI has none for its operations" if kind == "mpi" else "horovodrun has set its own"
        raise DistbootError("usage", f"timeout={options.timeout:g}, and {where}", "leave timeout= out")


def _brings_its_own(meeting: Meeting) -> bool:
    """Whether the launcher runs a rendezvous server, and has set all of Horovod's variables."""
    return meeting.placement.launcher == "horovodrun"


def _server(kind: str, meeting: Meeting) -> Rendezvous | None:
    """The rendezvous server that this rank has to run."""
    placement = meeting.placement
    if kind != "gloo" or placement.world_size == 1 or _brings_its_own(meeting):
        return None
    if meeting.roster is None:
        raise DistbootError(
            "roll-call-needed",
            "DISTBOOT_ROLL_CALL=0, and so nobody can learn where rank 0 runs Horovod's rendezvous server",
            "unset DISTBOOT_ROLL_CALL",
        )
    return Rendezvous(meeting) if placement.rank == 0 else None


def _offer(kind: str, server: Rendezvous | None) -> str:
    """What the other ranks hear of this one: `"mpi"`, `"gloo"`, or on rank 0 `"gloo 10.0.0.1:61234"`."""
    return kind if server is None else f"{kind} {server.address}"


def _exports(kind: str, meeting: Meeting, bare: Mapping[str, str], timeout: float | None = None) -> dict[str, str]:
    """What Horovod reads, now that every rank has said what it is about to use."""
    others = [rank for rank, offer in sorted(meeting.offers.items()) if offer.partition(" ")[0] != kind]
    if others:
        same = [rank for rank in sorted(meeting.offers) if rank not in others]
        raise DistbootError(
            "rank-mismatch",
            f"Horovod is about to use {kind} on {ranks_said(same)}, and something else on {ranks_said(others)}",
            "use the same Horovod and the same HOROVOD_CONTROLLER on all hosts, or backend='gloo' for all",
        )
    if _brings_its_own(meeting):
        return {}
    if kind == "mpi":
        return {} if bare.get("HOROVOD_CONTROLLER") else {"HOROVOD_CONTROLLER": "mpi"}
    return variables(meeting, meeting.offers.get(0, "").partition(" ")[2] or None, bare, timeout)


def _begin(hvd: Any, meeting: Meeting) -> None:
    """`hvd.init()`, which has no time limit on MPI, and on Gloo aborts the process without saying who that is."""
    with limited(meeting, "Horovod did not start"):
        try:
            hvd.init()
        except (ValueError, RuntimeError) as error:
            raise DistbootError(
                "process-group-failed", f"Horovod could not start: {first_line(error)}", "look at what it has printed"
            ) from None


def _compare(hvd: Any, build: Build, kind: str, meeting: Meeting) -> None:
    """Refuse a Horovod that has other numbers than the job: a world of its own, most likely."""
    expected = numbers(meeting)
    found = {name: getattr(hvd, name)() for name in expected}
    if found == expected:
        return
    why, hint = "", "use Gloo: init(…, backend='gloo')"
    if kind == "mpi" and found["size"] == 1:
        why, hint = f": its MPI ({build.library}) does not find the other ranks", f"{SAME_MPI}; or {hint}"
    elif _brings_its_own(meeting):
        why, hint = ", as horovodrun has told it", "name each host once in horovodrun's -H"
    raise DistbootError(
        "rank-mismatch",
        f"launcher {meeting.placement.launcher!r} says that this is {_said(expected)}, and Horovod that it is "
        f"{_said(found)}{why}",
        hint,
    )


def _said(found: Mapping[str, int]) -> str:
    """`"rank 1 of 4, local rank 1 of 2, cross rank 0 of 2"`."""
    pairs = (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size"))
    return ", ".join(
        f"{name.replace('_', ' ')} {found[name]} of {found[size]}" for name, size in pairs if name in found
    )
