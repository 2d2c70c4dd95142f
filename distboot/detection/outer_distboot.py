"""Below an outer distboot: which launchers may have started this process since.

The outer distboot wrote down every launcher that had variables of its own, with a digest of what
each of them set (`inherited`). A launcher that is not there, or has another digest now, has started
this process below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import inherited
from .inherited import InheritedEnv
from .launchers import Launcher
from .order import with_marker
from .placement import JOB_IDS_OF_PLATFORMS, Placement
from .readings import Environment, claimed_whole


def traces(environ: Mapping[str, str]) -> dict[str, str]:
    """Every launcher that has variables of its own in an environment, with a digest of its numbers.

    And with a digest of the job, where the launcher names it.
    """
    environment = Environment.of(environ)
    found = placements(environment, with_marker(environ))
    return _traces(found)


def _traces(placements: Mapping[str, Placement]) -> dict[str, str]:
    found = {}
    for name, placement in placements.items():
        place = f"{placement.launcher}:{placement.rank}:{placement.world_size}"
        identity = inherited.digest(place)
        source = placement.sources.get("job_id")
        if source not in JOB_IDS_OF_PLATFORMS:
            identity += inherited.digest(placement.job_id)
        found[name] = identity
    return found


def placements(environment: Environment, launchers: Sequence[Launcher]) -> dict[str, Placement]:
    """The placement of each launcher that has variables of its own, and all that it needs."""
    found = {}
    for launcher in launchers:
        name = launcher.name
        if launcher.generic_names:
            continue
        environ = environment.for_launcher(launcher)
        placement = claimed_whole(launcher, environ)
        if placement is not None:
            found[name] = placement
    return found


def candidates(
    launchers: Sequence[Launcher],
    outer: InheritedEnv,
    found: Mapping[str, Placement],
) -> Sequence[Launcher]:
    """Those that may have started this process; not those that are further out than the distboot.

    `found` has the placements of those that have variables of their own.
    """
    by_name = {launcher.name: launcher for launcher in launchers}
    own = outer.fields["launcher"]
    new = []
    for name, identity in _traces(found).items():
        launcher = by_name[name]
        if outer.is_new(name, identity):
            new.append(launcher)
        if name != own:
            del by_name[name]
    others = list(by_name.values())
    return new or others
