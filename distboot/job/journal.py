"""The journal of a job: each event as a line of JSON, written when it happens. Pure.

    {"time": 1795692655.829, "rank": 3, "event": …, "details": {"host": "node-a", …}}

Rank 0's agent writes it (`agent/journal`). The summary, the page and the JSON report can be made
from it (`report/from_journal`), so a job whose agents are killed, too, has a report. A journal has
the events of the job (`rendezvous/events`), and those of `BESIDES`. Each round of the job begins
with `FIRST`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..base.dataclass import dataclass
from ..base.patterns import pattern
from ..rendezvous.events import Event, Kind
from ..rendezvous.membership import Membership
from ..rendezvous.messages import Detach, Members, RequestStop
from ..rendezvous.protocol import (
    decode,
    encode,
    integer,
    nested,
    number,
    of,
    optional,
    text,
    time_or_duration,
    valid,
)
from .messages import Exited, Exiting, Failing, Reads, Reaped, Terminating

SUFFIX = ".jsonl"
# What `met` leaves out of the members: values of a user's variables
_NOT_WRITTEN: dict[str, list[str]] = {"shared": []}
_agents = integer(1, 1 << 20)
# Also of one that a full disk has cut, or a crash of the host has left empty
_BEGINNING = pattern(
    r'\Z|\0|\{"?t?i?m?e?"?:? ?\Z|\{"time": (?:[^\n]*\Z|[^\n]*"rank": [^\n]*"event": )'
)
FIRST: Kind = "rendezvous_started"
HEARD: Kind = "heard"
# Messages from which the end of a job may follow, so that it can be found again from a journal.
# What others say is in events: of Register in `registered`.
DECISIVE = (
    Failing,
    Exiting,
    Terminating,
    Exited,
    Reaped,
    RequestStop,
    Reads,
    Detach,
)
# Events that only a journal has, with their details
BESIDES: dict[Kind, str] = {
    "met": "members, as all ranks get them; agents; separate_jobs, unused: doubts about the end",
    "heard": "message: of a rank, as its agent has sent it; the end of the job may follow from it",
    "start_failed": "text, code, hint; is_stop: whether a signal has stopped the start",
    "started": "failure detection is off: the rest is not known",
    "ended": "exit_code: of the job; null: no failure and no signal has ended it",
    "not_written": "count of events for which the file system was too slow",
}


class Round(NamedTuple):
    """One round of a job, as far as its journal goes."""

    events: list[Event]  # without those of `BESIDES`
    besides: dict[Kind, Event]  # without those that are in `heard`
    heard: list[Event]

    @property
    def last(self) -> float:
        """The time of its end, or else of the last event, in seconds since the epoch."""
        ended = self.besides.get("ended")
        if ended is not None:
            return ended.time
        return max(one.time for one in (*self.events, *self.besides.values(), *self.heard))

    @property
    def membership(self) -> Membership | None:
        """The membership; None: the ranks have not met.

        Raises:
            ProtocolError: the event `met` is damaged.
        """
        if "met" not in self.besides:
            return None
        details = self.besides["met"].details
        written = details["members"]
        if isinstance(written, dict):
            written = {**written, **_NOT_WRITTEN}
        data = json.dumps(written).encode()
        members: Members = decode(data, Members)
        agents = _agents(details["agents"])
        return Membership.from_message(members, agents)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line, as JSON."""

    time: float = of(time_or_duration)
    rank: int | None = of(optional(number))
    event: Any = of(text(100))
    details: dict[str, Any] = of(valid(lambda value: isinstance(value, dict), "table"))


_checked = nested(_Line)


class Journal(NamedTuple):
    """What a file of a journal holds."""

    rounds: list[Round]
    unreadable: int  # lines, such as the last one of a job that was killed


def is_journal(beginning: bytes) -> bool:
    """Whether a file with this beginning is a journal, or empty, so that it may be replaced."""
    text = beginning.decode(errors="replace")
    return _BEGINNING.match(text) is not None


def path_beside(report: str) -> str:
    """The journal for a report: `"job.jsonl"` for `"job.html"`, `"job.jsonl"` and `"job"`."""
    folder, slash, name = report.rpartition("/")
    stem, _, _ = name.rpartition(".")
    return f"{folder}{slash}{stem or name}{SUFFIX}"


def line_of(event: Event) -> str:
    """The line for an event, with its end."""
    return json.dumps(event._asdict(), default=list) + "\n"


def met(membership: Membership, **doubts: str) -> dict[str, Any]:
    """The details of the event `met`."""
    members = _content(membership.as_message())
    for name in _NOT_WRITTEN:
        del members[name]
    return {
        "members": members,
        "agents": len(membership.agents),
        **doubts,
    }


def _content(message: object) -> Any:
    """A message as it is sent, as part of a line."""
    return json.loads(encode(message))


def heard(message: object) -> dict[str, Any] | None:
    """The details of the event `heard`; None: nothing follows from this message."""
    if not isinstance(message, DECISIVE):
        return None
    return {"message": _content(message)}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a valid JSON number")


def read(lines: Iterable[str]) -> Journal:
    """The rounds of a job; a line that is damaged is left out and counted."""
    rounds: list[Round] = []
    unreadable = 0
    for line in lines:
        try:
            content = json.loads(line, parse_constant=_refuse_constant)
            found: Any = _checked(content)
        except (ValueError, RecursionError):
            unreadable += 1
            continue
        event = Event(
            found.time,
            found.rank,
            found.event,
            found.details,
        )
        if event.event == FIRST:
            rounds.append(Round([], {}, []))
        if not rounds:
            unreadable += 1
        elif event.event == HEARD:
            rounds[-1].heard.append(event)
        elif event.event in BESIDES:
            rounds[-1].besides[event.event] = event
        else:
            rounds[-1].events.append(event)
    return Journal(rounds, unreadable)
