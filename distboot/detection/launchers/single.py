"""No launcher: one process that is alone."""

from __future__ import annotations

from ..env_reader import EnvReader
from ..left_over import LeftOver
from ..placement import NO_LAUNCHER, PLATFORMS
from . import Launcher

_NOTES: dict[str, str] = {}
for _platform in PLATFORMS:
    _NOTES.update(_platform.notes_without_launcher)


def _read(reader: EnvReader) -> None:
    reader.record("no launcher", rank=0, world_size=1)
    for name, note in _NOTES.items():
        if name in reader.environ:
            reader.notes.append(note)


SINGLE = Launcher(
    name=NO_LAUNCHER,
    title="no launcher: one process",
    source="the contract: nothing claims the environment",
    read=_read,
    # Of programs that number processes and do not count them
    left_over=(
        LeftOver("LSF_PM_TASKID", "LSF's blaunch, which numbers tasks but does not count them"),
        LeftOver("ALPS_APP_PE", "ALPS (aprun on older Crays), which does not count its processes"),
        # The job script of PBS is its task 1, and pbsdsh counts on from there.
        LeftOver(
            "PBS_TASKNUM", "pbsdsh, which numbers tasks but does not count them", harmless="1"
        ),
    ),
    compared_with_signs=True,
)
