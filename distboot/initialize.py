"""`init`: detect, let all ranks meet, export, start the framework; all of it or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import frameworks
from .base import settings
from .base.errors import DistbootError, with_rank
from .base.setting_readers import given_by_option, seconds
from .base.text import log_line, short_repr
from .context import Context, who_of
from .detection import inherited, surroundings
from .detection.export import EnvTransaction, thread_variables
from .detection.here import detect_here
from .rendezvous.events import GROUP
from .script.mentions import mentions_preempted
from .startup import bound_cpus
from .startup.exit_report import report_error_at_exit, report_exception_at_exit
from .startup.meeting import Call, meeting, met_in_wrapper
from .startup.refusals import refuse_process, refuse_ray_worker, refuse_spawned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from .agent.session import Session
    from .frameworks import Framework, Strategy

_lock = threading.Lock()
_initializing = 0  # the thread that is in `init`


class _Current(NamedTuple):
    """The context of this process, and the arguments of its `init`; a forked process has none."""

    process: int
    context: Context
    session: Session
    options: frameworks.Options
    local_rank: str  # as exported; with torchrun --virtual-local-rank 0 on all ranks
    launcher: str | None  # that the script named


_current: _Current | None = None


def init(
    framework: Framework = "torch",
    *,
    backend: str | None = None,
    launcher: str | None = None,
    join_timeout: float | timedelta | None = None,
    timeout: float | timedelta | None = None,
    strategy: Strategy | None = None,
    pass_local_rank: bool | None = None,
) -> Context:
    """Find this process's place in the job and start the framework. The first line of a script.

    Args:
        framework: what to start: "torch", "deepspeed", "horovod.torch", "horovod.tensorflow",
            "horovod.keras", "tensorflow", "jax", "mpi", or "none" for the environment and the roll
            call only.
        backend: backend of the process group; default: nccl on CUDA (xccl, hccl where they are),
            else gloo. Of Horovod: "mpi" or "gloo"; default: MPI under an MPI launcher, else gloo.
            Of TensorFlow: "ring", "nccl" or "auto".
        launcher: name of the launcher to use; default: DISTBOOT_LAUNCHER, or else the one that
            `detect` finds.
        join_timeout: seconds, or a timedelta, for all ranks to join, and once more for all to be
            ready to start the framework; default: DISTBOOT_JOIN_TIMEOUT, or else 300.
        timeout: seconds, or a timedelta, for a collective operation; default: the framework's.
        strategy: TensorFlow's: "multi_worker_mirrored", "parameter_server", "mirrored" or
            "default"; default: "parameter_server" if TF_CONFIG has parameter servers, else
            "multi_worker_mirrored"; on one process "mirrored" with several accelerators, else
            "default".
        pass_local_rank: True puts `--local_rank=N` into `sys.argv`, once, for scripts that parse it
            after this; False removes it, for scripts that do not know it; default: `sys.argv`
            stays, and a local rank in it that is not this one is warned of.

    Returns:
        The context for the rest of the script. A second call for the same framework returns the
        same one.

    Raises:
        DistbootError: something is wrong or missing, on this rank or on another one; its `code`
            says what. `os.environ` is then as it was before the call.
    """
    _refuse_nested()
    try:
        limit = None
        if timeout is not None:
            limit = seconds(given_by_option("timeout", timeout))
        options = frameworks.Options(framework, backend, limit, strategy)
        join_limit = settings.join_timeout_setting(join_timeout)
        with _one_at_a_time():
            return _current_or_new(options, launcher, join_limit, pass_local_rank)
    except DistbootError as error:
        report_error_at_exit(error, has_context=lambda: _current is not None)
        from .script import error_exit  # here, as most calls succeed

        error_exit.install()
        # Without the lines of this package: the cause is in the script or outside
        raise error.with_traceback(None) from None


def current() -> Context | None:
    """The context of this process; None when `init` was not called, or it is closed."""
    held = _held()
    if held is None or held.context.closed:
        return None
    return held.context


def current_session() -> Session:
    """What the current context is from: for commands, which read what rank 0 knows of the job."""
    held = _held()
    assert held is not None
    return held.session


def _refuse_nested() -> None:
    # A handler may interrupt an import of `init`, so this imports nothing
    if _initializing == threading.get_ident():
        problem = "init() in a signal handler, while this thread is in init()"
        raise DistbootError("usage", problem, "call it in the script, and there once")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let another thread wait until this one has its context, and then get the same one."""
    global _initializing  # noqa: PLW0603 - as the lock
    with _lock:
        _initializing = threading.get_ident()
        try:
            yield
        finally:
            _initializing = 0


def _held() -> _Current | None:
    if _current is None or _current.process != os.getpid():
        return None
    return _current


def _current_or_new(
    options: frameworks.Options,
    launcher: str | None,
    join_timeout: float,
    pass_local_rank: bool | None,
) -> Context:
    """Return the current context; create it on the first call."""
    global _current  # noqa: PLW0603 - a process has one default process group, and so one context
    frameworks.refuse(options)
    if type(pass_local_rank) not in (bool, type(None)):
        problem = f"pass_local_rank must be True, False or None, not {short_repr(pass_local_rank)}"
        raise DistbootError("usage", problem, frameworks.HELP)
    held = _held()
    if held is not None and held.context.closed:
        held.context.close()  # the script ended its group itself: release the port
        held = None
    is_new = held is None
    if held is None:
        held = _new(options, launcher, join_timeout)
        _current = held
    else:
        _refuse_different(held, options, launcher)
    _adjust_arguments(held, pass_local_rank, is_new=is_new)
    return held.context


