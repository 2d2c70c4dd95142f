"""Amounts with their units, for people: bytes, rates and times."""

from __future__ import annotations

from typing import NamedTuple

_FOUR_DIGITS = 999.5
UNLIMITED = 1e17  # bytes: from there on no limit is meant


class _Scale(NamedTuple):
    """Units of which each is so many times the one before."""

    step: float
    units: tuple[str, ...]
    factor: float = 1.0  # from the value to the first unit

    def text(self, value: float) -> str:
        """The value with three digits, in the unit that fits it."""
        if value >= UNLIMITED:
            return "unlimited"
        value *= self.factor
        text = ""
        for unit in self.units:
            text = f"{value:.3g} {unit}"
            if value < _FOUR_DIGITS:
                break
            value /= self.step
        return text


# Bytes as memory counts them: "7.5 GiB"
size = _Scale(1024.0, ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")).text
# Bytes a second as networks count them: "1.1 Gbit/s"
bit_rate = _Scale(1000.0, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"), 8.0).text
# Bytes a second as nccl-tests count them: "8.1 GB/s"
byte_rate = _Scale(1000.0, ("bytes/s", "kB/s", "MB/s", "GB/s", "TB/s")).text


_LEAST_IN_MINUTES = 100.0
# From this many seconds on: unit, its seconds, and the smaller unit beside it
_LONGER = {
    86_400: ("d", 86_400, "h", 3600),
    3600: ("h", 3600, "min", 60),
    0: ("min", 60, "s", 1),
}


def duration(seconds: float) -> str:
    """Seconds: `"0.2 ms"`, `"2.1 s"`, `"16 min 45 s"`, `"1 h 31 min"`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < _LEAST_IN_MINUTES:
        return f"{seconds:.3g} s"
    least = max(filter(seconds.__ge__, _LONGER))
    unit, length, smaller, part = _LONGER[least]
    whole, rest = divmod(round(seconds / part), length // part)
    return f"{whole} {unit} {rest} {smaller}"
