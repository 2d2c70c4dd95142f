"""`init`: detect, settle where rank 0 is, export, start the framework; all of it or nothing."""

from __future__ import annotations

import os
from datetime import timedelta

from . import frameworks
from .context import Context
from .detection import detect
from .errors import DistbootError
from .exports import Exported
from .rendezvous import join_timeout_setting, settled

_current: Context | None = None


def init(
    framework: str = "torch",
    *,
    backend: str | None = None,
    launcher: str | None = None,
    join_timeout: float | None = None,
    timeout: float | None = None,
) -> Context:
    """Find this process's place in the job and start the framework's process group. The first line of a script.

    Args:
        framework: what to start; "torch".
        backend: backend of the process group; default: nccl on CUDA (xccl, hccl where they are), else gloo.
        launcher: name of the launcher to believe; default: DISTBOOT_LAUNCHER, or else what `detect` finds.
        join_timeout: seconds for all ranks to be there; default: DISTBOOT_JOIN_TIMEOUT, or else 300.
        timeout: seconds for a collective operation; default: the framework's.

    Returns:
        The context. A second call for the same framework returns the same one.

    Raises:
        DistbootError: something is wrong or missing; `os.environ` is then as it was before the call.
    """
    global _current  # noqa: PLW0603 - a process has one default process group, and so one context
    start = frameworks.starter(framework)
    if _current is not None and not _current.closed:
        if _current.framework == framework:
            return _current
        raise DistbootError(
            "already-initialized",
            f"init({framework!r}) after init({_current.framework!r}) in the same process",
            "close() the first context, or use one framework a process",
        )
    seconds = join_timeout_setting(join_timeout)
    if timeout is not None and not 0 < timeout <= timedelta.max.total_seconds():
        raise DistbootError("usage", f"timeout={timeout!r} is not a number of seconds above 0")
    placement = detect(os.environ, launcher=launcher)
    with Exported() as exported:
        _current = start(settled(placement, seconds), exported, backend, seconds, timeout)
    return _current
