"""The part of one agent in the check of all nodes (`job/check`): the first agent of each node.

It looks at its node, answers the probe of one neighbor, and probes the other one. Each may wait,
for a driver or a network, so each is done in a thread; the loop hears what a thread has found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..base.errors import DistbootError
from ..base.text import without_mapping
from ..base.threads import start_without_signals
from ..host.accelerators import has_accelerators
from ..job.messages import LONGEST_SEEN, MOST_SEEN, NodeSeen, Probe, Probeable, Probed
from ..rendezvous.connection_pool import PortInUse
from .calls import Calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .link_probe import LinkServer
    from .loop import EventLoop
    from .shell import Shell

_FAILED = "its check has failed"
_CLOSES = 6.0  # seconds after which no neighbor asks any more


class NodeCheck:
    """Looks at this node for the agent of `rank`, the first rank here."""

    def __init__(
        self,
        shell: Shell,
        loop: EventLoop,
        rank: int,
        secret: str,
        host_of_rank_0: str,
    ) -> None:
        self._shell = shell
        self._loop = loop
        self._rank = rank
        self._secret = secret  # of the job
        # Its address, as this agent has reached it
        self._host_of_rank_0 = without_mapping(host_of_rank_0)
        self._calls = Calls()
        self._server: LinkServer | None = None
        loop.add_reader(self._calls.fileno(), self._calls.take)

    def begin(self, pid: int, *, is_rank: bool, has_neighbors: bool) -> None:
        """Look at this node; see `host.node_state.look`."""
        if has_neighbors:
            self._meet_neighbors()
        elif not has_accelerators():  # one node, which has nothing to look at
            self._tell(NodeSeen())
            return
        look = partial(
            _look,
            pid,
            self._secret,
            is_rank=is_rank,
        )
        self._in_thread(look, lambda why: NodeSeen(problems=(why,)))

    def _meet_neighbors(self) -> None:
        from .link_probe import LinkServer  # here, as a job of one node has none

        # Without a port or a thread it cannot be probed, and does not probe
        with suppress(PortInUse, OSError, DistbootError):
            self._server = LinkServer()
            self._tell(Probeable(self._server.port, self._server.token))
            self._shell.probe = self._probe
            self._loop.call_at(time.monotonic() + _CLOSES, self._server.close)

    def close(self) -> None:
        self._loop.remove_reader(self._calls.fileno())
        self._calls.close()
        if self._server is not None:
            self._server.close()

    def _probe(self, question: Probe) -> None:
        from .link_probe import probe

        work = partial(probe, question, self._host_of_rank_0)
        self._in_thread(work, lambda why: Probed(question.number, problem=why))

    def _in_thread(self, work: Callable[[], object], failed: Callable[[str], object]) -> None:
        """Tell what a thread finds, or what `failed` makes of why it finds nothing."""

        def find() -> None:
            try:
                found = work()
            except Exception as error:  # noqa: BLE001 - a driver or a kernel may do anything
                found = failed(f"{_FAILED}: {type(error).__name__}")
            self._tell(found)

        try:
            start_without_signals("distboot-check", find)
        except DistbootError:  # this user may start no more threads
            self._tell(failed(_FAILED))

    def _tell(self, message: object) -> None:
        """Let the loop take a message, from any thread."""
        self._calls.put(partial(self._shell.take, self._rank, message))


def _look(pid: int, secret: str, *, is_rank: bool) -> NodeSeen:
    from ..host import environment, node_state  # here, in the thread, as it takes a moment

    seen = node_state.look(pid, is_rank=is_rank)
    names = {name: value[:LONGEST_SEEN] for name, value in seen.names.items()}
    problems = [problem[:LONGEST_SEEN] for problem in seen.problems[:MOST_SEEN]]
    return NodeSeen(
        seen.amounts,
        names,
        tuple(problems),
        environment.digests(os.environ, secret),
    )
