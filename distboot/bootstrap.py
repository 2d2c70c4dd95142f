"""`init`: detect, let all ranks meet, export, start the framework; all of it or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NamedTuple

from . import arguments, frameworks, handoff, mpi
from .context import Context
from .detection import detect, launcher_of
from .errors import DistbootError, quoted, said_by, tell
from .exports import Exported, threads
from .lifeline import beside
from .lifeline.settings import report_setting, settings
from .lifeline.unwatched import Unwatched
from .misspelled import warn_of_misspelled
from .nodes import refuse_unless_rank
from .placement import Placement
from .rendezvous import join_timeout_setting, roll_call_setting, seconds, settled, wait_until_resolves
from .report.steps import ALL_CALLED, CALLED, GROUP
from .rollcall.attend import attend
from .rollcall.meeting import Meeting, alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_lock = threading.Lock()


class _Current(NamedTuple):
    """The context that there is, the options with which it was made, and the process that did: a fork has none."""

    process: int
    context: Context
    options: frameworks.Options
    local_rank: str  # as it was exported; with torchrun --virtual-local-rank 0 on all


_current: _Current | None = None


def init(
    framework: str = "torch",
    *,
    backend: str | None = None,
    launcher: str | None = None,
    join_timeout: float | None = None,
    timeout: float | None = None,
    strategy: str | None = None,
    ps: int = 0,
    evaluator: bool = False,
    pass_local_rank: bool | None = None,
) -> Context:
    """Find this process's place in the job and start the framework. The first line of a script.

    Args:
        framework: what to start: "torch", "deepspeed", "horovod.torch", "horovod.tensorflow", "horovod.keras",
            "tensorflow", "jax", "mpi", or "none" for the environment and the roll call only.
        backend: backend of the process group; default: nccl on CUDA (xccl, hccl where they are), else gloo. Of
            Horovod: "mpi" or "gloo"; default: MPI under an MPI launcher, else gloo. Of TensorFlow: "ring", "nccl" or
            "auto".
        launcher: name of the launcher to believe; default: DISTBOOT_LAUNCHER, or else what `detect` finds.
        join_timeout: seconds for all ranks to be there, and once more for all to be ready to start the framework;
            default: DISTBOOT_JOIN_TIMEOUT, or else 300.
        timeout: seconds for a collective operation; default: the framework's.
        strategy: TensorFlow's: "multi_worker_mirrored", "parameter_server", "mirrored" or "default"; default: the
            first of these, or the last two on one process with several and with at most one accelerator.
        ps: with "parameter_server", how many ranks are parameter servers: the last ones.
        evaluator: with "parameter_server", whether the very last rank evaluates on the side.
        pass_local_rank: True puts `--local_rank=N` into `sys.argv`, once, for scripts that parse it after this; False
            removes it, as launchers supply it that the script need not know; default: `sys.argv` stays, and a local
            rank in it that is not this one is warned of.

    Returns:
        What the script holds from now on. A second call for the same framework returns the same one.

    Raises:
        DistbootError: something is wrong or missing, on this rank or on another one; its `code` says what.
            `os.environ` is then as it was before the call.
    """
    try:
        limit = None if timeout is None else seconds(f"timeout={quoted(timeout)}", timeout)
        options = frameworks.Options(framework, backend, limit, strategy, ps, evaluator)
        _refuse_type(pass_local_rank)
        with _lock:
            held = _the_one(options, launcher, join_timeout_setting(join_timeout), pass_local_rank)
            _adjust_arguments(pass_local_rank, held.local_rank)
    except DistbootError as error:
        # What is wrong is in the script or outside, and not in the lines of ours that found it.
        raise error.with_traceback(None) from None
    return held.context


def _the_one(
    options: frameworks.Options, launcher: str | None, join_limit: float, pass_local_rank: bool | None
) -> _Current:
    """What this process has, or is to have from now on."""
    global _current  # noqa: PLW0603 - a process has one default process group, and so one context
    start = frameworks.starter(options)
    if _current is not None and _current.process == os.getpid():
        if not _current.context.closed:
            _refuse_another(_current, options)
            return _current
        _current.context.close()  # what the script ended itself has left a port
    context = _started(start, detect(os.environ, launcher=launcher), options, join_limit)
    _current = _Current(os.getpid(), context, options, os.environ["LOCAL_RANK"])
    _say_wrong_local_rank(_current, pass_local_rank)
    return _current


def _started(
    start: Callable[[Meeting, Exported, frameworks.Options], Context],
    placement: Placement,
    options: frameworks.Options,
    join_timeout: float,
) -> Context:
    lifeline, called = settings(os.environ), time.time()
    in_wrapper = beside.by_wrapper(placement, os.environ)  # which reports what happens in it
    report = Unwatched(None if in_wrapper else report_setting(os.environ))
    with said_by(placement.who):
        _refuse_second_process(placement)
        _refuse_unservable(placement)
        refuse_unless_rank(placement)
        warn_of_misspelled(os.environ, placement)
        with (
            Exported() as exported,
            _met(placement, join_timeout, options, report) as meeting,
            report.until_watched(meeting),
            beside.watched(meeting, exported.environ_before(), lifeline),
        ):
            meeting.steps |= {CALLED: called, ALL_CALLED: time.time()} if in_wrapper else {}
            exported.write(threads(meeting.placement, os.environ))
            context = start(meeting, exported, options)
            meeting.mark(GROUP)
            beside.tell_steps(meeting)
            return context


def current() -> Context | None:
    """The context of this process; None when `init` was not called, or it is closed."""
    if _current is None or _current.process != os.getpid() or _current.context.closed:
        return None
    return _current.context


def _met(placement: Placement, join_limit: float, options: frameworks.Options, report: Unwatched) -> Meeting:
    """All ranks together, or, where the roll call is off, what this process's environment alone proves."""
    hosts: list[str] = []
    used = options.framework == "mpi"
    if mpi.can_tell(placement, used=used):
        placement, hosts = mpi.located(placement, join_limit, used=used)
    placement = settled(placement)
    if not roll_call_setting():
        report.impossible(placement)
        wait_until_resolves(placement, join_limit)
        return alone(placement, join_limit)
    with report.despite_signals(placement):
        return attend(
            placement,
            os.environ,
            join_limit,
            hosts=hosts,
            framework=options.said,
            on_cpu=frameworks.on_cpu(options),
            problem=report.problem(placement),
            failed=report.failed,
        )


