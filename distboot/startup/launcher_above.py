"""A launcher above a process that has none of its variables, and so counts as alone.

`sudo`, `su -`, `env -i` and `--cleanenv` of a container remove the variables of a launcher. Then each
of the processes that it has started is a separate job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..base.process import Program, program_above
from ..base.text import escape_control, log_line
from ..detection import inherited
from ..detection.here import names_launcher
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement

# accelerate gives a single process no rank; Slurm and Flux also start job scripts, which are no ranks
_WITHOUT_RANK = {
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "slurmstepd",
    "flux-shell",
}


class LauncherAbove(NamedTuple):
    """A launcher above this process, described for a message."""

    described: str
    remedy: str


def find_launcher_above(
    placement: Placement,
    environ: Mapping[str, str],
    launcher: str | None,
    look_above: Callable[[Sequence[str]], Program | None] = program_above,
) -> LauncherAbove | None:
    """The launcher above this process that started it, though it has none of its variables.

    Args:
        placement: of this process.
        environ: its environment.
        launcher: the one that an option or argument names.
        look_above: as `program_above`.
    """
    is_inside_wrapper = inherited.VARIABLE in environ  # which has warned
    is_told = is_inside_wrapper or names_launcher(environ, launcher)
    if placement.has_launcher or is_told:
        return None
    programs: set[str] = set()
    for each in LAUNCHERS.values():
        programs.update(each.programs)
    found = look_above(sorted(programs - _WITHOUT_RANK))
    if found is None:
        return None
    name = escape_control(os.path.basename(found.name))
    return LauncherAbove(
        f"this process runs below {name} (process {found.pid}), but its variables are missing: "
        "this process is a separate job",
        "sudo, su -, env -i and --cleanenv remove variables: pass them on, or set "
        "DISTBOOT_LAUNCHER=none if that is intended",
    )


def warn_of_launcher_above(
    placement: Placement, environ: Mapping[str, str], launcher: str | None
) -> None:
    """Warn of a launcher above this process, as `find_launcher_above` finds it."""
    found = find_launcher_above(placement, environ, launcher)
    if found is not None:
        log_line(placement.who, f"warning: {found.described}. {found.remedy}")
