"""Time limits: a number, a text or a timedelta, in seconds."""

from __future__ import annotations

from .errors import DistbootError

_MOST = 86400.0  # a day
_LEAST = {True: 0.0, False: 1e-300}  # whether it may be 0
_HINTS = {True: "give 0 to 86400", False: "give a number above 0, at most 86400"}


def seconds(given: str, value: object, code: str = "usage", *, may_be_0: bool = False) -> float:
    """A time limit in seconds, above 0 (or that) and at most a day; else an error with this code."""
    number = _number_of_seconds(value)
    if not _LEAST[may_be_0] <= number <= _MOST:
        raise DistbootError(
            code,
            f"{given} is not a number of seconds",
            _HINTS[may_be_0],
        )
    return number


def _number_of_seconds(value: object) -> float:
    """The seconds in a number, a text or a timedelta; -1 for anything else."""
    # A timedelta, which torch.distributed takes; its module is not imported for it
    total = getattr(value, "total_seconds", None)
    if total is not None:
        return float(total())
    if isinstance(value, bool):
        return -1.0
    if not isinstance(value, str | int | float):
        return -1.0
    try:
        return float(value)
    except (ValueError, OverflowError):
        return -1.0
