"""What one check has found."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DistbootError

# The worst first, as they are shown. A problem: the job will fail, hang, or fall back to something many times slower.
STATUSES = ("problem", "warning", "unknown", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check, and what it found.

    Attributes:
        name: kebab-case, stable.
        status: one of `STATUSES`.
        seen: what was found, in one line.
        remedy: what to do, as exact as may be; may have several lines. Empty where nothing is to be done.
    """

    name: str
    status: str
    seen: str
    remedy: str = ""


def ok(name: str, seen: str) -> Finding:
    """Nothing to be done."""
    return Finding(name, "ok", seen)


def warning(name: str, seen: str, remedy: str) -> Finding:
    """May be slow, or not what was meant."""
    return Finding(name, "warning", seen, remedy)


def problem(name: str, seen: str, remedy: str) -> Finding:
    """The job will fail, hang, or fall back to something many times slower."""
    return Finding(name, "problem", seen, remedy)


def unknown(name: str, seen: str, remedy: str = "") -> Finding:
    """The machine does not say."""
    return Finding(name, "unknown", seen, remedy)


def refused(name: str, error: DistbootError) -> Finding:
    """What the job itself would refuse with this error."""
    return problem(name, error.message.replace("\n", "; "), error.hint)
