"""`init`: detect, let all ranks meet, export, start the framework; all of it or nothing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import frameworks
from .base import settings
from .base.errors import DistbootError, with_rank, with_too_few_files
from .base.setting_readers import given_by_option, seconds_of_argument
from .base.text import short_repr
from .context import Context
from .detection.here import detect_here, names_launcher
from .rendezvous.events import since_boot
from .startup.exit_report import install_exit_code_hook, report_error_at_exit
from .startup.meeting import Call
from .startup.refusals import (
    refuse_ray_worker,
    refuse_spawned,
    tell_others,
    with_hint_at_multiprocessing,
)
from .startup.start import Current, refuse_different, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

    from .agent.session import Session
    from .frameworks import Framework, Strategy

_lock = threading.Lock()
_initializing = 0  # the thread that is in `init`
_current: Current | None = None  # of this process; a forked one has none


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
            limit = seconds_of_argument(given_by_option("timeout", timeout))
        options = frameworks.Options(framework, backend, limit, strategy)
        if join_timeout is not None:  # refuse an invalid one also in a second call
            settings.join_timeout_setting(os.environ, join_timeout)
        with _one_at_a_time():
            return _current_or_new(options, launcher, join_timeout, pass_local_rank)
    except DistbootError as error:
        report_error_at_exit(error, has_context=lambda: _current is not None)
        install_exit_code_hook()
        # Without the lines of this package: the cause is in the script or outside
        raise error.with_traceback(None) from None
    except KeyboardInterrupt as error:
        raise error.with_traceback(None) from None


def current() -> Context | None:
    """The context of this process; None when `init` was not called, or it is closed."""
    held = _held()
    if held is None or held.context.closed:
        return None
    return held.context


def current_session() -> Session:
    """The session of the current context, for commands that read rank 0's log."""
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


def _held() -> Current | None:
    if _current is None or _current.process != os.getpid():
        return None
    return _current


def _current_or_new(
    options: frameworks.Options,
    launcher: str | None,
    join_timeout: float | timedelta | None,
    pass_local_rank: bool | None,
) -> Context:
    """Return the current context; create it on the first call."""
    global _current  # noqa: PLW0603 - a process has one default process group, and so one context
    frameworks.refuse(options)
    if launcher is not None:
        from .detection.named import refuse_unless_text  # here, as most scripts name none

        refuse_unless_text(launcher, frameworks.HELP)
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
        refuse_different(held, options, launcher)
    if _has_arguments(pass_local_rank):
        from .startup.local_rank_argument import adjust_arguments  # here, as few scripts have one

        adjust_arguments(held, pass_local_rank, is_new=is_new)
    return held.context


def _has_arguments(pass_local_rank: bool | None) -> bool:
    """Whether `sys.argv` has arguments to look at, or is to have one."""
    if not sys.argv:  # Python is embedded
        return False
    return bool(pass_local_rank) or len(sys.argv) > 1


def _new(
    options: frameworks.Options,
    launcher: str | None,
    join_timeout: float | timedelta | None,
) -> Current:
    """Detect the placement, check the settings, let the ranks meet, and start the framework."""
    environ = os.environ  # which everything below is given
    called = since_boot()
    placement = detect_here(environ, launcher=launcher)
    if not names_launcher(environ, launcher):
        refuse_spawned(placement)
        refuse_ray_worker(placement)
    with with_rank(placement.who), with_too_few_files():
        overridden = []
        if join_timeout is not None:
            overridden.append("DISTBOOT_JOIN_TIMEOUT")
        try:
            settings.refuse_invalid(environ, overridden)
            join_limit = settings.join_timeout_setting(environ, join_timeout)
            supervision = settings.supervision_settings(environ)
        except DistbootError as error:
            tell_others(error, placement, environ)
            raise
        call = Call(
            placement,
            options,
            environ,
            called,
            join_limit,
            supervision,
            launcher,
        )
        with with_hint_at_multiprocessing():
            return start(call)
