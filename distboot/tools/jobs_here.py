"""The jobs of this host: the command, folder, process and age of each, from the sockets of their
agents.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.process import started
from ..base.text import counted, escape_control
from ..host.command_line import command, short_command
from ..host.sockets import holders

_SOCKETS = "/proc/net/unix"
# 0000000000000000: 00000002 00000000 00010000 0001 01 26312 @distboot-agent-4711.0-9f86d081
# A name with a line break has other lines, too.
_NAMED = pattern(r"\w+:(?: +\w+){5} +(\d+) @(\S+)")
_LONGEST_FOLDER = 60  # characters
_SIDECAR = "distboot.agent.sidecar"  # in the command of the agent of a bare `init`


def jobs_listed(
    agents: Mapping[str, Sequence[str]],
    problem: str = "",  # what was asked for, and is none of them
) -> DistbootError:
    """The error that lists the jobs of this host: id, script, folder, process and age."""
    processes = holders(abstract_sockets())
    begin = ""
    if problem:
        begin = f"{problem}; "
    count = len(agents)
    verb = "run"
    if count == 1:
        verb = "runs"
    lines = [f"{begin}{counted(count, 'job')} {verb} on this host:"]
    for job in sorted(agents):
        found = [processes[name] for name in agents[job] if name in processes]
        lines.append(f"  --job {job}: {_described(found)}")
    return DistbootError(
        "usage", "\n".join(lines), "give one, for example " + lines[1].split(": ")[0].strip()
    )


def _described(processes: Sequence[int]) -> str:
    """`"python -m distboot train.py in /home/me/run-3 (process 4711, running for 1:05:20)"`."""
    if not processes:
        return "its processes belong to another user or container"
    process = min(processes)
    words = command(process)
    if _SIDECAR in words:  # beside the process of the script, whose id is its next word
        process = int(words[words.index(_SIDECAR) + 1])
    what = f"{short_command(process)}{_folder(process)}"
    return f"{what} (process {process}, running for {_age(process)})"


def _folder(process: int) -> str:
    """`" in /home/me/run-3"`, of a long one the end; empty: it cannot be read."""
    with suppress(OSError):
        folder = escape_control(os.readlink(f"/proc/{process}/cwd"))
        if len(folder) > _LONGEST_FOLDER:
            end = folder[1 - _LONGEST_FOLDER :]
            folder = f"…{end}"
        return f" in {folder}"
    return ""


def _age(process: int) -> str:
    """How long a process has been running, `"0:00:09"`."""
    begin = started(process)
    if begin is None:
        return "0 s: it has ended"
    seconds = max(0, round(time.clock_gettime(time.CLOCK_BOOTTIME) - begin))
    return str(timedelta(seconds=seconds))


def abstract_sockets() -> dict[str, str]:
    """`"socket:[26312]"`, as a descriptor of it is called, -> the abstract name of a Unix socket.

    Those of this network namespace; none if the kernel's table cannot be read.
    """
    found: dict[str, str] = {}
    with suppress(OSError), open(_SOCKETS, encoding="ascii", errors="replace") as file:
        for line in file.read().splitlines():
            named = _NAMED.fullmatch(line)
            if named is not None:
                found[f"socket:[{named[1]}]"] = named[2]
    return found
