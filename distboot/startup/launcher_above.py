"""A launcher above a process that has none of its variables, and so counts as alone.

`sudo`, `su -`, `env -i` and `--cleanenv` of a container remove the variables of a launcher. Then each
of the processes that it has started is a job of its own.
"""

from __future__ import annotations

import os
from itertools import chain, filterfalse
from operator import attrgetter

from ..base.process import program_above
from ..base.text import escape_control, log_line
from ..detection import inherited
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# These start a single process without a number
_NUMBER_NOTHING = frozenset({"accelerate", "accelerate-launch", "accelerate.commands.launch"})


def warn_of_launcher_above(
    placement: Placement, environ: Mapping[str, str], launcher: str | None
) -> None:
    """Warn where nothing but a program above this process says that there are others.

    Args:
        placement: of this process, which no launcher claims.
        environ: its environment.
        launcher: the one that an option or argument names.
    """
    is_inside_wrapper = inherited.VARIABLE in environ  # which has warned
    is_named = launcher is not None or bool(environ.get("DISTBOOT_LAUNCHER"))
    # Slurm and Flux also start job scripts, whose variables a note is about
    is_explained = len(placement.notes) > 0
    if is_inside_wrapper or is_named or is_explained:
        return
    of_each = map(attrgetter("programs"), LAUNCHERS.values())
    programs = filterfalse(_NUMBER_NOTHING.__contains__, chain.from_iterable(of_each))
    found = program_above(list(programs))
    if found is None:
        return
    name = escape_control(os.path.basename(found.name))
    log_line(
        placement.who,
        f"warning: {name} (process {found.pid}) has started this process, and none of its "
        "variables is here: sudo, su -, env -i or --cleanenv remove them. So this process is "
        "alone, and so is each other one; pass the variables on, or set DISTBOOT_LAUNCHER=none "
        "if that is meant",
    )
