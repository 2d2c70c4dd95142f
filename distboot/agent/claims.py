"""Which agent prints what every agent of its node knows: the first one that claims it.

The ranks of a node share one stream, and what each of a hundred agents prints there is there a
hundred times. A claim is a name among the abstract Unix sockets of this host: the kernel gives it
to one process, until that ends. So no agent has to know which others are still there: where rank
0's is killed, another one gets the claim. An agent with a log file of its own prints everything.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys

_STDERR = 2


class Claims:
    """The claims of one agent in one round of a job; `scope` names job, round and node."""

    def __init__(self, scope: str) -> None:
        self._prefix = f"distboot-says-{scope}-{_own_log()}"
        self._held: dict[str, socket.socket | None] = {}

    def claim(self, topic: str) -> bool:
        """Whether this agent is the one of its node that prints this."""
        if topic not in self._held:
            try:
                self._held[topic] = _bound(f"{self._prefix}-{topic}")
            except FileExistsError:
                return False
        return True

    def close(self) -> None:
        for held in self._held.values():
            if held is not None:
                held.close()
        self._held.clear()


def _bound(name: str) -> socket.socket | None:
    """A socket with this name; `FileExistsError`: another process has it; None: there are no such names here."""
    if sys.platform != "linux":
        return None
    try:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:  # too few files: a line twice is better than none
        return None
    try:
        held.bind(f"\0{name}")
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            raise FileExistsError(name) from None
        return None
    return held


def _own_log() -> str:
    """What tells the file that is our stderr from others; empty: a pipe or a terminal, which ranks share."""
    try:
        found = os.fstat(_STDERR)
    except OSError:
        return ""
    if not stat.S_ISREG(found.st_mode):
        return ""
    return f"{found.st_dev}:{found.st_ino}"
