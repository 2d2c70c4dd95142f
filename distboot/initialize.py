"""`init`: detect, let all ranks meet, export, start the framework; all of it or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import frameworks
from .agent import sidecar_start
from .agent.local import AgentLink, attached
from .agent.report import StartupReport
from .context import Context
from .detection import arguments, inherited
from .detection.detect import detect, launcher_of, refuse_unless_rank
from .detection.export import EnvTransaction, thread_variables
from .detection.placement import Placement
from .errors import DistbootError, with_rank
from .rendezvous.job_info import JobInfo, alone
from .rendezvous.master import require_master, wait_until_resolves
from .rendezvous.membership import JoinResult
from .rendezvous.plan import join_here, plan_of
from .report import ALL_CALLED, CALLED, GROUP
from .settings import (
    SupervisionSettings,
    join_timeout_setting,
    rendezvous_setting,
    seconds,
    supervision_settings,
    warn_of_unknown,
)
from .text import log_line, short_repr

_lock = threading.Lock()


class _Current(NamedTuple):
    """The context that there is, the options with which it was made, and the process that did: a fork has none."""

    process: int
    context: Context
    options: frameworks.Options
    local_rank: str  # as it was exported; with torchrun --virtual-local-rank 0 on all


_current: _Current | None = None
_count = 0  # how often the ranks below a wrapper have got ready


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
        limit = None if timeout is None else seconds(f"timeout={short_repr(timeout)}", timeout)
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
    start: Callable[[JobInfo, EnvTransaction, frameworks.Options], Context],
    placement: Placement,
    options: frameworks.Options,
    join_timeout: float,
) -> Context:
    settings, called = supervision_settings(os.environ), time.time()
    with with_rank(placement.who):
        _refuse_second_process(placement)
        _refuse_unservable(placement)
        refuse_unless_rank(placement)
        warn_of_unknown(os.environ, placement.rank, placement.who)
        found = attached(os.environ) if sidecar_start.is_in_wrapper(placement, os.environ) else None
        report = StartupReport(None if found is not None and settings.detects else settings.report)
        with EnvTransaction() as exported:
            if found is not None:
                link, result = found
                with _in_wrapper(placement, join_timeout, options, link, result) as job:
                    job.is_watched = settings.detects
                    job.steps |= {CALLED: called, ALL_CALLED: time.time()}
                    return _begun(start, job, exported, options)
            with (
                _met(placement, join_timeout, options, report, settings, exported=exported) as job,
                report.until_watched(job),
            ):
                return _begun(start, job, exported, options)


def _begun(
    start: Callable[[JobInfo, EnvTransaction, frameworks.Options], Context],
    job: JobInfo,
    exported: EnvTransaction,
    options: frameworks.Options,
) -> Context:
    exported.write(thread_variables(job.placement, os.environ))
    context = start(job, exported, options)
    job.mark(GROUP)
    sidecar_start.tell_steps(job)
    return context


def current() -> Context | None:
    """The context of this process; None when `init` was not called, or it is closed."""
    if _current is None or _current.process != os.getpid() or _current.context.closed:
        return None
    return _current.context


@contextmanager
def _in_wrapper(
    placement: Placement, join_timeout: float, options: frameworks.Options, link: AgentLink, result: JoinResult
) -> Iterator[JobInfo]:
    """All ranks, which the agents of their wrappers have let meet."""
    global _count  # noqa: PLW0603 - of this process
    _count += 1
    job = JobInfo(placement, join_timeout)
    job.link, job.framework, job.count = link, options.said, _count
    job.take(result)
    yield job


@contextmanager
def _beside_itself(
    placement: Placement, join_timeout: float, why: OSError, settings: SupervisionSettings, **more: Any
) -> Iterator[JobInfo]:
    """All ranks together, with a thread of this process as its agent, which cannot detect how it ends."""
    from .agent.in_wrapper import WrapperAgent, WrapperLink
    from .frameworks._base import at_end

    log_line(
        placement.who, f"warning: failure detection is off for this rank: the monitor process did not start: {why}"
    )
    with join_here(placement, os.environ, join_timeout, **more) as job:
        with WrapperAgent(job, settings._replace(detects=False, report=None), "") as agent:
            job.link, job.framework = WrapperLink(agent, job, placement.rank), more["framework"]
            at_end(well=agent.leave_job)  # else the end of its connections would be a failure to the others
            yield job
        job.joined = None  # the thread has it, until this process ends


def _located(placement: Placement, join_timeout: float, options: frameworks.Options) -> tuple[Placement, list[str]]:
    """The placement with address and port of rank 0, and all addresses of its host, where only MPI can tell."""
    used = options.framework == "mpi"
    if placement.master_addr is None or used:
        from .frameworks import mpi  # here, as most jobs know where rank 0 is

        if mpi.can_tell(placement, used=used):
            return mpi.find_master_via_mpi(placement, join_timeout, used=used)
    return placement, []


@contextmanager
def _met(
    placement: Placement,
    join_timeout: float,
    options: frameworks.Options,
    report: StartupReport,
    settings: SupervisionSettings,
    *,
    exported: EnvTransaction,
) -> Iterator[JobInfo]:
    """All ranks together, or, where the roll call is off, what this process's environment alone proves."""
    placement, hosts = _located(placement, join_timeout, options)
    placement = require_master(placement)
    if not rendezvous_setting():
        report.impossible(placement)
        wait_until_resolves(placement, join_timeout)
        yield alone(placement, join_timeout)
        return
    more: dict[str, Any] = {"hosts": hosts, "framework": options.said, "on_cpu": frameworks.on_cpu(options)}
    problem = report.problem(placement)
    if placement.world_size == 1 and settings.report is None:  # no other process is to hear of it
        with join_here(placement, os.environ, join_timeout, problem=problem, **more) as job:
            yield job
        return
    try:
        sidecar = sidecar_start.Sidecar()
    except OSError as error:
        with _beside_itself(placement, join_timeout, error, settings, problem=problem, **more) as job:
            yield job
        return
    plan, problem = plan_of(placement, os.environ, join_timeout, problem=problem, **more)
    job = JobInfo(placement, join_timeout)
    job.link, job.framework = sidecar.link, options.said
    job.when_ready = lambda: sidecar.take_over(job)
    try:
        with report.despite_signals(placement):
            try:
                sidecar.begin(plan, settings)
                if placement.local_world_size is not None and problem is None:
                    exported.write(thread_variables(placement, os.environ))  # which the import reads
                    frameworks.preload(options)
                job.take(sidecar.link.joined(plan.join_timeout))
            except BaseException as error:
                report.failed(job, problem or error)
                if problem is not None and isinstance(error, DistbootError):
                    raise problem from None
                raise
        yield job
    except BaseException:
        if not sidecar.is_current:  # else it reports how this process ends
            sidecar.close()
        raise


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
        log_line(None if context.world_size == 1 else f"rank {context.rank}", said)


