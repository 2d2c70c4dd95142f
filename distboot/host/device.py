"""An accelerator as its driver describes it, whichever maker's it is."""

from __future__ import annotations

from typing import NamedTuple

MOST_DIGITS = 18  # of a number that a driver tells


class Device(NamedTuple):
    """One accelerator."""

    number: str
    uuid: str
    name: str  # "NVIDIA H100 80GB HBM3"
    memory: int  # bytes
    used: int  # bytes
    faults: list[str]  # what the driver says is wrong: "is slowed down: heat"


class Holder(NamedTuple):
    """A process that has memory of an accelerator."""

    uuid: str
    pid: int
    memory: int  # bytes; 0: not known


def memory_errors(count: int) -> list[str]:
    """The fault of a device with so many uncorrected errors (ECC)."""
    if not count:
        return []
    return [f"has {count} uncorrected errors of its memory"]
