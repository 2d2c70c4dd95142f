"""All ranks meet, and their nodes are checked, for a command that runs on all ranks.

It is `init`, as a script calls it: so whoever is missing, dead or late is named here, too.
"""

from __future__ import annotations

import time
from typing import Any

from ..context import Context
from ..initialize import current_session


def report_of(context: Context) -> dict[str, Any]:
    """What rank 0 knows of the job by now, as a report has it; leaves the job.

    Empty on all other ranks.
    """
    session = current_session()
    log = session.log
    context.close()
    if context.rank != 0 or log is None:
        return {}
    from ..report.content import startup_report  # here, as all other ranks need none

    return startup_report(
        log,
        session.membership,
        None,
        time.time(),
    )
