"""Whether a peer is still there, judged from what is known of it: no socket, no clock.

Three things can be wrong, and they are told apart, as only one of them ends a job:

1. The peer's *process* is stopped or frozen, although its host answers. It is lost if no heartbeat
   has arrived for `_FROZEN` times the bound.
2. The *host*, or the network to it, is down. Its kernel has given no sign for `_PATIENCE` times the
   bound: nothing arrived, and what was sent is not confirmed. Then the host is *suspect*, and is
   asked at another port, at which nothing listens: a host that is there refuses at once. No answer
   within the bound: it is lost.
3. The host answers at the other port, but nothing gets through on this connection (a firewall, a
   table of connections that has dropped it). The peer is *unreachable*. Nothing ends: the caller
   goes on without it, and is told when it is reachable again.

A fault that is not a loss is reported once, until the peer has been reachable in between.

A launcher that sees a host die sends SIGTERM to all other ranks, long before a heartbeat is missed.
So a SIGTERM is a *question*: each peer that is unusually silent at that moment has a tenth of a
second to show that its host is there.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

BOUND = 15.0  # seconds; DISTBOOT_HEARTBEAT_TIMEOUT of rank 0's agent is that of the job
# Of the bound:
BEATS = 0.5  # between two heartbeats
BEATS_OF_RANK_0 = 1.2  # between two of rank 0
_PATIENCE = 0.75  # without any sign of the peer's kernel, until another port of its host is tried
# Without a heartbeat, also if rank 0 was stopped for as long as it may be just before one was due
_FROZEN = 2.3
_CONFIRMING = 2.0  # seconds; a network takes milliseconds, and peers are polled once a second
_ASKING = 0.9  # seconds for the host to answer at the other port, at least
# The same after a SIGTERM: mpirun kills a rank 0.24 s later
_QUESTION = 0.1


# What a peer is found to be
LOST = "lost"
SILENT = "silent"  # lost, as far as a question can tell
UNREACHABLE = "unreachable"  # only the connection to it is lost
REACHABLE = "reachable"  # again


class Finding(NamedTuple):
    """What is new about a peer."""

    kind: str
    text: str  # why, to follow "rank 3"; of one that is reachable again for how long it was not


class Signs(NamedTuple):
    """What is known of a peer at one moment."""

    heard: float  # when something of the peer was read last
    silence: float  # seconds without a sign of its kernel
    is_confirmed: bool = True  # whether its kernel has confirmed all that was sent to it
    received: int = 0  # messages, ever
    host_answers: bool = False  # at the other port


class Liveness:
    """What has been found out about one peer. All times are those of one monotonic clock, in seconds.

    Args:
        bound: as `BOUND`.
        now: when the connection to the peer was opened.
    """

    def __init__(self, bound: float, now: float) -> None:
        # Since when the peer has given no sign although its host answers; None: it is reachable
        self.unreachable_since: float | None = None
        # Until when the host has to answer at the other port; inf: it is not asked
        self.asked_until = inf
        self.is_question = False  # whether it is asked because of a SIGTERM
        # Until then nothing can be wrong, if nothing is sent and the peer is not unreachable
        self.no_fault_before = 0.0
        self.woken_at = -inf  # when this process itself went on after it was stopped
        self._bound = bound
        self._patience = _PATIENCE * bound
        self._frozen_after = _FROZEN * bound
        self._received_when_cut = -1  # messages; -1: it is reachable
        self._reachable_since = now
        self._looked = now  # when the kernel was asked last
        self._confirmed = now  # when the peer's kernel had confirmed all that was sent

    @property
    def is_asked(self) -> bool:
        """Whether the answer of the host at the other port is needed."""
        return self.asked_until < inf

    @property
    def is_suspect(self) -> bool:
        """The same, and the answer can end the job."""
        return self.is_asked and self.unreachable_since is None

    def unreachable_for(self, now: float) -> str:
        """`"40 s"`; empty: it is reachable."""
        if self.unreachable_since is None:
            return ""
        return f"{now - self.unreachable_since:.0f} s"

    def is_silent(self, received: int) -> bool:
        """Whether it is unreachable, and no message has arrived from it since."""
        return received == self._received_when_cut

    def expect_confirmation(self, now: float) -> None:
        """Something is sent, which the peer's kernel has to confirm."""
        if self.no_fault_before == 0.0:
            return
        self.no_fault_before = 0.0
        self._looked = now
        self._confirmed = now

    def trust(self) -> None:
        """Ask no more: something has arrived from the peer, or its connection has ended."""
        self.asked_until = inf
        self.is_question = False

    def resume(self, now: float) -> None:
        """The peer goes on over another connection."""
        self.trust()
        self.unreachable_since = None
        self._received_when_cut = -1
        self.no_fault_before = 0.0
        self._looked = now
        self._confirmed = now

    def is_unusually_silent(self, signs: Signs, now: float) -> bool:
        """Whether the peer's host may just have died: a heartbeat is due, or an answer to ours."""
        if self.unreachable_since is not None:
            return False
        # While this process was stopped, it sent nothing that a kernel could confirm
        silence = min(signs.silence, now - self.woken_at)
        if silence > BEATS * self._bound + 1:
            return True
        if signs.is_confirmed:
            return False
        was_asked = now < self._looked + _CONFIRMING
        return was_asked and now > self._confirmed + _CONFIRMING

    def question(self, signs: Signs, now: float) -> bool:
        """A SIGTERM has arrived here: has the peer's host just died? Returns whether it is asked anew."""
        if self.is_question or not self.is_unusually_silent(signs, now):
            return False
        self.asked_until = now + _QUESTION
        self.is_question = True
        return True

    def observe(self, signs: Signs, now: float) -> Finding | None:
        """What is wrong with the peer, if that is known.

        To be called after reading, if nothing has arrived: once a second, or at `no_fault_before`.
        """
        if self.is_question:
            return self._judge_answer(signs, now)
        self.no_fault_before = 0.0
        silence = self._silence(signs, now)
        if silence < self._patience:
            self.asked_until = inf
            return self._judge_process(signs, silence, now)
        if not self.is_asked:
            self.asked_until = now + self._time_to_answer(silence)
        if now < self.asked_until:
            return None
        self.asked_until = inf
        if signs.host_answers:
            return self._cut(signs, silence, now)
        why = f"no answer for {self._bound:g} s: the host, or the network to it, is down"
        return Finding(LOST, why)

    def _judge_answer(self, signs: Signs, now: float) -> Finding | None:
        """Once the time for the answer to a question is over."""
        if now < self.asked_until:
            return None
        self.trust()
        if signs.host_answers or not self.is_unusually_silent(signs, now):
            return None
        return Finding(SILENT, "it did not answer any more when SIGTERM arrived")

    def _silence(self, signs: Signs, now: float) -> float:
        """Seconds without a sign of the peer's kernel, in one direction or the other."""
        self._looked = now
        if signs.is_confirmed:
            self._confirmed = now
            return signs.silence
        # A network may fail in one direction
        return max(signs.silence, now - self._confirmed)

    def _time_to_answer(self, silence: float) -> float:
        """Seconds for the host to answer; once a peer is unreachable there is no hurry."""
        left = self._bound
        if self.unreachable_since is None:
            left -= silence
        return max(left, _ASKING)

    def _judge_process(self, signs: Signs, silence: float, now: float) -> Finding | None:
        """The peer's kernel has given a sign: is its process there?"""
        if self.unreachable_since is not None:
            seconds = self.unreachable_for(now)
            self.unreachable_since = None
            self._received_when_cut = -1
            self._reachable_since = now
            return Finding(REACHABLE, seconds)
        # A heartbeat could not arrive while the peer was unreachable
        frozen_from = max(signs.heard, self._reachable_since) + self._frozen_after
        if now <= frozen_from:
            if signs.is_confirmed:  # else it is looked at sooner
                patience_ends = now + self._patience - silence
                self.no_fault_before = min(patience_ends, frozen_from)
            return None
        why = (
            f"no answer for {self._frozen_after:.0f} s, though the host answers: stopped or frozen"
        )
        return Finding(LOST, why)

    def _cut(self, signs: Signs, silence: float, now: float) -> Finding | None:
        """The host answers at another port, but nothing gets through on this connection."""
        if self.unreachable_since is not None:  # that was reported
            return None
        self.unreachable_since = now - silence
        self._received_when_cut = signs.received
        why = f"gave no answer for {self._bound:g} s, though its host answers (a firewall?)"
        return Finding(UNREACHABLE, why)
