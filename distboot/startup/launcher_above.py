"""A launcher above a process that has none of its variables, and so counts as alone.

`sudo`, `su -`, `env -i` and `--cleanenv` of a container remove the variables of a launcher. Then each
of the processes that it has started is a job of its own.
"""

from __future__ import annotations

import os
from operator import attrgetter

from ..base.process import program_above
from ..base.text import escape_control, log_line
from ..detection import inherited
from ..detection.here import names_launcher
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# accelerate gives a single process no rank; Slurm and Flux also start job scripts, which are no ranks
_WITHOUT_RANK = {
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "slurmstepd",
    "flux-shell",
}


def warn_of_launcher_above(
    placement: Placement, environ: Mapping[str, str], launcher: str | None
) -> None:
    """Warn if a launcher runs above this process, which has none of its variables.

    Args:
        placement: of this process, which no launcher claims.
        environ: its environment.
        launcher: the one that an option or argument names.
    """
    is_inside_wrapper = inherited.VARIABLE in environ  # which has warned
    if is_inside_wrapper or names_launcher(environ, launcher):
        return
    of_each = map(attrgetter("programs"), LAUNCHERS.values())
    programs: set[str] = set().union(*of_each)
    found = program_above(sorted(programs - _WITHOUT_RANK))
    if found is None:
        return
    name = escape_control(os.path.basename(found.name))
    log_line(
        placement.who,
        f"warning: this process runs below {name} (process {found.pid}), and has none of its "
        "variables: it is a job of its own. sudo, su -, env -i and --cleanenv remove variables; "
        "pass them on, or set DISTBOOT_LAUNCHER=none if that is meant",
    )
