"""The first failure where a platform shows it: the termination log of Kubernetes, and the failure file of SageMaker.

Each agent leaves there what it prints: the log of every pod says the same. What others wrote there stays.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import suppress

from .crash_hooks import without

# The default of terminationMessagePath. The kubelet mounts it, and takes 4096 bytes of it into the status of the pod.
_KUBERNETES = "/dev/termination-log"
_MOST = 4096
# FailureReason of a training job is its beginning. SageMaker's own scripts leave what is there, too.
_SAGEMAKER = "/opt/ml/output/failure"
_OURS = b"distboot: "
_HEADLINE = 900  # characters


def leave(text: str, *, replaces: bool = False) -> None:
    """Leave a text there; `replaces`: also in the place of an earlier one of distboot's. Nothing is said of errors."""
    data = _OURS + _shortened(without(os.environ.get("DISTBOOT_SECRET", ""), text))
    with suppress(OSError):
        _leave(_KUBERNETES, 0, data, replaces=replaces)
    with suppress(OSError, ImportError):
        from ..detection.placement import recognise  # here, as a sidecar needs nothing else of detection

        platform = recognise(os.environ)
        if platform is not None and platform.name == "sagemaker":
            _leave(_SAGEMAKER, os.O_CREAT, data, replaces=replaces)


def leave_uncaught() -> None:
    """Leave the uncaught exception with which this process ends, which is alone: no agent knows of it."""
    import traceback  # here and below, as it is rarely needed

    from .exit_status import ExitStatus, shown
    from .root_cause import failure_text

    words = "".join(traceback.format_exception(sys.last_value))[-_MOST:]
    leave(failure_text(ExitStatus(words=words)) + shown(words))


def _shortened(text: str) -> bytes:
    """The first line, and as many of the last ones as there is room for."""
    head, *lines = text.split("\n")
    lines.insert(0, head[:_HEADLINE])
    while len(data := "\n".join(lines).encode(errors="replace")) > _MOST - len(_OURS):
        lines[1:3] = ["…"]
    return data


def _leave(path: str, more: int, data: bytes, *, replaces: bool) -> None:
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | more, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # other ranks in this container have the same to say
        if stat.S_ISREG(os.fstat(file).st_mode):
            before = os.read(file, len(_OURS))
            if not before or (replaces and before == _OURS):
                os.ftruncate(file, os.pwrite(file, data, 0))  # a disk may be full
    finally:
        os.close(file)