def _refuse_another(held: _Current, options: frameworks.Options) -> None:
    """Refuse another framework, and say what has no effect any more."""
    context, earlier = held.context, held.options
    if context.framework != options.framework:
        raise DistbootError(
            "already-initialized",
            f"init({options.framework!r}) after init({context.framework!r}) in the same process",
            "close() the first context, or use one framework a process",
        )
    differences = options.differences(earlier)
    if differences:
        said = f"warning: init() a second time: {', '.join(differences)} has no effect, the context of the first stays"
        tell(None if context.world_size == 1 else f"rank {context.rank}", said)


def _say_wrong_local_rank(held: _Current, wanted: bool | None) -> None:
    wrong = arguments.wrong_local_rank(sys.argv[1:], held.local_rank)
    if wanted is None and wrong is not None:
        tell(None if held.context.world_size == 1 else f"rank {held.context.rank}", wrong)


def _refuse_type(pass_local_rank: object) -> None:
    if pass_local_rank is not None and type(pass_local_rank) is not bool:
        problem = f"pass_local_rank={quoted(pass_local_rank)} is none of True, False and None"
        raise DistbootError("usage", problem, "help(distboot.init) says what each argument is")


def _adjust_arguments(wanted: bool | None, local_rank: str) -> None:
    """Let `sys.argv` have the local rank, or not."""
    if wanted is None or not sys.argv:  # empty where Python is embedded
        return
    given = sys.argv[1:]
    sys.argv[1:] = arguments.with_local_rank(given, local_rank) if wanted else arguments.without_local_rank(given)


def _refuse_unservable(placement: Placement) -> None:
    launcher = launcher_of(placement)
    if launcher.no_init:
        raise DistbootError(
            "unsupported-launcher",
            f"this process was started by {launcher.title}, whose first process is alone when it calls init",
            launcher.no_init,
        )


def _refuse_second_process(placement: Placement) -> None:
    """A process that a rank started (a DataLoader worker, a subprocess) inherits the rank's environment."""
    _, handed_over = handoff.take(os.environ)
    if placement.world_size == 1 or handed_over is None or handed_over.joined in (0, os.getpid()):
        return
    if handed_over.is_about(placement):
        raise DistbootError(
            "already-joined",
            f"this rank has joined already, as process {handed_over.joined}, which started this one",
            "call distboot.init() in one process a rank, below `if __name__ == '__main__':` where workers are spawned, "
            "or close() the context before another process takes its place",
        )
