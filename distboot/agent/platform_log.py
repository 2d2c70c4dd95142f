"""Where a platform shows why a process ended.

That is the termination log of Kubernetes, and the failure file of SageMaker. Each agent writes what
it prints there: the log of every pod has the same text. What other programs wrote there stays.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import threading
from contextlib import suppress
from functools import partial

from ..base.errors import DistbootError
from ..base.text import without_secret
from ..base.threads import result_within
from ..job.exit_status import ExitStatus, UncaughtException, shown
from ..script.exceptions import describe

# The default of terminationMessagePath. The kubelet mounts it, and takes 4096 bytes of it into the
# status of the pod.
_KUBERNETES = "/dev/termination-log"
_MOST = 4096
# Its beginning is the FailureReason of a training job. SageMaker's own scripts do not replace it,
# either.
_SAGEMAKER = "/opt/ml/output/failure"
_OURS = b"distboot: "
_FIRST_LINE = 900  # characters
_LIMIT = 1.0  # seconds for a file system that may not answer, while an agent waits
_has_stalled = threading.Event()


def write(text: str, *, replaces: bool = False) -> None:
    """Write a text there; with `replaces` also over an earlier one of distboot. Ignores errors."""
    data = _OURS + _shortened(without_secret(text))
    with suppress(OSError):
        _write_file(_KUBERNETES, 0, data, replaces=replaces)
    with suppress(OSError, ImportError):
        # Here, as a sidecar needs nothing else of detection
        from ..detection.placement import recognize

        platform = recognize(os.environ)
        if platform is not None and platform.name == "sagemaker":
            _write_file(_SAGEMAKER, os.O_CREAT, data, replaces=replaces)


def write_in_time(text: str, *, replaces: bool = False) -> None:
    """The same for an agent, which waits a second for a file system, unless it can start no thread."""
    if _has_stalled.is_set():
        return
    work = partial(write, text, replaces=replaces)
    try:
        result_within(_LIMIT, "distboot-writer", work, "")
    except TimeoutError:
        _has_stalled.set()
    except DistbootError:  # this user may start no more threads, which may be why the job fails
        work()


def write_uncaught() -> None:
    """Write the uncaught exception that ends this process, which has no agent."""
    error = sys.last_value
    assert isinstance(error, BaseException)
    found = describe(error, error.__traceback__, without_secret)
    end = ExitStatus(exception=UncaughtException.described(found))
    write(end.failure_text() + shown(end.traceback))


def _shortened(text: str) -> bytes:
    """The first line, and as many of the last ones as there is room for."""
    head, *lines = text.split("\n")
    lines.insert(0, head[:_FIRST_LINE])
    data = _encoded(lines)
    while len(data) > _MOST - len(_OURS):
        lines[1:3] = ["…"]
        data = _encoded(lines)
    return data


def _encoded(lines: list[str]) -> bytes:
    return "\n".join(lines).encode(errors="replace")


def _write_file(path: str, more: int, data: bytes, *, replaces: bool) -> None:
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | more, 0o644)
    try:
        # Other ranks in this container have the same text to write.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return
        before = os.read(file, len(_OURS))
        is_free = not before or (replaces and before == _OURS)
        if is_free:
            written = os.pwrite(file, data, 0)
            os.ftruncate(file, written)  # a disk may be full
    finally:
        os.close(file)
