"""`init("none")`: the environment and the roll call only, with its barrier. The script starts what it likes."""

from __future__ import annotations

from collections.abc import Mapping

from ..context import Context
from ..exports import Exported
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
    """Export, when all ranks are there."""
    meeting.ready(lambda: (True, Ready()))
    export(meeting, exported)
    return context(meeting, exported, options, Gated(meeting, options))
