"""Whether the launcher survives the signals that ask its ranks to stop.

Slurm sends them to the processes of the launcher, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from ..base.process import ends_at
from ..base.text import log_line
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement


def warn_of_signals(placement: Placement, numbers: Iterable[int]) -> None:
    """Warn, on rank 0, of signals in DISTBOOT_STOP_SIGNALS that end the parent of this rank."""
    hint = LAUNCHERS[placement.launcher].signals_hint
    if not hint or placement.rank != 0:
        return
    parent = os.getppid()
    names = [signal.Signals(number).name for number in numbers if ends_at(parent, number)]
    if not names:
        return
    listed = " and ".join(names)
    what = f"{listed} would end {placement.launcher} (process {parent})"
    option = hint.replace("SIGNALS", ",".join(names))
    remedy = f"{option}, or set DISTBOOT_STOP_BEFORE_END"
    problem = f"{what} before its ranks can stop: {remedy}"
    log_line(placement.who, f"warning: DISTBOOT_STOP_SIGNALS: {problem}")
