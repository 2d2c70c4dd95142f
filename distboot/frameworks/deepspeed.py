"""`init("deepspeed")`: DeepSpeed on the process group that torch has started at the place where the ranks have met.

Its own way would be `mpi_discovery`, which needs mpi4py, runs `hostname -I` and overwrites RANK and MASTER_ADDR. It is
never reached, as DeepSpeed takes a process group that is there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..context import Context
from ..exports import Exported
from ..rollcall.meeting import Meeting
from . import _process_group
from ._joined import imported
from ._options import Options
from ._process_group import exports, on_cpu

__all__ = ["exports", "on_cpu", "start"]


def start(meeting: Meeting, exported: Exported, options: Options) -> Context:
    """Start DeepSpeed's communication."""

    def adopt(deepspeed: Any, backend: str) -> None:
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)

    prepare = partial(imported, "deepspeed", "deepspeed", "pip install deepspeed")
    return _process_group.start(meeting, exported, options, prepare=prepare, adopt=adopt)
