"""What /proc has about a process."""

from __future__ import annotations

from contextlib import suppress


def proc_stat(process: object = "self") -> list[str]:
    """The fields of proc_pid_stat(5), from the third one on: the state.

    Empty if the process has ended, or if there is no /proc.
    """
    with (
        suppress(OSError),
        open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file,
    ):
        return file.read().rpartition(")")[2].split()
    return []


def ends_at(process: int, number: int) -> bool:
    """Whether a signal ends a process: it does not block, ignore or handle the signal.

    False also if that is not known.
    """
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file)
        # proc_pid_status(5): SigCgt:	0000000180004a02
        masks = [int(lines[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")]
    except (OSError, ValueError, KeyError):
        return False
    own_bit = 1 << (number - 1)
    return not any(mask & own_bit for mask in masks)
