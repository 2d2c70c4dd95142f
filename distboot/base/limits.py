"""Timeouts in seconds, from a number, a text or a timedelta."""

from __future__ import annotations

from .errors import DistbootError

_MOST = 86400.0  # a day
# Whether 0 is valid: the least number, and the hint for one that is not valid
_RANGES = {
    True: (0.0, "use 0 to 86400 seconds"),
    False: (1e-300, "use a number of seconds above 0, at most 86400"),
}


def seconds(given: str, value: object, code: str = "usage", *, may_be_0: bool = False) -> float:
    """A timeout in seconds, above 0 (or 0 if `may_be_0`), at most a day; else an error."""
    least, hint = _RANGES[may_be_0]
    number = _number_of_seconds(value)
    if not least <= number <= _MOST:
        raise DistbootError(code, f"{given} is not a number of seconds", hint)
    return number


def _number_of_seconds(value: object) -> float:
    """The seconds in a number, a text or a timedelta; -1 for anything else."""
    # A timedelta has it, as torch.distributed takes one; its module is not imported for it
    total = getattr(value, "total_seconds", None)
    if total is not None:
        return float(total())
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return -1.0
    try:
        return float(value)
    except (ValueError, OverflowError):
        return -1.0
