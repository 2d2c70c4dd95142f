"""The summary: how a job ended, in one line for people; a pure function of its events and
membership.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

from ..base.patterns import pattern
from ..base.text import counted, ranks_said
from ..job.exit_status import LEAST_MISSED_OF_EXCEPTION, with_least, without_middle
from ..job.root_cause import BY_HANG_STOP, HELD_UP, LEAST_MISSED_OF_WAIT
from ..rendezvous.events import Event
from ..rendezvous.membership import Membership
from .content import (
    FAILED_LATER,
    Doubts,
    Rounds,
    date_of,
    restarts_text,
    rounds_before,
    size_of,
)
from .job_state import JobState

# Characters in a summary: of why a rank failed, at the least if it has more; and of why all
# earlier rounds ended
_LEAST_WHY = 57
_LEAST_WAIT = 90  # of a wait for which the job has ended: its places and its timeout
_LONGEST_ROUNDS = 90
_MOST_ROUNDS = 3
_LEAST_OF_MESSAGE = 12  # characters of an exception that are shown beside its place
_LEAST_WITH_END = 30  # characters of a text whose middle is left out, not its end
_HOST = pattern(r", on \S+(?: \(node \d+\))?(?=, in |$)")
# Which process of a host it was
_PLACE = pattern(r" \(node \d+, local rank \d+(?:, process \d+)?\)")
# A place outside of all functions, whose name says nothing
_AT_TOP_LEVEL = pattern(r"(?<=, in )<module> \((.+)\)\Z")
# What got the signal that ended a hang
_RECEIVER = pattern(
    r"; (?:the wrapper of \w+ \d+ got it|rank \d+ got it first|Ctrl-C, which ranks .+? got)(?= at )"
)
# Its process is not that of the rank, which the location names
_BY_WRAPPER = pattern(r"the wrapper of \w+ \d+ got it\Z")
# A wait for which the job has ended, up to its length; it names its hosts itself
_WAIT = pattern(
    rf"((?:ranks? [^():]+\(.+?\) {HELD_UP}|the ranks have waited for each other"
    r"|no rank has moved) for \d+ s)(?:, judging by the stacks)?(?=: )"
)
# What the timeout after a wait can do without: its headline has it
_NAME_OF_TIMEOUT = pattern(r" \(timeout= of init\)\Z")
_LONGEST_SUMMARY = 220  # characters
_LEAST_OF_SUMMARY = 100  # characters before the exit codes
_MOST_CODES = 6


def summary_line(
    events: Sequence[Event],
    membership: Membership,
    doubts: Doubts,
    now: float,
    exit_code: int | None = None,
    *,
    rounds: Rounds = (),
) -> str:
    """How the job ended, in one line for people.

    Args:
        events: of the last round.
        membership: of that round.
        doubts: whether a good end is to be doubted.
        now: when the job ends.
        exit_code: of the job; None: no failure and no signal has ended it.
        rounds: those that failed before.
    """
    job = JobState(events)
    codes = defaultdict(list)
    for rank in range(membership.world_size):
        codes[job.exit_code(rank)].append(rank)
    how, why, least_why = _how_it_ended(events, job, doubts, all_succeeded=codes.keys() == {"0"})
    later = ""
    count = job.later_failures()
    if count:
        later = f"; {counted(count, 'other rank')} {FAILED_LATER}"
    earlier = _earlier(rounds, membership.round)
    restarts = restarts_text(rounds, membership.round)
    seconds = now - _began(rounds, events[0].time)
    begin = f"summary: {size_of(membership)}, {seconds:.1f} s: "
    by_rank = _exit_codes(codes, exit_code, ranks_said)
    counted_codes = _exit_codes(codes, exit_code, lambda ranks: counted(len(ranks), "rank"))
    host_only = _PLACE.sub("", how)
    hang_only = _RECEIVER.sub("", host_only)
    # What is least missed is left out first: it has been printed, or is in the report
    forms = (
        (how, len(why), f"{later}{earlier}{by_rank}"),
        (host_only, least_why, f"{later}{earlier}{by_rank}"),
        (hang_only, least_why, f"{later}{earlier}{by_rank}"),
        (hang_only, least_why, f"{later}{restarts}{by_rank}"),
        (hang_only, least_why, f"{restarts}{by_rank}"),
        (hang_only, least_why, f"{restarts}{counted_codes}"),
    )
    for what, least, rest in forms:
        room = _LONGEST_SUMMARY - len(begin + what + rest)
        if room >= least:
            return begin + what + _brief(why, room) + rest
    words = f"{begin}{hang_only}{_brief(why, max(room, _LEAST_WHY))}{restarts}"
    return _cut(words, _LONGEST_SUMMARY - len(counted_codes)) + counted_codes


def _cut(text: str, most: int) -> str:
    """A text without its last words, so that none of them is half there."""
    if len(text) <= most:
        return text
    most = max(most, _LEAST_OF_SUMMARY)
    words, _, _ = text[: most - 1].rpartition(" ")  # the sign has two characters
    return f"{words.rstrip(',;:')} …"


def _exit_codes(
    codes: Mapping[str, Sequence[int]],
    of_job: int | None,
    said: Callable[[Sequence[int]], str],
) -> str:
    """The exit codes: `"; exit codes: 1 (job), 1 (rank 0), 143 (ranks 1-3)"`."""
    words = []
    if of_job is not None:
        words.append(f"{of_job} (job)")
    for code, ranks in codes.items():
        words.append(f"{code} ({said(ranks)})")
    if len(words) > _MOST_CODES:
        others = counted(len(words) - _MOST_CODES, "other")
        words[_MOST_CODES:] = [others]
    return f"; exit codes: {', '.join(words)}"


def _how_it_ended(
    events: Sequence[Event], job: JobState, doubts: Doubts, *, all_succeeded: bool
) -> tuple[str, str, int]:
    """What happened, and why: `": ValueError: …, in load (data.py:41)"`, or empty.

    The number is that of the characters which `why` needs at the least.
    """
    if job.root_cause is None:
        good_end = "no failure was seen"
        if all_succeeded:
            good_end = "all ended well"
        return doubts.describe(events, "all ended") or good_end, "", 0
    # The whole text was printed when it happened. This adds where and when that was.
    cause = job.root_cause.details
    at = f"{date_of(job.root_cause.time):%H:%M:%S} UTC"
    wait = _WAIT.match(cause["text"])
    if wait is not None:
        why = _without_host(cause["text"][wait.end() :])
        shortest = _shortened_wait(why, 0)
        return f"{wait[1]} until {at}", why, min(len(shortest), _LEAST_WAIT)
    # An agreed stop may have been asked for long before it ended the first rank
    first_words_end = ", on |(?<=^stopped as agreed): "
    if job.is_failure:
        first_words_end = ": | while |, on (?=[^;]+; then rank )"
    short = re.split(first_words_end, cause["text"], maxsplit=1)[0]
    why = _why(cause["text"].removeprefix(short))
    where = cause["location"]
    if _BY_WRAPPER.search(short):
        where = _PLACE.sub("", where)
    return f"{short} at {at}, {where}", why, min(len(why), _LEAST_WHY)


def _why(rest: str) -> str:
    """What follows the first words of a headline: `": ValueError: …, in load (data.py:41)"`."""
    if not rest.startswith(": "):
        return ""
    return _without_host(rest)


def _without_host(headline: str) -> str:
    return _HOST.sub("", headline).replace("uncaught exception: ", "")


def _brief(text: str, most: int) -> str:
    """A headline of at most so many characters; its place in the code and its end stay."""
    text = _shortened_wait(text, most)
    text = with_least(text, LEAST_MISSED_OF_EXCEPTION, most)
    if len(text) > most:
        text = _AT_TOP_LEVEL.sub(r"\1", text)
    if len(text) <= most:
        return text
    what, comma, place = text.rpartition(", in ")
    place = comma + place
    room = most - len(place)
    if not comma or room <= _LEAST_OF_MESSAGE:
        what = text
        place = ""
        room = most
    return without_middle(what, room, _LEAST_WITH_END) + place


def _shortened_wait(text: str, most: int) -> str:
    """The headline of a hang without what is least missed, if it is too long; any other as it is."""
    least_missed = (pattern(BY_HANG_STOP), *LEAST_MISSED_OF_WAIT, _NAME_OF_TIMEOUT)
    return with_least(text, least_missed, most)


def _earlier(rounds: Rounds, current: int) -> str:
    """Why each round before the current one ended.

    `" after 1 restart (round 0: rank 1 failed first: …)"`
    """
    earlier = rounds_before(rounds, current)
    if not earlier:
        return ""
    shown = earlier[-_MOST_ROUNDS:]
    most = _LONGEST_ROUNDS // len(shown)
    each = []
    for one in shown:
        text = _brief(_without_host(one["text"]), most)
        each.append(f"round {one['round']}: {text}")
    if len(shown) < len(earlier):
        each.insert(0, "…")
    restarts = counted(len(earlier), "restart")
    return f" after {restarts} ({'; '.join(each)})"


def _began(rounds: Rounds, of_last: float) -> float:
    """When the first round began, in seconds since the epoch."""
    starts: Iterable[float] = filter(None, map(itemgetter("start"), rounds))
    return min([of_last, *starts])
