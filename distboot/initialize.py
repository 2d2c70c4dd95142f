"""`init`: detect, let all ranks meet, export, start the framework; all of it or nothing."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from . import frameworks
from .agent.meet import join_here, joining
from .agent.session import Session, alone
from .base import settings
from .base.errors import DistbootError, with_rank
from .base.limits import seconds
from .base.text import log_line, short_repr
from .context import Context, who_of
from .detection import export, inherited, surroundings
from .detection.detect import LAUNCHERS, refuse_unless_rank
from .detection.export import (
    EnvTransaction,
    require_master,
    thread_variables,
    wait_until_resolves,
)
from .detection.here import detect_here
from .detection.launchers.slurm import SINGLE
from .detection.placement import Placement
from .rendezvous.events import ALL_CALLED, CALLED, GROUP
from .rendezvous.plan import plan_of
from .script import error_exit
from .script.preemption import is_mentioned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

    from .agent.link import AgentLink
    from .agent.sidecar_start import Sidecar
    from .rendezvous.membership import JoinResult
    from .report.files import StartupReport

_lock = threading.Lock()
_initializing = 0  # the thread that is in `init`
_counts = itertools.count(1)  # how often the ranks below a wrapper have got ready


class _Current(NamedTuple):
    """The context of this process and the options with which it was made; a fork has none."""

    process: int
    context: Context
    options: frameworks.Options
    local_rank: str  # as it was exported; with torchrun --virtual-local-rank 0 on all
    launcher: str | None  # that the script named


class _Call(NamedTuple):
    """What the steps of one call of `init` need."""

    placement: Placement
    options: frameworks.Options
    join_timeout: float
    supervision: settings.SupervisionSettings
    launcher: str | None  # that the caller named


_current: _Current | None = None


def init(
    framework: str = "torch",
    *,
    backend: str | None = None,
    launcher: str | None = None,
    join_timeout: float | timedelta | None = None,
    timeout: float | timedelta | None = None,
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
        join_timeout: seconds, or a timedelta, for all ranks to be there, and once more for all to be ready to start
            the framework; default: DISTBOOT_JOIN_TIMEOUT, or else 300.
        timeout: seconds, or a timedelta, for a collective operation; default: the framework's.
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
    _refuse_nested()
    try:
        limit = None if timeout is None else seconds(f"timeout={short_repr(timeout)}", timeout)
        options = frameworks.Options(framework, backend, limit, strategy, ps, evaluator)
        with _one_at_a_time():
            return _the_one(
                options, launcher, settings.join_timeout_setting(join_timeout), pass_local_rank
            )
    except DistbootError as error:
        _leave_at_end(error)
        error_exit.install()
        # What is wrong is in the script or outside, and not in the lines of ours that found it.
        raise error.with_traceback(None) from None


def _refuse_nested() -> None:
    # A handler may interrupt an import of `init`: nothing is imported here
    if _initializing == threading.get_ident():
        problem = "init() in a signal handler, while this thread is in init()"
        raise DistbootError("usage", problem, "call it in the script, and there once")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let another thread wait until this one has its context, which is then that of both."""
    global _initializing  # noqa: PLW0603 - as the lock
    with _lock:
        _initializing = threading.get_ident()
        try:
            yield
        finally:
            _initializing = 0


def current() -> Context | None:
    """The context of this process; None when `init` was not called, or it is closed."""
    held = _held()
    return None if held is None or held.context.closed else held.context


def _held() -> _Current | None:
    return _current if _current is not None and _current.process == os.getpid() else None


def _the_one(
    options: frameworks.Options,
    launcher: str | None,
    join_timeout: float,
    pass_local_rank: bool | None,
) -> Context:
    """The context that this process has, or is to have from now on."""
    global _current  # noqa: PLW0603 - a process has one default process group, and so one context
    frameworks.refuse(options)
    if type(pass_local_rank) not in (bool, type(None)):
        problem = f"pass_local_rank must be True, False or None, not {short_repr(pass_local_rank)}"
        raise DistbootError("usage", problem, frameworks.HELP)
    held = _held()
    if held is not None and held.context.closed:
        held.context.close()  # what the script ended itself has left a port
        held = None
    is_new = held is None
    if held is None:
        placement = detect_here(os.environ, launcher=launcher)
        if launcher is None and not os.environ.get("DISTBOOT_LAUNCHER"):
            _refuse_spawned(placement)
        context = _started(
            _Call(
                placement,
                options,
                join_timeout,
                settings.supervision_settings(os.environ),
                launcher,
            )
        )
        held = _current = _Current(
            os.getpid(), context, options, os.environ["LOCAL_RANK"], launcher
        )
    else:
        _refuse_another(held, options, launcher)
    if sys.argv and (pass_local_rank is not None or sys.argv[1:]):  # empty where Python is embedded
        _adjust_arguments(held, pass_local_rank, is_new=is_new)
    return held.context


