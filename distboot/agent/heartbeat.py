"""Whether the peer of a connection is still there.

Three things can be wrong, and they are told apart, as only one of them ends a job:

1. The peer's *process* is stopped or frozen, although its host answers. It is lost if no heartbeat
   has arrived for `_FROZEN` times the bound.
2. The *host*, or the network to it, is down. Its kernel has given no sign for `_PATIENCE` times the
   bound: nothing arrived, and what was sent is not confirmed (TCP_INFO). Then the host is
   *suspect*, and is asked at another port, at which nothing listens: a host that is there refuses
   at once (`Probe`). No answer within the bound: it is lost.
3. The host answers at the other port, but nothing gets through on this connection (a firewall, a
   table of connections that has dropped it). The peer is *unreachable*. Nothing ends: the caller
   goes on without it, and is told when it is reachable again.

What always holds:

- A heartbeat that has arrived, and was not read yet, is a sign: the caller reads before it asks for
  a `fault`.
- Heartbeats of rank 0 are rarer than those of the others, as it has many peers. Between them the
  kernel's confirmation of what was sent to it is the sign.
- Time in which this process itself was stopped does not count: `heard` is set anew by the loop.
- A fault that is not a loss is reported once, until the peer has been reachable in between.
"""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from ..rendezvous.protocol import BEFORE_AUTHENTICATION, HEARTBEAT, Channel
from .host_signs import Probe, silence_of
from .peer_connection import PeerConnection

BOUND = 15.0  # seconds; DISTBOOT_HEARTBEAT_TIMEOUT of rank 0's agent is that of the job
# Of the bound:
BEATS = 0.5  # between two heartbeats
BEATS_OF_RANK_0 = 1.2  # between two of rank 0
_PATIENCE = 0.75  # without any sign of the peer's kernel, until another port of its host is tried
# Without a heartbeat, also if rank 0 was stopped for as long as it may be just before one was due
_FROZEN = 2.3
_CONFIRMING = 2.0  # seconds; a network takes milliseconds, and peers are polled once a second
_PROBE_LIMIT = 0.9  # seconds for that other port to answer, at least


# What a peer is found to be
LOST = "lost"
UNREACHABLE = "unreachable"  # only the connection to it is lost
REACHABLE = "reachable"  # again


