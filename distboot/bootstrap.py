"""`init`: detect, let all ranks meet, export, start the framework; all of it or nothing."""

from __future__ import annotations

import os
import threading

from . import frameworks, handoff, mpi
from .context import Context
from .detection import detect, launcher_of
from .errors import DistbootError, quoted, said_by
from .exports import Exported
from .lifeline import beside
from .lifeline.settings import settings
from .nodes import refuse_unless_rank
from .placement import Placement
from .rendezvous import join_timeout_setting, roll_call_setting, seconds, settled, wait_until_resolves
from .rollcall.attend import attend
from .rollcall.meeting import Meeting, alone

_lock = threading.Lock()
_current: tuple[int, Context] | None = None  # with the id of the process that made it: a fork has none


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
) -> Context:
    """Find this process's place in the job and start the framework. The first line of a script.

    Args:
        framework: what to start: "torch", "deepspeed", "horovod.torch", "horovod.tensorflow", "horovod.keras",
            "tensorflow", "jax", "mpi", or "none" for the environment and the roll call only.
        backend: backend of the process group; default: nccl on CUDA (xccl, hccl where they are), else gloo. Of
            Horovod: "mpi" or "gloo"; default: MPI under an MPI launcher, else gloo.
        launcher: name of the launcher to believe; default: DISTBOOT_LAUNCHER, or else what `detect` finds.
        join_timeout: seconds for all ranks to be there; default: DISTBOOT_JOIN_TIMEOUT, or else 300.
        timeout: seconds for a collective operation; default: the framework's.
        strategy: TensorFlow's: "multi_worker_mirrored", "parameter_server", "mirrored" or "default"; default: the
            first of these, or the last two on one process with several and with at most one accelerator.
        ps: with "parameter_server", how many ranks are parameter servers: the last ones.
        evaluator: with "parameter_server", whether the very last rank evaluates on the side.

    Returns:
        The context. A second call for the same framework returns the same one.

    Raises:
        DistbootError: something is wrong or missing; `os.environ` is then as it was before the call.
    """
    global _current  # noqa: PLW0603 - a process has one default process group, and so one context
    limit = None if timeout is None else seconds(f"timeout={quoted(timeout)}", timeout)
    options = frameworks.Options(framework, backend, limit, strategy, ps, evaluator)
    start = frameworks.starter(options)
    join_limit = join_timeout_setting(join_timeout)
    lifeline = settings(os.environ)
    with _lock:
        if _current is not None and _current[0] == os.getpid() and not _current[1].closed:
            return _same(_current[1], framework)
        placement = detect(os.environ, launcher=launcher)
        with said_by(placement.who):
            _refuse_second_process(placement)
            _refuse_unservable(placement)
            refuse_unless_rank(placement)
            with (
                Exported() as exported,
                _met(placement, join_limit, options) as meeting,
                beside.watched(meeting, exported.environ_before(), lifeline),
            ):
                context = start(meeting, exported, options)
        _current = (os.getpid(), context)
    return context


def _met(placement: Placement, join_limit: float, options: frameworks.Options) -> Meeting:
    """All ranks together, or, where the roll call is off, what this process's environment alone proves."""
    hosts: list[str] = []
    if mpi.can_tell(placement):
        placement, hosts = mpi.located(placement, join_limit)
    placement = settled(placement)
    if not roll_call_setting():
        wait_until_resolves(placement, join_limit)
        return alone(placement, join_limit)
    on_cpu = frameworks.on_cpu(options)
    return attend(placement, os.environ, join_limit, hosts=hosts, framework=options.framework, on_cpu=on_cpu)


def _same(context: Context, framework: str) -> Context:
    if context.framework != framework:
        raise DistbootError(
            "already-initialized",
            f"init({framework!r}) after init({context.framework!r}) in the same process",
            "close() the first context, or use one framework a process",
        )
    return context


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
