"""A connection that sends heartbeats, and finds out whether its peer is there (`liveness`).

- A heartbeat that has arrived, and was not read yet, is a sign: the caller reads before it asks for
  a `fault`.
- Heartbeats of rank 0 are rarer than those of the others, as it has many peers. Between them the
  kernel's confirmation of what was sent to it is the sign (TCP_INFO).
- Time in which this process itself was stopped does not count: `heard` is set anew by the loop.
"""

from __future__ import annotations

import socket
import time
from math import inf

from ..rendezvous.protocol import BEFORE_AUTHENTICATION, HEARTBEAT, Channel
from .host_signs import Probe, silence_of
from .liveness import BOUND, Finding, Liveness, Signs
from .peer_connection import PeerConnection


class HeartbeatConnection(PeerConnection):
    """A connection that knows whether its peer is there; `bound` as in `BOUND`."""

    def __init__(
        self,
        connection: socket.socket,
        channel: Channel,
        bound: float = BOUND,
        most: int = BEFORE_AUTHENTICATION,
    ) -> None:
        super().__init__(connection, channel, most)
        self.liveness = Liveness(bound, self.heard)
        self._probe = Probe()

    @property
    def is_unreachable(self) -> bool:
        """Whether it gives no sign, though its host answers; it may be closed since."""
        return self.liveness.unreachable_since is not None

    @property
    def is_silent(self) -> bool:
        """Whether it is unreachable, and no message has arrived from it since."""
        return self.liveness.is_silent(self.received)

    def wake(self, now: float) -> None:
        """This process was stopped: the silence of the peer counts from now on."""
        self.heard = now
        self.liveness.woken_at = now

    def heartbeat(self) -> None:
        """Send a heartbeat, unless bytes wait that are as good a sign."""
        is_useless = any((self._unsent, self.is_closed, self.is_unreachable))
        if is_useless:
            return
        self.liveness.expect_confirmation(time.monotonic())
        self._unsent += self._plain or HEARTBEAT.sign(self._channel)
        self.flush()

    def send(self, message: object, rank: int = 0) -> None:
        self.liveness.expect_confirmation(time.monotonic())
        super().send(message, rank)

    def silence(self) -> tuple[float, bool]:
        """See `silence_of`."""
        if self.is_closed and self.is_unreachable:  # nothing can arrive here any more
            return inf, False
        return silence_of(self.socket)

    def is_unusually_silent(self) -> bool:
        """Whether the peer's host may just have died."""
        signs = Signs(self.heard, *self.silence())
        return self.liveness.is_unusually_silent(signs, time.monotonic())

    def question(self, now: float) -> None:
        """See `Liveness.question`."""
        signs = Signs(self.heard, *self.silence())
        if self.liveness.question(signs, now):
            self._probe.close()  # an answer from before says nothing
        self._ask_host()

    def trust(self) -> None:
        """See `Liveness.trust`; an answer of the host would be too old to count."""
        self.liveness.trust()
        self._probe.close()

    def fault(self, now: float) -> Finding | None:
        """See `Liveness.observe`."""
        silence, is_confirmed = self.silence()
        if is_confirmed and self._kept.messages:
            self._forget_confirmed()
        signs = Signs(
            self.heard,
            silence,
            is_confirmed,
            self.received,
            self._probe.is_answered(),
        )
        found = self.liveness.observe(signs, now)
        self._ask_host()
        return found

    def _ask_host(self) -> None:
        """Ask the host at another port, as long as liveness needs the answer."""
        if not self.liveness.is_asked:
            self._probe.close()
        elif not self._probe.is_asked:
            self.heartbeat()  # which its kernel confirms, if it is there
            self._probe.ask(self.socket)

    def end(self) -> None:
        super().end()
        self._probe.close()

    def resume(self, now: float) -> None:
        self.liveness.resume(now)
        super().resume(now)

    def close(self) -> None:
        super().close()
        self._probe.close()
