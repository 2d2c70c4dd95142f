"""What ends a job: the first failure of a rank, or a signal from outside.

`RootCause` is sent to all ranks, which print the same. The functions `from_…` write its text: a
headline of at most `LONGEST_HEADLINE` characters, and below it the lines of a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..base.dataclass import dataclass, replace
from ..base.patterns import pattern
from ..base.process import signal_name
from ..base.text import escape_control, ranks_said
from ..rendezvous.messages import escape_lines
from ..rendezvous.protocol import (
    both,
    flag,
    integer,
    number,
    of,
    optional,
    several,
    text,
    time_or_duration,
    valid,
)
from .exit_status import (
    BLOCK_FAILED,
    LONGEST_HEADLINE,
    STOPPED,
    ExitStatus,
    fitting,
    shown,
    without_middle,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.membership import Membership

# Seconds for a Python that is about to end to do so, when other ranks have lost it already
_LEAVING = 10.0
_FINISHING = 5.0  # seconds for the rank that failed first to end by itself, with its own exit code
# Seconds for a rank to end by the key of a terminal that has reached it, too: a busy host is slow
_OWN_END = 2.0
_OF_KEYS = (2, 3)  # SIGINT and SIGQUIT
_FOLLOWING = 0.6  # seconds for another one that fails, too
# Characters of an exception in a headline: where the name of the host and the place leave room ...
_ENOUGH = 70
_LEAST = 40  # ... and in any case
# Characters of these where there is no room for all
_SHORT_HOST = 26
_SHORT_PLACE = 32
# Gloo's unbound_buffer.cc: "Timed out waiting 8000ms for recv operation to complete"; NCCL's
# watchdog: "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, …,
# Timeout(ms)=8000) ran for …"
_TIMEOUT = pattern(
    r"Timed out waiting (\d+) ?ms|collective operation timeout: .*?Timeout\(ms\)=(\d+)"
)
# See `KeyTexts.ranks_missing` and `not_opened`
_WAITED_AT = pattern(
    r"(barrier\(\)|(?:local_)?main_first\(\)): .* (?:arrived|its block) within (\d[\d.e+]*) s"
)
# The same, and `leader_gone` and `ranks_gone`
_NAMES_PEER = pattern(
    r"main_first\(\).*: .* its block within \d|barrier\(\): .* arrived within \d"
    r"|\): ranks? .+ ended, or closed its context, without "
)
# What a description of a wait can do without; the first goes first
LEAST_MISSED_OF_WAIT = (
    pattern(", judging by the stacks"),
    pattern(r", collective operation [\d,]+, ranks? [^;:]+ ha(?:s|ve) begun (?:at least )?[\d,]+"),
    pattern(r" (?:it is|waits?|is|are)(?= in \S+ \([^()]+:\d+\))"),  # before a place
)
# The end of the description of a wait for which the job ends
BY_HANG_STOP = ", and DISTBOOT_HANG=stop ends all ranks"
# What late ranks have done, in the headline
HELD_UP = "held up the job"
_FAILED_FIRST = "failed first"
_OWN_ERROR = "distboot.DistbootError: "
_delay = both(time_or_duration, valid(lambda seconds: seconds <= 10.0, "delay"))
_LONGEST_TEXT = 16384  # characters
_LONGEST_REST = _LONGEST_TEXT - LONGEST_HEADLINE - 40  # and how many lines more there were


@dataclass(slots=True, eq=False)
class RankState:
    """What an agent knows of one rank: where it is, and what has become of it."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    pid: int = 0  # 0: it is not watched yet
    log: str = ""  # where its agent prints, see `WorkerInfo`
    # To its agent; None: that is this process, or it is not watched any more
    connection: Any = None  # a HeartbeatConnection, which this folder does not know
    failing: ExitStatus | None = None  # how it fails, before it has ended
    exiting: float | None = None  # since when it is about to end, by `time.monotonic`
    end: ExitStatus | None = None  # how it has ended
    is_reaped: bool = False  # whether its launcher has seen its exit code
    is_watched: bool = True  # whether all are to be told of its failure
    is_local: bool = True  # whether it is a rank of this agent
    was_left: bool = False  # whether a signal came to it while its launcher was ending
    lost_at: float = 0.0  # seconds since the epoch; 0: it was not lost

    @property
    def where(self) -> str:
        """`"on node-a (node 1, local rank 0, process 4711)"`."""
        place = f"node {self.node_rank}, local rank {self.local_rank}"
        if self.pid:
            place += f", process {self.pid}"
        return f"{self.host_said} ({place})"

    @property
    def host_said(self) -> str:
        return f"on {escape_control(self.host)}"

    @property
    def place_of_log(self) -> tuple[int, str]:
        """What is the same for all ranks whose agents print to the same place."""
        return self.node_rank, self.log

    @property
    def is_open(self) -> bool:
        """Whether it has not ended yet, and its end will be reported."""
        is_reported = self.is_local or self.connection is not None
        return is_reported and self.end is None

    @property
    def is_reachable(self) -> bool:
        """The same, and its agent can be reached now."""
        if self.connection is not None and self.connection.is_silent:
            return False
        return self.is_open

    @property
    def has_succeeded(self) -> bool:
        return self.end is not None and self.end.succeeded

    @property
    def was_terminated(self) -> bool:
        """Whether a signal from outside has ended it."""
        if self.end is None or self.end.stopped_by_us:
            return False
        return self.end.terminated_by is not None

    def can_be_located(self, now: float) -> bool:
        """Whether it runs; one that ends without a failure is left alone, as long as that may take."""
        runs = (self.is_open, self.pid > 0, not self._is_leaving(now))
        return all(runs)

    def may_explain(self, now: float) -> bool:
        """Whether it is about to end, and its exit code is not known yet."""
        return self.is_reachable and self._is_leaving(now)

    def _is_leaving(self, now: float) -> bool:
        if self.exiting is None or self.failing is not None:
            return False
        return now < self.exiting + _LEAVING


