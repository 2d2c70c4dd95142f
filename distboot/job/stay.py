"""When an agent may exit, once its own ranks have ended: two tables, of which the first row that holds counts.

An agent stays for the others, as its exit tells a launcher that its ranks have ended: the launcher
has to see first the exit code of the rank that failed first, and a wrapper ends with the exit code
of the job. `mpirun` kills all ranks that are left when one ends with another code than 0. After an
external signal they may still save a checkpoint, so a wrapper with such a code stays for them, too.
`inf` is until something happens.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter

from ..base.table import first_that_holds
from .exit_status import ExitStatus
from .facts import AFTER_THE_FIRST, LAUNCHER_LOOKS, Facts
from .rank_0_link import Rank0Link
from .root_cause import RootCause

_LINGER = 5.0  # seconds after rank 0 has ended well, for the others to end, too
_RANK_0_TELLS = 2.0  # seconds beyond the grace for ranks that were told to stop
_IS_TOLD = 3.0  # seconds beyond the grace for rank 0 to let another agent end
_CAUSE_TIMEOUT = 1.0  # seconds after our end to be told why
_EXPLANATION_TIMEOUT = 11.0  # seconds, where a peer that is about to end may be the cause
_is_reachable = attrgetter("is_reachable")
_has_succeeded = attrgetter("has_succeeded")
_end = attrgetter("end")


def of_rank_0(facts: Facts) -> float:
    """Until when rank 0's agent stays for the others."""
    ended = facts.ends.ended_at
    concluded = facts.ends.concluded_at
    cause = facts.cause
    is_open = cause is None
    is_failure = cause is not None and cause.is_failure
    is_alone = not any(map(_is_reachable, facts.members.values()))
    # Later than that where the rank that failed first ends slowly
    stops_at = max(concluded, facts.ends.release_at - LAUNCHER_LOOKS)
    told_all = stops_at + facts.settings.grace + _RANK_0_TELLS
    # After a signal rank 0 may save a checkpoint first, and another rank a little longer
    lingers = min(ended + _LINGER, told_all)
    return first_that_holds(
        (not facts.detects, ended),
        (is_open and bool(facts.reports), inf),  # it is being decided
        (is_open and is_alone, ended),
        (is_alone, _seen_at(facts)),
        (is_open and facts.may_restart, inf),
        (is_open, ended + _LINGER),
        (is_failure or facts.holds_failed_end, max(told_all, ended)),
        (True, max(lingers, concluded + _LINGER, ended)),
    )


def of_others(facts: Facts, link: Rank0Link) -> float:
    """Until when any other agent stays for the answer of rank 0."""
    # Rank 0 has to receive how our ranks ended
    return max(_of_cause(facts, link, facts.cause), link.returns_until)


def _of_cause(facts: Facts, link: Rank0Link, cause: RootCause | None) -> float:
    if cause is None:
        return _without_cause(facts, link)
    ended = facts.ends.ended_at
    return first_that_holds(
        # Rank 0 leaves once all ranks have ended, and until then another round may be called off
        (cause.restarts and link.is_cut_off, link.gone_at),
        (_is_done(facts) and not cause.restarts, ended),
        (not facts.is_held, max(_seen_at(facts), facts.ends.concluded_at)),
        (not link.is_cut_off, ended + facts.settings.grace + _IS_TOLD),
        (facts.has_own(cause.ranks), link.gone_at),
        (True, link.gone_at + AFTER_THE_FIRST),
    )


def _seen_at(facts: Facts) -> float:
    """When a launcher may see that our ranks have ended: after the one that failed first."""
    ended = facts.ends.ended_at
    if facts.is_held:
        return ended
    if not _is_secondary(facts):
        return ended
    return max(ended, facts.ends.release_at)


def _without_cause(facts: Facts, link: Rank0Link) -> float:
    ended = facts.ends.ended_at
    return first_that_holds(
        (link.is_cut_off, ended),
        (facts.may_restart, inf),  # where a rank fails later, all begin again
        (_is_done(facts), ended),
        (_is_secondary(facts), ended + _EXPLANATION_TIMEOUT),
        (True, ended + _CAUSE_TIMEOUT),
    )


def _is_done(facts: Facts) -> bool:
    """Whether nothing is to be heard of rank 0: all of ours ended well, or it does not say."""
    has_all_succeeded = all(map(_has_succeeded, facts.own))
    return has_all_succeeded or not facts.detects


def _is_secondary(facts: Facts) -> bool:
    """Whether one of our ranks has failed as a peer was gone."""
    ends = map(_end, facts.own)
    return any(map(_is_end_secondary, ends))


def _is_end_secondary(end: ExitStatus | None) -> bool:
    return end is not None and end.is_secondary
