"""Rank 0's agent keeps the metrics of its job (`report/metrics`) in a file, for Prometheus.

The file is written each second at most, and each 15 seconds, as times go on without events. It is
replaced as a whole; a link at its place to a file is replaced, too, and not followed.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ..base.patterns import pattern
from ..base.text import short_repr
from ..rendezvous.events import job_time
from ..report.files import beginning_of, is_of_each_process, is_special
from ..report.metrics import Metrics
from .state_writer import StateWriter

# How a file of metrics begins, or one without any content
_MAY_BE_REPLACED = pattern(rb"$|# TYPE distboot_job gauge\n# HELP distboot_job ")


class MetricsFile(StateWriter):
    """The file with the metrics of a job."""

    between = 1.0
    refresh = 15.0  # the usual interval of a collector
    last = 1.0

    def __init__(self, path: str, who: str | None) -> None:
        self._path = path
        self.what = f"no more metrics are written to {short_repr(path)}"
        super().__init__(who)

    def text(self, metrics: Metrics) -> str:
        return metrics.text(job_time())

    def write(self, text: str) -> None:
        _refuse_other_content(self._path)
        part = f"{self._path}.{os.urandom(4).hex()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(part, flags, 0o644)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)  # whatever the umask: a collector is another user
                file.write(text.encode(errors="backslashreplace"))
            os.replace(part, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise


def _refuse_other_content(path: str) -> None:
    """Refuse what would be replaced: a folder, a pipe, a device, a link to one, and other content."""
    if is_special(path) or is_of_each_process(path):
        raise OSError(errno.EINVAL, "it is not a regular file")
    beginning = b""
    if not os.path.islink(path):  # a link is replaced, and not what it leads to
        beginning = beginning_of(path)
    if _MAY_BE_REPLACED.match(beginning) is None:
        raise OSError(errno.EEXIST, "it has no metrics of a job in it, and would be replaced")
