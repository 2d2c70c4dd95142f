"""Amounts with their units, for people: bytes, rates and times."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTES = ("bytes/s", "kB/s", "MB/s", "GB/s", "TB/s")
_BITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
_FOUR_DIGITS = 999.5
UNLIMITED = 1e17  # bytes: from there on no limit is meant


def size(count: float) -> str:
    """Bytes as memory counts them: `"7.5 GiB"`."""
    if count >= UNLIMITED:
        return "unlimited"
    return _with_unit(count, 1024.0, _SIZES)


def bit_rate(rate: float) -> str:
    """Bytes a second as networks count them: `"1.1 Gbit/s"`."""
    return _with_unit(rate * 8, 1000.0, _BITS)


def byte_rate(rate: float) -> str:
    """Bytes a second as nccl-tests count them: `"8.1 GB/s"`."""
    return _with_unit(rate, 1000.0, _BYTES)


def duration(seconds: float) -> str:
    """Seconds: `"0.2 ms"`, `"2.1 s"`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms"


def _with_unit(value: float, step: float, units: Sequence[str]) -> str:
    *small, largest = units
    unit = largest
    for each in small:
        if value < step:
            unit = each
            break
        value /= step
    text = f"{value:.3g}"
    if value >= _FOUR_DIGITS:  # else as "1.02e+03"
        text = f"{value:.0f}"
    return f"{text} {unit}"