def _leave_at_end(error: DistbootError | None = None) -> None:
    """Let the platform show this error if the script ends with it, and does not call `init` again, say.

    None: what the script of a process that is alone fails with.
    """
    from .frameworks._base import at_end

    def leave_it() -> None:
        # Ctrl-C is no failure; and with what is imported below, Python would forget to end by SIGINT for it.
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            return
        from .job.exit_status import leave, leave_uncaught  # here, as most scripts end well

        if error is None:
            leave_uncaught()
        elif _current is None:  # else its agent knows why it ends
            leave(str(error))

    at_end(exited=None if error is None else leave_it, failed=leave_it)


def _refuse_another(held: _Current, options: frameworks.Options, launcher: str | None) -> None:
    """Refuse another framework, and say what has no effect any more."""
    if held.options.framework != options.framework:
        problem = f"init({options.framework!r}) after init({held.options.framework!r}) in the same process"
        raise DistbootError(
            "already-initialized",
            problem,
            "close() the first context, or use one framework a process",
        )
    differences = list(options.differences(held.options))
    if launcher not in (None, held.launcher, held.context.launcher):
        differences.append(f"launcher={launcher!r} after launcher={held.context.launcher!r}")
    if differences:
        said = f"warning: init() was called again: {', '.join(differences)} has no effect, the first context stays"
        log_line(who_of(held.context), said)


def _adjust_arguments(held: _Current, pass_local_rank: bool | None, *, is_new: bool) -> None:
    """Let `sys.argv` have the local rank, or not; or say that it has another one."""
    given = sys.argv[1:]
    if pass_local_rank:
        sys.argv[1:] = export.with_local_rank(given, held.local_rank)
    elif pass_local_rank is False:
        sys.argv[1:] = export.without_local_rank(given)
    elif is_new and (wrong := export.wrong_local_rank(given, held.local_rank)) is not None:
        log_line(who_of(held.context), wrong)


def _started(call: _Call) -> Context:
    placement, called = call.placement, time.time()
    with with_rank(placement.who):
        outer = inherited.about(placement, os.environ)
        _refuse_process(placement, outer)
        settings.refuse_invalid(os.environ, ["DISTBOOT_JOIN_TIMEOUT"])  # which was read, or given
        settings.warn_of_unknown(os.environ, placement.rank, placement.who)
        if not outer.fields:  # else the wrapper has warned
            call = _warned_of_unused(call)
        found = None
        if outer.met:
            # Here and below, as a process that is alone has no agent
            from .agent.link import attached

            found = attached(os.environ)
        if found is None and call.supervision.stop_signals:
            from .agent.launcher_signals import warn_of_signals  # here, as few jobs need it

            warn_of_signals(placement, call.supervision.stop_signals)
        if found is None and placement.rank == 0 and settings.restart_settings(os.environ).most:
            why = "init() cannot start its own process again; start the script with python -m distboot"
            log_line(placement.who, f"warning: DISTBOOT_MAX_RESTARTS has no effect: {why}")
        with EnvTransaction() as exported:
            meeting = (
                _meeting(call, exported) if found is None else _met_in_wrapper(call, *found, called)
            )
            with meeting as job:
                exported.write(thread_variables(job.placement, os.environ))
                context = frameworks.start(job, exported, call.options)
                job.mark(GROUP)
            if placement.world_size == 1:
                _leave_at_end()
            preemption = context._preemption  # noqa: SLF001 - of this package
            preemption.listen(call.supervision.stop_signals)
            if is_mentioned():  # a stop that comes before the first read is for it
                preemption.expect_reads()
            preemption.request_at(call.supervision.stop_at, "the job ends soon")
            preemption.request_at_notice(
                call.supervision.stop_notice, call.supervision.notice_address
            )
            return context


def _warned_of_unused(call: _Call) -> _Call:
    """Warn of tasks and hosts that the job leaves unused, which its summary names, too."""
    unused = surroundings.unused(call.placement, os.environ, call.launcher)
    if unused is None:
        return call
    surroundings.warn_of_unused(call.placement, unused)
    return call._replace(supervision=call.supervision._replace(unused=unused.found))


def _refuse_process(placement: Placement, outer: inherited.InheritedEnv) -> None:
    """Refuse a process that is not, or need not be, the rank that its environment says."""
    if placement.world_size > 1 and outer.joined not in (0, os.getpid()):
        # A DataLoader worker or a subprocess, which inherits the environment of its rank.
        raise DistbootError(
            "already-joined",
            f"this rank has joined already, as process {outer.joined}, which started this one",
            "call distboot.init() in one process per rank, below `if __name__ == '__main__':` where workers are"
            " spawned, or close() the context before another process takes its place",
        )
    launcher = LAUNCHERS[placement.launcher]
    if launcher.unsupported_reason:
        problem = f"distboot.init() does not work under {launcher.title}: the other processes do not exist yet"
        raise DistbootError("unsupported-launcher", problem, launcher.unsupported_reason)
    refuse_unless_rank(placement)


