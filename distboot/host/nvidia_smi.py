"""What NVIDIA's driver says of the accelerators of this host, through its program nvidia-smi.

The program is asked under a time limit, in a process of its own: a driver that hangs holds up
whoever asks it, in the kernel, where no signal arrives.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from ..base.text import digits
from .device import MOST_DIGITS, Device, Holder, memory_errors

PROGRAM = "nvidia-smi"
# nvidia-smi --help-query-gpu
_OF_DEVICES = ("index", "uuid", "name", "memory.total", "memory.used")
_OF_HEALTH = ("ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")
_OF_PROCESSES = ("gpu_uuid", "pid", "used_memory")
# From nvml.h, nvmlClocksThrottleReasons: hardware slowdown, of heat, of the power supply
_SLOWDOWNS = {0x08: "hardware", 0x40: "heat", 0x80: "power brake"}
_MIB = 1 << 20
_AT_LEAST = 0.02  # seconds for an answer, where the time is up
_KILLED = 0.5  # seconds for a killed program to end on a busy host, where no driver holds it


class DriverHangs(Exception):  # noqa: N818 - an answer, not an error
    """The program has not answered in time; the text says so."""


def devices(limit: float) -> list[Device]:
    """All accelerators; `DriverHangs`: no answer within `limit` seconds."""
    end = time.monotonic() + limit
    rows = _query("gpu", (*_OF_DEVICES, *_OF_HEALTH), end)
    if not rows:  # a version that does not know one of these fields answers none of them
        rows = _query("gpu", _OF_DEVICES, end)
    found = []
    for row in rows:
        number, uuid, name, memory, used, *health = row
        found.append(
            Device(
                number,
                uuid,
                name,
                memory=_bytes(memory),
                used=_bytes(used),
                faults=_faults(*health),
            )
        )
    return found


def holders(limit: float) -> list[Holder]:
    """The processes that use accelerators, as far as this container may see them."""
    end = time.monotonic() + limit
    found = []
    for uuid, pid, memory in _query("compute-apps", _OF_PROCESSES, end):
        number = digits(pid, MOST_DIGITS)
        if number is not None:
            found.append(Holder(uuid, number, _bytes(memory)))
    return found


def _query(what: str, fields: Sequence[str], end: float) -> list[list[str]]:
    """Rows with these fields; none where the program does not know one of them."""
    listed = ",".join(fields)
    command = [PROGRAM, f"--query-{what}={listed}", "--format=csv,noheader,nounits"]
    text = _output(command, end)
    rows = []
    for line in text.splitlines():
        row = [word.strip() for word in line.split(",")]
        if len(row) == len(fields):
            rows.append(row)
    return rows


def _output(command: Sequence[str], end: float) -> str:
    """What a program prints; empty if it cannot be run."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=max(end - time.monotonic(), _AT_LEAST))
    except subprocess.TimeoutExpired:
        _leave(process)
        text = f"{PROGRAM} has not answered in time: a driver that hangs, or is slow to start"
        raise DriverHangs(text) from None
    return output.decode(errors="replace")


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Kill it, but do not wait long: where the driver hangs it never ends."""
    assert process.stdout is not None
    process.kill()
    process.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED)


def _bytes(mebibytes: str) -> int:
    """Of a number; 0 for `"[N/A]"`."""
    return (digits(mebibytes, MOST_DIGITS) or 0) * _MIB


def _faults(errors: str = "", reasons: str = "") -> list[str]:
    """What is wrong, of the number of errors, and of bits like `"0x0000000000000048"`."""
    found = memory_errors(digits(errors, MOST_DIGITS) or 0)
    active = 0
    with suppress(ValueError):
        active = int(reasons, 16)
    slowdowns = [name for bit, name in _SLOWDOWNS.items() if active & bit]
    if slowdowns:
        found.append(f"is slowed down: {' and '.join(slowdowns)}")
    return found