def _say_wrong_local_rank(held: _Current, wanted: bool | None) -> None:
    wrong = arguments.wrong_local_rank(sys.argv[1:], held.local_rank)
    if wanted is None and wrong is not None:
        log_line(None if held.context.world_size == 1 else f"rank {held.context.rank}", wrong)


def _refuse_type(pass_local_rank: object) -> None:
    if pass_local_rank is not None and type(pass_local_rank) is not bool:
        problem = f"pass_local_rank must be True, False or None, not {short_repr(pass_local_rank)}"
        raise DistbootError("usage", problem, "help(distboot.init) says what each argument is")


def _adjust_arguments(wanted: bool | None, local_rank: str) -> None:
    """Let `sys.argv` have the local rank, or not."""
    if wanted is None or not sys.argv:  # empty where Python is embedded
        return
    given = sys.argv[1:]
    sys.argv[1:] = arguments.with_local_rank(given, local_rank) if wanted else arguments.without_local_rank(given)


def _refuse_unservable(placement: Placement) -> None:
    launcher = launcher_of(placement)
    if launcher.unsupported_reason:
        raise DistbootError(
            "unsupported-launcher",
            f"this process was started by {launcher.title}, whose first process is alone when it calls init",
            launcher.unsupported_reason,
        )


def _refuse_second_process(placement: Placement) -> None:
    """A process that a rank started (a DataLoader worker, a subprocess) inherits the rank's environment."""
    _, handed_over = inherited.strip(os.environ)
    if placement.world_size == 1 or handed_over is None or handed_over.joined in (0, os.getpid()):
        return
    if handed_over.is_about(placement):
        raise DistbootError(
            "already-joined",
            f"this rank has joined already, as process {handed_over.joined}, which started this one",
            "call distboot.init() in one process a rank, below `if __name__ == '__main__':` where workers are spawned, "
            "or close() the context before another process takes its place",
        )