def _refuse_spawned(placement: Placement) -> None:
    """Refuse a child of multiprocessing that nothing numbers: each of its siblings would be rank 0 of 1, too."""
    multiprocessing = sys.modules.get("multiprocessing")
    if (
        placement.launcher == SINGLE.name
        and multiprocessing is not None
        and multiprocessing.parent_process()
    ):
        raise DistbootError(
            "spawned-process",
            "multiprocessing started this process, and nothing says which rank it is: it would be rank 0 of 1",
            "start the ranks with python -m distboot --nproc-per-node N script.py, without mp.spawn; or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process before init(); or DISTBOOT_LAUNCHER=none where "
            "each is to be alone",
        )


@contextmanager
def _met_in_wrapper(
    call: _Call, link: AgentLink, result: JoinResult, called: float
) -> Iterator[Session]:
    """All ranks, which the agents of their wrappers have let meet."""
    from .agent import sidecar_start

    job = Session(call.placement, call.join_timeout)
    job.link, job.framework, job.count = link, call.options.said, next(_counts)
    job.is_watched = call.supervision.detects
    job.take(result)
    job.steps |= {CALLED: called, ALL_CALLED: time.time()}
    yield job
    sidecar_start.tell_steps(job)


def _meeting(call: _Call, exported: EnvTransaction) -> AbstractContextManager[Session]:
    """All ranks together, or, where the roll call is off, what this process's environment alone proves."""
    for_plan: dict[str, Any] = {
        "framework": call.options.said,
        "on_cpu": frameworks.on_cpu(call.options),
    }
    placement, is_mpi = call.placement, call.options.framework == "mpi"
    if placement.master_addr is None or is_mpi:
        from .frameworks import mpi  # here, as most jobs know where rank 0 is

        placement, for_plan["hosts"] = mpi.located(placement, call.join_timeout, used=is_mpi)
    placement = require_master(placement)
    call = call._replace(placement=placement)
    if (
        settings.rendezvous_setting()
        and placement.world_size == 1
        and call.supervision.report is None
    ):
        # No other process is to hear of it.
        return join_here(placement, os.environ, call.join_timeout, **for_plan)
    from .report.files import StartupReport

    report = StartupReport(call.supervision.report, placement)
    if not settings.rendezvous_setting():
        report.impossible()
        wait_until_resolves(placement, call.join_timeout)
        return nullcontext(alone(placement, call.join_timeout))
    from .agent.sidecar_start import Sidecar

    for_plan["problem"] = report.problem()
    try:
        return _with_sidecar(call, for_plan, Sidecar(), report, exported)
    except OSError as error:
        return _without_sidecar(call, for_plan, error, report)


@contextmanager
def _with_sidecar(
    call: _Call,
    for_plan: Mapping[str, Any],
    sidecar: Sidecar,
    report: StartupReport,
    exported: EnvTransaction,
) -> Iterator[Session]:
    """All ranks together, with the agent in a process beside this one."""
    from .agent.sidecar_start import tell_steps

    placement = call.placement
    plan, problem = plan_of(placement, os.environ, call.join_timeout, **for_plan)
    job = Session(placement, call.join_timeout)
    job.link, job.framework = sidecar.link, call.options.said
    job.when_ready = lambda: sidecar.take_over(job)
    try:
        with report.despite_signals(), joining(job, problem, report.failed):
            sidecar.begin(plan, call.supervision)
            if placement.local_world_size is not None and problem is None:
                exported.write(thread_variables(placement, os.environ))  # which the import reads
                frameworks.preload(call.options, job)
            job.take(sidecar.link.joined(plan.join_timeout))
        with report.until_watched(job):
            yield job
        tell_steps(job)
    except BaseException:
        if not sidecar.is_current:  # else it reports how this process ends
            sidecar.close()
        raise


@contextmanager
def _without_sidecar(
    call: _Call, for_plan: Mapping[str, Any], why: OSError, report: StartupReport
) -> Iterator[Session]:
    """All ranks together, with a thread of this process as its agent, which cannot detect how it ends."""
    from .agent.in_wrapper import WrapperAgent
    from .frameworks._base import at_end

    placement = call.placement
    said = (
        f"warning: failure detection is off for this rank: the monitor process did not start: {why}"
    )
    log_line(placement.who, said)
    with join_here(placement, os.environ, call.join_timeout, **for_plan) as job:
        with WrapperAgent(
            job, call.supervision._replace(detects=False, report=None), None
        ) as agent:
            job.link, job.framework = agent.link(placement.rank), call.options.said
            # Else the end of its connections would be a failure to the others
            at_end(well=agent.leave_job)
            with report.until_watched(job):
                yield job
        job.joined = None  # the thread has it, until this process ends
