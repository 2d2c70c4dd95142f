"""What a user can set about the lifeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import DistbootError, quoted
from ..rendezvous import seconds

DEFAULT_BOUND = 15.0  # seconds
_LEAST_BOUND = 2.0  # seconds
DEFAULT_GRACE = 30.0  # seconds; Kubernetes, torchrun and Slurm (KillWait) wait as long by default


class Settings(NamedTuple):
    """What a user can set about the lifeline.

    Attributes:
        bound: seconds for which a rank may be silent, or stopped, before it counts as lost.
        grace: seconds between TERM and KILL for a process that has to stop.
        report: file for the report of the job, absolute; None: none.
    """

    bound: float = DEFAULT_BOUND
    grace: float = DEFAULT_GRACE
    report: str | None = None


def settings(environ: Mapping[str, str], grace: float | None = None, report: str | None = None) -> Settings | None:
    """The settings of this process; None when the lifeline is off.

    Args:
        environ: the environment.
        grace: as given by the user, before what the environment says.
        report: the same.

    Raises:
        DistbootError: `broken-environment`, a value is none.
    """
    switch = environ.get("DISTBOOT_LIFELINE") or "1"
    if switch not in ("0", "1"):
        raise DistbootError(
            "broken-environment",
            f"DISTBOOT_LIFELINE={quoted(switch)} is neither 0 nor 1",
            "unset it, or set it to 0; how long a rank may be silent is DISTBOOT_LIFELINE_TIMEOUT",
        )
    bound = _seconds(environ, "DISTBOOT_LIFELINE_TIMEOUT", DEFAULT_BOUND)
    if bound < _LEAST_BOUND:
        raise DistbootError(
            "broken-environment",
            f"DISTBOOT_LIFELINE_TIMEOUT={bound:g} is shorter than {_LEAST_BOUND:g} s",
            "give 2 to 86400; ranks are heard of once a second, and 15 is a bound that a busy machine can keep",
        )
    grace = grace_setting(environ, grace)
    return Settings(bound, grace, report_setting(environ, report)) if switch == "1" else None


def report_setting(environ: Mapping[str, str], given: str | None = None) -> str | None:
    """Where the report is to be, absolute; None: nowhere."""
    path = given or environ.get("DISTBOOT_REPORT")
    return os.path.abspath(path) if path else None  # now, as a script may change its directory


def grace_setting(environ: Mapping[str, str], given: str | float | None = None) -> float:
    """Seconds between TERM and KILL: as given with --grace, or DISTBOOT_GRACE, or the default.

    Raises:
        DistbootError: `usage` or `broken-environment`, it is not a positive number.
    """
    if given is not None:
        return seconds(f"--grace={quoted(given)}", given)
    return _seconds(environ, "DISTBOOT_GRACE", DEFAULT_GRACE)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, str(default))
    return seconds(f"{name}={quoted(text)}", text, "broken-environment")
