"""A script that would train N models apart: it starts a framework, and the option for what this one reads is missing.

Without its variables each process of it is a world of its own, ends well, and says nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..placement import Placement
from ..rendezvous import MPI_LAUNCHERS
from .target import Target

_LONGEST = 1 << 20  # bytes of a script that are read

# Name of a framework for the wrapper -> what a script says that starts it.
_STARTS = {
    "horovod": re.compile(r"^[ \t]*(?:import|from)[ \t]+horovod\b", re.MULTILINE),
    "tensorflow": re.compile(r"\b(?:MultiWorkerMirroredStrategy|ParameterServerStrategy)\("),
    "jax": re.compile(r"\bjax\.distributed\.initialize\(\s*\)"),
}
_KNOWS_US = re.compile(r"^[ \t]*(?:import|from)[ \t]+distboot\b", re.MULTILINE)


def warning(target: Target, framework: str, placement: Placement, environ: Mapping[str, str]) -> str | None:
    """What is to be said of a script before it is started; None: nothing."""
    script = target.given[0]
    if framework != "torch" or script in ("-m", "--") or not os.path.isfile(script):  # a pipe can be read only once
        return None
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST)
    except OSError:
        return None
    told = {
        "horovod": placement.launcher in (*MPI_LAUNCHERS, "horovodrun") or "HOROVOD_RANK" in environ,
        "tensorflow": "TF_CONFIG" in environ,
        "jax": placement.launcher in ("slurm", *MPI_LAUNCHERS) or "JAX_COORDINATOR_ADDRESS" in environ,
    }
    found = [name for name, starts in _STARTS.items() if starts.search(text) and not told[name]]
    if not found or _KNOWS_US.search(text):
        return None
    return (
        f"warning: {script} starts {found[0]}, which reads variables of its own, and without them each rank "
        f"trains apart: python -m distboot run --framework {found[0]} {script}"
    )
