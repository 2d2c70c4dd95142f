"""Checks of what a launcher and a user pass to the process, and of the clock."""

from __future__ import annotations

import time

from ...base.errors import DistbootError
from ...base.settings import misspelled
from ...base.table import first_that_holds
from ...detection import surroundings
from ...detection.order import LAUNCHERS
from ...startup.launcher_above import find_launcher_above
from .finding import (
    Finding,
    ok,
    problem,
    refused,
    warning,
)
from .machine import Machine

_DAY = 86400  # seconds


def launcher(machine: Machine) -> Finding:
    """Whether the environment tells the rank of this process."""
    try:
        placement = machine.placement_here()
    except DistbootError as error:
        return refused(error)
    above = find_launcher_above(
        placement,
        machine.environ,
        machine.named_launcher,
        machine.program_above,
    )
    if above is not None:
        return warning(above.described, above.remedy)
    number = f"{placement.rank} of {placement.world_size}"
    node_level = placement.node_level
    title = LAUNCHERS[placement.launcher].title
    seen = first_that_holds(
        (node_level is not None, f"node {number}, not a rank: {node_level}"),
        (not placement.has_launcher, "none: a single process"),
        (True, f"rank {number}, by {title}"),
    )
    return ok(seen)


def allocation(machine: Machine) -> list[Finding]:
    """Whether a batch system or a hostfile has tasks or hosts that the job leaves unused."""
    placement = machine.placement()
    found = surroundings.find_possible_peers(placement, machine.environ, read=machine.text)
    if found is None:
        return []
    return [warning(surroundings.described(placement, found), found.remedy)]


def settings(machine: Machine) -> list[Finding]:
    """Variables that look like misspelled settings."""
    found = []
    for name, meant in misspelled(machine.environ).items():
        found.append(warning(f"unknown variable {name} is ignored", f"did you mean {meant}?"))
    return found


def clock(machine: Machine) -> Finding:
    """Whether the clock is behind: then certificates and credentials are not valid yet."""
    seen = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(machine.now))
    # A day of tolerance: a clock that was set by hand may show local time.
    if machine.now >= machine.installed_at - _DAY:
        return ok(f"{seen}; doctor --job compares it with the clocks of the other ranks")
    installed = time.strftime("%Y-%m-%d", time.gmtime(machine.installed_at))
    remedy = "set the clock of the host (chronyc makestep): a container has the clock of its host"
    return problem(f"{seen}, but distboot was installed here on {installed}", remedy)
