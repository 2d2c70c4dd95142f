"""Which process has a socket of this host, from the kernel's tables.

A process sees the files of another user's processes, and of those in another container, only if it
may. Linux only: elsewhere nothing is found.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress

from ..base.process import read_proc
from .command_line import short_command

# sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
#  0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 151379 …
# 0A: TCP_LISTEN in include/net/tcp_states.h
_LISTENING = r"^ *[0-9]+: [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A(?: +[^ ]+){{5}} +([0-9]+) "
_LIMIT = 1.0  # seconds for a look at the files of all processes


def listener(port: int) -> str:
    """The process that listens at a TCP port, `"process 4711: python -m http.server"`.

    Empty if it cannot be seen.
    """
    inodes = {f"socket:[{inode}]": inode for inode in _listening(port)}
    processes = holders(inodes, _LIMIT)
    if not processes:
        return ""
    process = min(processes.values())
    return f"process {process}: {short_command(process)}"


def holders(inodes: Mapping[str, str], limit: float = float("inf")) -> dict[str, int]:
    """The process that holds each of these sockets, as far as it is found in so many seconds.

    `inodes` has the name of each socket, by the text of the links to it.
    """
    found: dict[str, int] = {}
    end = time.monotonic() + limit
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        if len(found) == len(inodes) or time.monotonic() > end:
            break
        with suppress(OSError):  # it is closed, or another user's
            name = inodes.get(os.readlink(link))
            if name is not None:
                found[name] = int(link.split("/")[2])
    return found


def _listening(port: int) -> list[str]:
    """The inodes of the sockets that listen at a TCP port of this network namespace."""
    tables = read_proc("net/tcp") + read_proc("net/tcp6")
    pattern = _LISTENING.format(port=port)
    return re.findall(
        pattern,
        tables,
        re.MULTILINE,
    )