def _new(options: frameworks.Options, launcher: str | None, join_timeout: float) -> _Current:
    """Start the framework."""
    placement = detect_here(os.environ, launcher=launcher)
    if launcher is None and not os.environ.get("DISTBOOT_LAUNCHER"):
        refuse_spawned(placement)
        refuse_ray_worker(placement)
    supervision = settings.supervision_settings(os.environ)
    with with_rank(placement.who):
        context, session = _start(Call(placement, options, join_timeout, supervision, launcher))
    local_rank = os.environ["LOCAL_RANK"]
    return _Current(
        os.getpid(),
        context,
        session,
        options,
        local_rank,
        launcher,
    )


def _start(call: Call) -> tuple[Context, Session]:
    called = time.time()
    call, is_met = _checked(call)
    with EnvTransaction() as exported:
        met = None
        if is_met:
            met = _in_wrapper(call, called)
        if met is None:
            _warn_without_wrapper(call)
            met = meeting(call, exported)
        with met as job:
            exported.write(job.shared_variables(os.environ))
            if not is_met:  # else the wrapper has, and may have bound this process
                exported.write(thread_variables(job.placement, os.environ))
            context = frameworks.start(job, exported, call.options)
            job.mark(GROUP)
        if call.placement.world_size == 1:
            report_exception_at_exit()
        _listen(context, call)
        return context, job


def _checked(call: Call) -> tuple[Call, bool]:
    """Refuse and warn of what is wrong; return also whether a wrapper's ranks have met already."""
    placement = call.placement
    outer = inherited.about(placement, os.environ)
    refuse_process(placement, outer)
    settings.refuse_invalid(os.environ, ["DISTBOOT_JOIN_TIMEOUT"])  # it was read, or given
    settings.warn_of_unknown(os.environ, placement.rank, placement.who)
    if not outer.fields:  # otherwise the wrapper has warned
        call = _warned_of_unused(call)
        bound_cpus.warn_of_rank(placement, os.environ)
    return call, bool(outer.met)


def _warned_of_unused(call: Call) -> Call:
    """Warn of tasks and hosts that the job leaves unused. The job's summary names them, too."""
    unused = surroundings.unused(call.placement, os.environ, call.launcher)
    if unused is None:
        return call
    surroundings.warn_of_unused(call.placement, unused)
    return call._replace(supervision=call.supervision._replace(unused=unused.found))


def _in_wrapper(call: Call, called: float) -> AbstractContextManager[Session] | None:
    """The ranks as the agent of the wrapper has let them meet; None if it is gone."""
    from .agent.link import attached  # here, as a process that is alone has no agent

    found = attached(os.environ)
    if found is None:
        return None
    link, result = found
    return met_in_wrapper(call, link, result, called)


def _warn_without_wrapper(call: Call) -> None:
    """Warn of settings that have no effect, or not their whole effect, without the wrapper."""
    placement = call.placement
    if placement.rank == 0 and settings.value_of("DISTBOOT_BIND", os.environ) != "none":
        log_line(
            placement.who,
            "warning: DISTBOOT_BIND has no effect: init() does not start its process; start the "
            "script with python -m distboot",
        )
    if call.supervision.stop_signals:
        from .agent.launcher_signals import warn_of_signals  # here, as few jobs need it

        warn_of_signals(placement, call.supervision.stop_signals)
    if placement.rank == 0 and settings.restart_settings(os.environ).most:
        log_line(
            placement.who,
            "warning: DISTBOOT_MAX_RESTARTS has no effect: init() cannot start its own process "
            "again; start the script with python -m distboot",
        )


def _listen(context: Context, call: Call) -> None:
    """Let the events that the settings name ask the job to stop."""
    preemption = context._preemption  # noqa: SLF001 - of this package
    supervision = call.supervision
    preemption.listen(supervision.stop_signals)
    if mentions_preempted():  # handle a stop before the script's first read
        preemption.expect_reads()
    preemption.request_on_events(
        supervision.stop_at, supervision.stop_notice, supervision.notice_address
    )


def _refuse_different(held: _Current, options: frameworks.Options, launcher: str | None) -> None:
    """Refuse a different framework, and warn of arguments that have no effect any more."""
    if held.options.framework != options.framework:
        raise DistbootError(
            "already-initialized",
            f"init({options.framework!r}) after init({held.options.framework!r}) in the same "
            "process",
            "close() the first context, or use one framework a process",
        )
    differences = options.differences(held.options)
    if launcher not in (None, held.launcher, held.context.launcher):
        differences.append(f"launcher={launcher!r} after launcher={held.context.launcher!r}")
    if differences:
        log_line(
            who_of(held.context),
            f"warning: init() was called again: {', '.join(differences)} has no effect, the first "
            "context stays",
        )


def _adjust_arguments(held: _Current, pass_local_rank: bool | None, *, is_new: bool) -> None:
    """Put the local rank into `sys.argv`, or remove it; or warn of a different one."""
    if not sys.argv:  # Python is embedded
        return
    given = sys.argv[1:]
    if not given and not pass_local_rank:
        return
    from .detection.local_rank_option import (
        with_local_rank,
        without_local_rank,
        wrong_local_rank,
    )

    if pass_local_rank:
        sys.argv[1:] = with_local_rank(given, held.local_rank)
    elif pass_local_rank is False:
        sys.argv[1:] = without_local_rank(given)
    elif is_new:
        warning = wrong_local_rank(given, held.local_rank)
        if warning is not None:
            log_line(who_of(held.context), warning)
