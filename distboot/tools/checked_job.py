"""All ranks meet, and their nodes are checked, for a command that runs on all ranks.

It is `init`, as a script calls it: so whoever is missing, dead or late is named here, too.
"""

from __future__ import annotations

import os
from typing import Any

from ..base.errors import DistbootError, rendezvous_needed
from ..base.settings import rendezvous_setting
from ..context import Context
from ..initialize import current_session, init
from ..rendezvous.events import job_time


def meet(launcher: str | None) -> Context:
    """Let all ranks meet. No rank waits for another one after that, so failures are not watched."""
    os.environ["DISTBOOT_FAILURE_DETECTION"] = "0"
    return init("none", launcher=launcher)


def report_of(context: Context) -> dict[str, Any]:
    """What rank 0 knows of the job by now, as a report has it; leaves the job.

    Empty on all other ranks. `rendezvous-needed`: the ranks have not met. `rank-failed`: the agent
    of rank 0 does not answer.
    """
    session = current_session()
    log = session.log
    context.close()
    if context.rank != 0:
        return {}
    if not rendezvous_setting(os.environ):
        raise rendezvous_needed("this command needs what rank 0 learns when the ranks meet")
    if log is None:
        raise DistbootError(
            "rank-failed",
            "the monitor process of rank 0 does not answer",
            "look at the lines above; was it killed?",
        )
    from ..report.content import startup_report  # here, as all other ranks need none

    return startup_report(
        log,
        session.membership,
        None,
        job_time(),
    )
