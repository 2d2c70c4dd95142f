"""Below an outer distboot: which launchers may have started this process since.

The outer distboot wrote down every launcher that had variables of its own, with a digest of what each
of them set (`inherited`). A launcher that is not there, or has another digest now, has started this
process below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import inherited
from .inherited import InheritedEnv
from .launchers import Launcher
from .order import present
from .placement import PLATFORMS, Placement
from .readings import Environment, claimed_whole

# What names the job of a whole platform, whichever launcher has started a process in it.
_JOB_IDS_OF_PLATFORMS = {name for platform in PLATFORMS for name in platform.job_id_variables}


def traces(environ: Mapping[str, str]) -> dict[str, str]:
    """Every launcher that has variables of its own in an environment, with a digest of its numbers.

    And with a digest of the job, where the launcher names it.
    """
    return _traces(placements(Environment.of(environ), present(environ)))


def _traces(placements: Mapping[str, Placement]) -> dict[str, str]:
    found = {}
    for name, placement in placements.items():
        place = f"{placement.launcher}:{placement.rank}:{placement.world_size}"
        found[name] = inherited.digest(place)
        if placement.sources.get("job_id") not in _JOB_IDS_OF_PLATFORMS:
            found[name] += inherited.digest(placement.job_id)
    return found


def placements(environment: Environment, launchers: Sequence[Launcher]) -> dict[str, Placement]:
    """The placement of each launcher that has variables of its own, and all that it needs."""
    found = {}
    for launcher in launchers:
        if launcher.generic_names:
            continue
        placement = claimed_whole(launcher, environment.for_launcher(launcher))
        if placement is not None:
            found[launcher.name] = placement
    return found


def candidates(
    launchers: Sequence[Launcher], outer: InheritedEnv, found: Mapping[str, Placement]
) -> Sequence[Launcher]:
    """Those that may have started this process; not those that are further out than the distboot.

    `found` has the placements of those that have variables of their own.
    """
    new = set()
    for name, identity in _traces(found).items():
        if outer.is_new(name, identity):
            new.add(name)
    if new:
        return [launcher for launcher in launchers if launcher.name in new]
    further_out = found.keys() - {outer.fields["launcher"]}
    return [launcher for launcher in launchers if launcher.name not in further_out]