def ranks_of(membership: Membership) -> list[RankState]:
    """All ranks of a job."""
    members = []
    for node, ranks in enumerate(membership.nodes):
        host = membership.hosts[node]
        for local_rank, rank in enumerate(ranks):
            member = RankState(rank, host, node, local_rank)
            members.append(member)
    members.sort(key=lambda member: member.rank)
    return members


def speakers_of(cause: RootCause, members: Mapping[int, RankState]) -> frozenset[int]:
    """The ranks whose agents print why all stop: for each log of each node the first that still runs.

    An agent that has printed it may have ended before another one of its node knows, so rank 0 says
    which one prints. Rank 0's agent itself always does, and so does the script of a rank that failed
    first.
    """
    running: dict[tuple[int, str], int] = {}
    others: dict[tuple[int, str], int] = {}
    for member in members.values():
        found = others
        if member.is_reachable and member.rank not in cause.ranks:
            found = running
        found.setdefault(member.place_of_log, member.rank)
    speakers = others | running
    speakers[members[0].place_of_log] = 0
    return frozenset(speakers.values())


@dataclass(frozen=True, slots=True)
class RootCause:
    """Why the job ends."""

    # The ranks that failed first, or were stopped first
    ranks: tuple[int, ...] = of(several(number))
    is_failure: bool = of(flag)  # else an external signal, or an agreed stop, has ended the job
    # The headline, which all ranks print, and the lines of a traceback
    text: str = of(text(_LONGEST_TEXT))
    # Seconds before the others stop, so that their launcher sees it first
    delay: float = of(_delay, default=0.0)
    exit_code: int = of(integer(1, 255), default=STOPPED)  # of the job
    restarts: bool = of(flag, default=False)  # whether another round follows
    # The rank that failed because of `ranks`, or of a wait for others that waited, too: its exit code
    # is the first to be seen
    then: int | None = of(optional(number), default=None)

    @property
    def headline(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def external_signal(self) -> int | None:
        """The signal that has stopped the job; None: a failure has."""
        if self.is_failure:
            return None
        return self.exit_code - 128

    @property
    def failed(self) -> int:
        """The rank whose failure ends the job."""
        if self.then is not None:
            return self.then
        return self.ranks[0]

    def until_stop(self, member: RankState, *, shares_keys: bool) -> float:
        """Seconds until a rank has to stop for it; it may be about to end by itself.

        `shares_keys`: the keys of the terminal of its agent reach it, too.
        """
        is_of_key = self.external_signal in _OF_KEYS
        own_end = 0.0
        if shares_keys and is_of_key:
            own_end = _OWN_END
        return self._until_stop(member) + own_end

    def _until_stop(self, member: RankState) -> float:
        is_first = self.is_first(member.rank)
        ends_by_itself = member.failing is not None and not member.failing.cause
        if not ends_by_itself:
            return 0.0 if is_first else self.delay
        if not is_first:
            return _FOLLOWING
        if self.then in (None, *self.ranks):
            return _FINISHING
        # Without a delay no launcher sees how it ends.
        return max(self.delay, _FOLLOWING)

    def is_first(self, rank: int) -> bool:
        """Whether the launcher is to see the exit code of a rank before all others."""
        if self.then is not None:
            return rank == self.then
        return rank in self.ranks

    def exit_code_for(self, end: ExitStatus) -> int:
        """The exit code for the process of a rank that has ended so; 0: its own.

        A job has one exit code.

        | the job ends for   | a rank                              | exit code        |
        |--------------------|-------------------------------------|------------------|
        | a failure          | that ended well, and was not asked  | 0                |
        |                    | of any other end                    | that of the job  |
        | an external signal | that ended by itself                | its own          |
        |                    | that was killed, or missed a peer   | that of the job  |
        """
        if self.is_failure:
            keeps_own = end.succeeded and end.external_signal is None
        else:
            keeps_own = end.signal is None and not end.is_secondary
        if keeps_own:
            return 0
        return self.exit_code

    def escaped(self) -> RootCause:
        """The same without control characters: another process has sent it."""
        return replace(self, text=escape_lines(self.text))


class Circumstances(NamedTuple):
    """What else counts for whether another round follows a root cause."""

    is_asked: bool  # whether the job was asked to stop
    is_orphaned: bool  # whether the launcher's process above rank 0 is gone
    # Whether the node of its rank has failed the check before the round: then the place shows no bug
    is_unfit: bool


# Why a rank failed, by whether it had waited for too long
_OF_PEER = {
    False: ", because a peer disconnected",
    True: ", because a peer did not answer in time",
}


def from_exit(
    member: RankState, end: ExitStatus, delay: float, failed: str = _FAILED_FIRST
) -> RootCause:
    """A rank ended in failure."""
    because = _because_of_peer(end, failed)
    begin = f"rank {member.rank} {failed}{because}"
    headline = _headline(f"{begin}: ", end.failure_text, member, end.place)
    return RootCause(
        ranks=(member.rank,),
        is_failure=True,
        text=headline + _rest(end.excerpt()),
        delay=delay,
        exit_code=end.code_of_job,
    )


def _because_of_peer(end: ExitStatus, failed: str) -> str:
    """`", because a peer disconnected"`; empty where no peer did, or where the headline names it."""
    if not end.is_of_peer:
        return ""
    if end.has_missed_init:  # who never came there has disconnected from nobody
        return ""
    if failed == _FAILED_FIRST:
        text = end.failure_text(_LONGEST_TEXT)
        names_peer = _NAMES_PEER.search(text) is not None
        # A peer may have disconnected from the leader of a block, but none has from this rank
        is_of_block = BLOCK_FAILED.search(f"{text}\n{end.traceback}") is not None
        if names_peer or is_of_block:
            return ""
    return _OF_PEER[end.has_waited]


def from_hidden(member: RankState, end: ExitStatus) -> str:
    """A rank ended with exit code 0, and an exception of a Python below it, for example of a shell."""
    begin = "exit code 0, although Python below it failed: "
    return _headline(begin, end.failure_text, member, end.place)


def from_early_end(
    done: Sequence[RankState], others: int, then: RootCause, *, has_started: bool
) -> RootCause:
    """Ranks had ended well when one of the others failed, as a peer had disconnected.

    `has_started`: whether the framework had, for which all ranks have to call `init`.
    """
    ranks = tuple(member.rank for member in done)
    when = f"while {others} other ranks were still training"
    if others == 1:
        when = "while 1 other rank was still training"
    if not has_started:
        when = "before the framework could start"
    victim, _, _ = then.text.partition(": ")
    headline = f"{ranks_said(ranks)} exited with code 0 {when}, {done[0].host_said}; then {victim}"
    lines = then.text.removeprefix(then.headline)
    if _OWN_ERROR in lines:  # which says no more than the headline
        lines = ""
    (failed,) = then.ranks
    return replace(then, ranks=ranks, text=fitting(headline) + lines, then=failed)


def from_disconnect(gone: Sequence[RankState], why: str) -> RootCause:
    """Ranks of one node are unreachable, and have reported no failure."""
    first = gone[0]
    ranks = tuple(member.rank for member in gone)
    headline = _headline(
        f"{ranks_said(ranks)} became unreachable first: ",
        lambda most: fitting(why, most),
        first,
        node=f" (node {first.node_rank})",
    )
    return RootCause(
        ranks=ranks,
        is_failure=True,
        text=headline,
    )


def from_check(rank: int, findings: Sequence[str], exit_code: int) -> RootCause:
    """A node has failed the check of all nodes; `findings` begin with the name of the host."""
    headline = fitting(f"the check before the start failed: {findings[0]}")
    return RootCause(
        ranks=(rank,),
        is_failure=True,
        text=headline + _rest(findings[1:]),
        exit_code=exit_code,
    )


def from_late(ranks: Sequence[int], text: str, stacks: Sequence[str] = ()) -> RootCause:
    """Others have waited in vain for ranks, as `text` describes."""
    headline = text
    rest = ""
    if len(text) > LONGEST_HEADLINE:
        who, end, others = text.partition(BY_HANG_STOP)
        held_up = _shortened_wait(who, LONGEST_HEADLINE - len(end))
        headline = held_up + end
        rest = others.removeprefix("; ")
        if held_up != who:
            rest = text
    return RootCause(
        ranks=tuple(ranks),
        is_failure=True,
        text=headline + _rest([rest, *stacks]),
    )


def from_late_failure(
    ranks: Sequence[int], text: str, failed: int, end: ExitStatus, delay: float
) -> RootCause:
    """A rank has failed of a timeout, as it waited for `ranks`, or as all waited for each other.

    In the second case `ranks` is the rank that failed itself.
    """
    held_up, _, rest = text.partition("; ")
    then = f"; then rank {failed} failed: "
    timeout = fitting(timeout_text(end), _ENOUGH)
    begin = _shortened_wait(held_up, LONGEST_HEADLINE - len(then) - len(timeout))
    if begin != held_up:
        rest = text
    headline = begin + then + timeout
    lines = _rest([rest, f"rank {failed}: {end.failure_text()}"])
    return RootCause(
        ranks=tuple(ranks),
        is_failure=True,
        text=headline + lines,
        delay=delay,
        exit_code=end.code_of_job,
        then=failed,
    )


def waited_at(end: ExitStatus) -> tuple[str, float]:
    """The call of ours in which a rank waited in vain, and for how many seconds: `("barrier()", 60.0)`.

    `("", 0.0)`: its exception does not tell.
    """
    if end.exception is None:
        return "", 0.0
    found = _WAITED_AT.search(end.exception.message)
    if found is None:
        return "", 0.0
    return found[1], float(found[2])


def timeout_text(end: ExitStatus) -> str:
    """Which timeout ended a rank.

    `"Timed out waiting 8000 ms (timeout= of init)"` for torch's,
    `"barrier() timed out after 8 s"` for ours, else the failure itself
    """
    call, seconds = waited_at(end)
    if call:
        return f"{call} timed out after {seconds:g} s"
    message = ""
    if end.exception is not None:
        message = end.exception.message
    found = _TIMEOUT.search(f"{message} {end.traceback}")
    if found is None:
        return end.failure_text()
    milliseconds = found[1] or found[2]
    return f"Timed out waiting {milliseconds} ms (timeout= of init)"


def from_signal(member: RankState, number: int, receiver: str = "", held_up: str = "") -> RootCause:
    """An external signal stopped a rank, and so the job.

    Args:
        member: the rank that reported it first.
        number: of the signal.
        receiver: what got the signal, if not the rank: `"the wrapper of rank 0 got it"`.
        held_up: `"rank 1 (vm) had held up the job for 600 s"`, or another wait, if one lasted.
    """
    got = receiver or f"rank {member.rank} got it first"
    got = f"{got}, {member.host_said}"
    text = f"stopped by an external {signal_name(number)}"
    if held_up:
        text += _after(held_up, got, LONGEST_HEADLINE - len(text))
    else:
        text += f": {got}"
    return RootCause(
        ranks=(member.rank,),
        is_failure=False,
        text=fitting(text),
        exit_code=128 + number,
    )


def from_agreed_stop(member: RankState, number: int, why: str) -> RootCause:
    """The ranks stop at one read of `ctx.preempted`, and one has ended with the code of a signal.

    Args:
        member: the rank that was asked to stop.
        number: of that signal, which no process has got.
        why: `"SIGUSR1"`, `"ctx.request_stop()"`.
    """
    request = request_text(member, why)
    return RootCause(
        ranks=(member.rank,),
        is_failure=False,
        text=fitting(f"stopped as agreed: {request}, {member.host_said}"),
        exit_code=128 + number,
    )


def request_text(member: RankState, why: str) -> str:
    """`"rank 2 was asked to stop (SIGUSR1)"`."""
    return f"rank {member.rank} was asked to stop ({why})"


def _after(held_up: str, got: str, room: int) -> str:
    """`" after rank 1 (vm) had held up the job for 600 s, in load (data.py:41); rank 0 got it …"`.

    Where the job hung is worth more than what got the signal.
    """
    wholes = [f" after {text}; {got}" for text in _forms_of_wait(held_up)]
    whole = _first_that_fits(wholes, room)
    if whole:
        return whole
    return _shortened_wait(f" after {held_up}", room)


def _shortened_wait(text: str, most: int) -> str:
    """The description of a wait, in at most so many characters; its places have file and line."""
    forms = _forms_of_wait(text)
    short = _first_that_fits(forms, most)
    if short:
        return short
    shortest = forms[-1]
    begin = shortest[: most - 2]
    whole_places, between, _ = begin.rpartition("), ")
    if between:
        return f"{whole_places}), …"
    return without_middle(shortest, most)


def _forms_of_wait(text: str) -> list[str]:
    """The description of a wait: whole, and without more and more of what it can do without."""
    forms = [text]
    for part in LEAST_MISSED_OF_WAIT:
        text = part.sub("", text)
        forms.append(text)
    return forms


def _first_that_fits(texts: Sequence[str], most: int) -> str:
    """The first text of at most so many characters; empty: none is that short."""
    fits = filter(lambda text: len(text) <= most, texts)
    return next(fits, "")


def _headline(
    begin: str,
    what: Callable[[int], str],  # gets the number of characters that it may have
    member: RankState,
    place: str = "",
    node: str = "",
) -> str:
    """One line: which rank, what happened, and where."""
    end = _where(member.host_said, place, node)
    if len(begin) + _ENOUGH + len(end) > LONGEST_HEADLINE:
        host = fitting(member.host_said, _SHORT_HOST)
        if len(place) > _SHORT_PLACE:  # its end has the file and the line
            place = "…" + place[1 - _SHORT_PLACE :]
        end = _where(host, place, node)
    begin = fitting(begin, LONGEST_HEADLINE - _LEAST - len(end))
    room = LONGEST_HEADLINE - len(begin) - len(end)
    return begin + what(room) + end


def _rest(texts: Sequence[str]) -> str:
    """The lines below a headline, as many as a message may carry."""
    lines = shown("\n".join(texts))
    if len(lines) <= _LONGEST_REST:
        return lines
    kept, _, _ = lines[:_LONGEST_REST].rpartition("\n")
    more = lines.count("\n") - kept.count("\n")
    return kept + shown(f"… {more} more lines")


def _where(host: str, place: str, node: str) -> str:
    where = f", {host}{node}"
    if place:
        where += f", in {place}"
    return where