class Finding(NamedTuple):
    """What is new about a peer."""

    kind: str
    text: str  # why, to follow "rank 3"; of one that is reachable again for how long it was not


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
        # Since when the peer has given no sign although its host answers; None: it is reachable
        self.unreachable_since: float | None = None
        self._bound = bound
        # Seconds: these two are compared for each peer, once a second
        self._patience = _PATIENCE * bound
        self._frozen_after = _FROZEN * bound
        self._probe: Probe | None = None  # while it is suspect
        # Until then `fault` finds nothing, if nothing is sent and the peer is not unreachable
        self.no_fault_before = 0.0
        self._looked = self.heard  # when the kernel was asked last
        self._confirmed = self.heard  # when the peer's kernel had confirmed all that was sent

    @property
    def is_suspect(self) -> bool:
        """Whether its host is being asked at another port."""
        if self._probe is None:
            return False
        return self.unreachable_since is None

    @property
    def is_silent(self) -> bool:
        """Whether it is unreachable, and no message has arrived from it since."""
        if self.unreachable_since is None:
            return False
        return not self._has_spoken

    def unreachable_for(self, now: float) -> str:
        """`"40 s"`; empty: it is reachable."""
        if self.unreachable_since is None:
            return ""
        return f"{now - self.unreachable_since:.0f} s"

    def heartbeat(self) -> None:
        """Send a heartbeat, unless bytes wait that are as good a sign."""
        if self._unsent or self.is_closed or self.unreachable_since is not None:
            return
        self._expect_confirmation()
        self._unsent += self._plain or HEARTBEAT.sign(self._channel)
        self.flush()

    def send(self, message: object, rank: int = 0) -> None:
        self._expect_confirmation()
        super().send(message, rank)

    def _expect_confirmation(self) -> None:
        """From now on the peer's kernel has something to confirm."""
        if self.no_fault_before == 0.0:
            return
        self.no_fault_before = 0.0
        now = time.monotonic()
        self._looked = now
        self._confirmed = now

    def silence(self) -> tuple[float, bool]:
        """See `silence_of`."""
        return silence_of(self.socket)

    def is_unusually_silent(self) -> bool:
        """Whether the peer's host may just have died: a heartbeat is due, or an answer to ours."""
        if self.unreachable_since is not None:
            return False
        silence, is_confirmed = self.silence()
        if silence > BEATS * self._bound + 1:
            return True
        if is_confirmed:
            return False
        now = time.monotonic()
        was_asked = now < self._looked + _CONFIRMING
        return was_asked and now > self._confirmed + _CONFIRMING

    def fault(self, now: float) -> Finding | None:
        """What is wrong with the peer, if that is known.

        To be called after reading, if nothing has arrived: once a second, or at `no_fault_before`.
        """
        self.no_fault_before = 0.0
        silence = self._silence_until(now)
        if silence < self._patience:
            self._forget_probe()
            is_fresh = now - self.heard <= self._frozen_after
            if is_fresh and self.unreachable_since is None:
                self._look_later(now, silence)
                return None
            return self._frozen(now)
        if self._probe is None:
            self.heartbeat()  # which its kernel confirms, if it is there
            end = now + self._probe_limit(silence)
            self._probe = Probe(self.socket, end)
        is_answered = self._probe.is_answered()
        if now < self._probe.end:
            return None
        self._forget_probe()
        if is_answered:
            return self._cut(now, silence)
        why = f"no answer for {self._bound:g} s: the host, or the network to it, is down"
        return Finding(LOST, why)

    def _look_later(self, now: float, silence: float) -> None:
        """A silence grows by a second a second; bytes that are not confirmed are looked at sooner."""
        if self._confirmed != now:
            return
        patience_ends = now + self._patience - silence
        frozen_from = self.heard + self._frozen_after
        self.no_fault_before = min(patience_ends, frozen_from)

    def _silence_until(self, now: float) -> float:
        """Seconds without a sign of the peer's kernel, in one direction or the other."""
        silence, is_confirmed = self.silence()
        self._looked = now
        if not is_confirmed:
            return max(silence, now - self._confirmed)  # a network may fail in one direction
        self._confirmed = now
        if self._kept.messages:
            self._forget_confirmed()
        return silence

    def _probe_limit(self, silence: float) -> float:
        """Seconds for the host to answer; once a peer is unreachable there is no hurry."""
        left = self._bound
        if self.unreachable_since is None:
            left -= silence
        return max(left, _PROBE_LIMIT)

    def _cut(self, now: float, silence: float) -> Finding | None:
        """The host answers at another port, but nothing gets through on this connection."""
        if self.unreachable_since is not None:  # that was reported
            return None
        self.unreachable_since = now - silence
        self._has_spoken = False
        why = f"gave no answer for {self._bound:g} s, though its host answers (a firewall?)"
        return Finding(UNREACHABLE, why)

    def _frozen(self, now: float) -> Finding | None:
        """The peer's kernel answers, and no heartbeat has arrived."""
        if self.unreachable_since is not None:  # the time without heartbeats begins now
            seconds = self.unreachable_for(now)
            self.unreachable_since = None
            self.heard = now
            return Finding(REACHABLE, seconds)
        why = (
            f"no answer for {self._frozen_after:.0f} s, though the host answers: stopped or frozen"
        )
        return Finding(LOST, why)

    def end(self) -> None:
        super().end()
        self._forget_probe()

    def resume(self, now: float) -> None:
        self.unreachable_since = None
        self.no_fault_before = 0.0
        self._looked = now
        self._confirmed = now
        super().resume(now)

    def close(self) -> None:
        super().close()
        self._forget_probe()

    def _forget_probe(self) -> None:
        """Discard an answer that is too old to count."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
