"""`init("none")`: the environment and the roll call only, with its barrier. The script starts what it likes."""

from __future__ import annotations

from collections.abc import Mapping

from ..context import Context
from ..exports import Exported
from ..rendezvous import free_port
from ..rollcall.meeting import Meeting
from ..rollcall.ready import Ready
from ._joined import Gated, context, export
from ._options import Options


def on_cpu(_: Options) -> bool:
    """Nothing is known of what the script will use."""
    return True


def exports(_meeting: Meeting, _environ: Mapping[str, str]) -> dict[str, str]:
    """Nothing that has a name."""
    return {}


def start(meeting: Meeting, exported: Exported, options: Options) -> Context:
    """Export, when all ranks are there, with a MASTER_PORT that is free: where they have met is our barrier."""
    placement = meeting.placement
    # torchrun's is that of its own store, which torch will use.
    needed = placement.rank == 0 and placement.launcher != "torchrun" and meeting.store_address is not None
    meeting.ready(lambda: (True, Ready(offer=str(free_port()) if needed else None)))
    if 0 in meeting.offers:
        ours = {"master_port": int(meeting.offers[0])}
        meeting.placement = placement.with_fields("free on the host of rank 0, for what the script starts", ours)
    export(meeting, exported)
    return context(meeting, exported, options, Gated(meeting, options))
