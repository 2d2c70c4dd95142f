"""`init("none")`: the environment and the roll call only, with its barrier. The script starts what it likes."""

from __future__ import annotations

from ..context import Context
from ..detection.export import EnvTransaction
from ..host import free_port
from ..rendezvous.job_info import JobInfo
from ..rendezvous.messages import Ready
from . import Options
from ._base import context, export


def start(job: JobInfo, exported: EnvTransaction, options: Options) -> Context:
    """Export, when all ranks are there, with a MASTER_PORT that is free: where they have met is our barrier."""
    placement = job.placement
    # torchrun's is that of its own store, which torch will use.
    needed = placement.rank == 0 and placement.launcher != "torchrun" and job.store_address is not None
    job.ready(lambda: (True, Ready(offer=str(free_port()) if needed else None)))
    if 0 in job.offers:
        ours = {"master_port": int(job.offers[0])}
        job.placement = placement.with_fields("free on the host of rank 0, for what the script starts", ours)
    export(job, exported)
    return context(job, exported, options)
