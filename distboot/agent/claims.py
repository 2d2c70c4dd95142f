"""Which agent prints what every agent of its node knows: the first one that claims it.

The ranks of a node share one stream, and a line that each of a hundred agents prints is there a
hundred times. A claim is a name among the abstract Unix sockets of this host: the kernel gives it
to one process, until that process ends. So no agent needs to know which others are still there:
where rank 0's agent was killed, another one gets the claim. An agent whose stderr is a log file of
its own prints everything, as its scope is another one.

A claim ends with its process, which may be before another agent of the node knows. So why all stop
is claimed only where rank 0 has not told this agent: else rank 0 says who prints it
(`Abort.speaks`).
"""

from __future__ import annotations

import errno
import socket
import sys
from contextlib import ExitStack


class Claims:
    """The claims of one agent in one round of a job; `scope` names job, round, node and log."""

    def __init__(self, scope: str) -> None:
        self._prefix = f"distboot-says-{scope}"
        self.topics: set[str] = set()  # that this agent prints
        self._sockets = ExitStack()

    def claim(self, topic: str) -> bool:
        """Whether this agent is the one of its node that prints this."""
        if topic in self.topics:
            return True
        if not self._is_free(f"{self._prefix}-{topic}"):
            return False
        self.topics.add(topic)
        return True

    def close(self) -> None:
        self.topics.clear()
        self._sockets.close()

    def _is_free(self, name: str) -> bool:
        """Take a name, unless another process has it.

        True if that is not possible: a line twice is better than none.
        """
        if sys.platform != "linux":
            return True
        try:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sockets.enter_context(held)
            held.bind(f"\0{name}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True
