"""The jobs of this host: the command, folder, process and age of each, from the sockets of their
agents.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.process import read_proc, started
from ..base.text import counted, escape_control
from ..host.command_line import command, short_command
from ..host.sockets import holders

_SOCKETS = "/proc/net/unix"
# 0000000000000000: 00000002 00000000 00010000 0001 01 26312 @distboot-agent-4711.0-9f86d081
# A name with a line break has other lines, too.
_NAMED = pattern(r"\w+:(?: +\w+){5} +(\d+) @(\S+)")
_LONGEST_FOLDER = 60  # characters
_SIDECAR = "distboot.agent.sidecar"  # in the command of the agent of a bare `init`
# In proc_pid_status(5): the ids of a process, from the PID namespace of /proc to its own
_IDS = pattern(r"^NSpid:(.*)$", re.MULTILINE)


def jobs_listed(
    agents: Mapping[str, Sequence[str]],
    problem: str = "",  # what was asked for, and is none of them
    hint: str = "",  # otherwise it gives the first one as an example
) -> DistbootError:
    """The error that lists the jobs of this host: id, script, folder, process and age."""
    described = descriptions(agents)
    begin = ""
    if problem:
        begin = f"{problem}; "
    count = len(agents)
    verb = "run"
    if count == 1:
        verb = "runs"
    lines = [f"{begin}{counted(count, 'job')} {verb} on this host:"]
    for job, description in described.items():
        lines.append(f"  --job {job}: {description}")
    if not hint:
        hint = f"give one, for example --job {min(agents)}"
    return DistbootError("usage", "\n".join(lines), hint)


def descriptions(agents: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By job, in order: its script, folder, process and age."""
    processes = holders(abstract_sockets())
    described = {}
    for job in sorted(agents):
        found = [processes[name] for name in agents[job] if name in processes]
        described[job] = _described(found)
    return described


def _described(processes: Sequence[int]) -> str:
    """`"python -m distboot train.py in /home/me/run-3 (process 4711, running for 1:05:20)"`."""
    if not processes:
        return "its processes belong to another user or container"
    process = min(processes)
    words = command(process)
    name = "agent"
    if _SIDECAR in words:  # beside the process of the script, whose id is its next word
        name = "script"
        process = _seen_here(int(words[words.index(_SIDECAR) + 1]), process)
    ended = f"its {name} (process {process}) has ended"
    begin = started(process)
    if begin is None:
        return ended
    what = short_command(process)
    if not what:  # it has ended, and its parent has not noticed that
        return ended
    return f"{what}{_folder(process)} (process {process}, running for {_age(begin)})"


def _seen_here(number: int, agent: int) -> int:
    """The id in this PID namespace of a process, by its number in that of its agent.

    The agent's own if it is not found.
    """
    if len(_ids(agent)) < 2:  # it has the same namespace
        return number
    for entry in glob.iglob("/proc/[0-9]*"):
        process = int(entry[len("/proc/") :])
        if _ids(process)[-1:] != [str(number)]:
            continue
        if _is_beside(process, agent):
            return process
    return agent


def _ids(process: int) -> list[str]:
    """The ids of a process in all its PID namespaces, its own last; empty: it has ended."""
    ids = _IDS.search(read_proc(f"{process}/status"))
    if ids is None:
        return []
    return ids[1].split()


def _is_beside(process: int, other: int) -> bool:
    """Whether two processes have the same PID namespace."""
    with suppress(OSError):
        return os.path.samefile(f"/proc/{process}/ns/pid", f"/proc/{other}/ns/pid")
    return False


def _folder(process: int) -> str:
    """`" in /home/me/run-3"`, of a long one the end; empty: it cannot be read."""
    with suppress(OSError):
        folder = escape_control(os.readlink(f"/proc/{process}/cwd"))
        if len(folder) > _LONGEST_FOLDER:
            end = folder[1 - _LONGEST_FOLDER :]
            folder = f"…{end}"
        return f" in {folder}"
    return ""


def _age(begin: float) -> str:
    """How long a process has been running that began then, `"0:00:09"`."""
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
