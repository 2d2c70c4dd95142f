"""The state of a job as metrics, for Prometheus: how far it is, who is late, where its time went.

`Metrics` takes the events of the job as they happen, of all rounds. It does no io.

The text is that of OpenMetrics 1.0, with gauges alone, so that it means the same to the parser of
Prometheus's older format (node exporter's textfile collector): that names counters otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter

from ..base.text import cut, escape_control, ranges
from ..base.version import __version__
from ..job.journal import FIRST
from ..rendezvous.events import Event, ranks_per_node
from .job_state import JobState
from .spent import FAILURES, RoundTime, Spent

_MOST_LATE = 100  # ranks with a time of their own
_LONGEST = 200  # characters of a label
_PHASES = ("joining", "starting", "running", "failing", "ended", "stopped", "failed")
# State of a rank in the report -> its state here
_HOW_RANKS_END = {
    "ended": "ended",
    "stopped": "stopped",
    "failed first": "failed",
    "lost": "failed",
    "late": "failed",
    "failed later": "failed",
}
_HELP = {
    "distboot_job": "The job: its launcher, and the version of distboot on rank 0.",
    "distboot_phase": "1 for the phase in which the job is.",
    "distboot_ranks": "Number of ranks, by state.",
    "distboot_round": "Number of this round, from 0; each restart begins another.",
    "distboot_restarts": "Restarts of the ranks by distboot.",
    "distboot_spent_seconds": "Seconds of all rounds, by what they were spent on.",
    "distboot_late_ranks": "Ranks for which others wait now.",
    "distboot_late_seconds": "Seconds for which others have waited for a rank.",
    "distboot_stop_requests": "How often a rank was asked to stop.",
    "distboot_first_failure": "The first failure of the last round that failed.",
    "distboot_updated_timestamp_seconds": "When this file was written, in seconds since 1970.",
}
Labels = Mapping[str, object]


class Metrics:
    """What the events so far say."""

    def __init__(self) -> None:
        self._launcher = ""
        self._phase = _PHASES[0]
        self._round = 0
        self._before = Spent()  # of the rounds before this one
        self._stops = 0
        self._failure: dict[str, object] = {}  # labels of the first one
        # Of intervals that are over, by rank
        self._late_seconds: defaultdict[int, float] = defaultdict(float)
        self._handlers: dict[str, Callable[[Event], None]] = {
            "rendezvous_started": self._round_started,
            "joined": self._rank_joined,
            "left": self._rank_left,
            "all_joined": self._all_joined,
            "met": self._met,
            "registered": self._registered,
            "late": self._ranks_late,
            "late_over": self._late_over,
            "stop_requested": self._stop_requested,
            "failing": self._rank_ends,
            "unreachable": self._rank_ends,
            "reachable": self._rank_ends,
            "exited": self._rank_ends,
            "root_cause": self._concluded,
            "start_failed": self._start_failed,
            "ended": self._ended,
        }
        self._reset()

    def take(self, event: Event) -> None:
        """Take the next event."""
        if event.event == FIRST:
            self._next_round(event.time)
        self._time.take(event)
        handler = self._handlers.get(event.event)
        if handler is not None:
            handler(event)

    def text(self, now: float) -> str:
        """All metrics; `now` in seconds since the epoch."""
        lines: list[str] = []
        for name, rows in self._families(now).items():
            lines.append(f"# TYPE {name} gauge")
            lines.append(f"# HELP {name} {_HELP[name]}")
            for labels, value in rows:
                lines.append(f"{name}{_labels(labels)} {value:.15g}")
        return "\n".join([*lines, "# EOF", ""])

    def in_short(self) -> dict[str, str]:
        """The state in words, which change only when something happens; empty: all is well."""
        if self._phase == "ended":
            return {}
        size = self._time.world_size
        found = {
            "distboot_phase": self._phase,
            "distboot_joined": f"{len(self._joined)} of {size}",
        }
        missing = sorted(set(range(size)).difference(self._joined))
        texts = {
            "distboot_missing": ranges(missing),
            "distboot_late": ranges(sorted(self._late)),
            "distboot_restarts": str(self._round or ""),
            "distboot_first_failure": str(self._failure.get("text", "")),
        }
        for name, text in texts.items():
            if text:
                found[name] = escape_control(text)
        return found

    # A round

    def _next_round(self, now: float) -> None:
        """A round begins: nothing is known of it."""
        self._before = self._before.with_round(self._time, now)
        self._reset()

    def _reset(self) -> None:
        self._time = RoundTime()
        self._joined: set[int | None] = set()
        self._ranks_per_node = 0  # 0: each rank has joined for itself
        self._ends: list[Event] = []  # from which follows how each rank has ended
        self._is_stopped = False  # by a signal from outside, and not by a failure
        self._ended_at = 0.0  # of all ranks; 0.0: not yet
        self._late: dict[int, float] = {}  # rank -> since when others wait for it

    def _round_started(self, event: Event) -> None:
        self._phase = "joining"
        self._launcher = event.details["launcher"]
        self._round = event.details["round"]
        self._ranks_per_node = ranks_per_node(event)

    def _rank_joined(self, event: Event) -> None:
        self._joined |= self._ranks_of(event)

    def _rank_left(self, event: Event) -> None:
        self._joined -= self._ranks_of(event)

    def _ranks_of(self, joined_or_left: Event) -> set[int | None]:
        """The ranks of an agent; of that of a node, if each node has as many as that of rank 0."""
        agent = joined_or_left.rank
        count = self._ranks_per_node
        if agent is None or not count:
            return {agent}
        return set(range(agent * count, (agent + 1) * count))

    def _all_joined(self, _event: Event) -> None:
        self._phase = "starting"

    def _met(self, event: Event) -> None:
        """All ranks are known; with --nproc-per-node the agents of nodes have joined before."""
        ranks: set[int | None] = set()
        for runs in event.details["members"]["nodes"]:
            for first, count in runs:
                ranks.update(range(first, first + count))
        self._time.world_size = len(ranks)
        self._joined = ranks

    def _registered(self, _event: Event) -> None:
        if self._time.is_running:
            self._phase = "running"

    def _stop_requested(self, _event: Event) -> None:
        self._stops += 1

    def _rank_ends(self, event: Event) -> None:
        self._ends.append(event)

    # Late ranks

    def _ranks_late(self, event: Event) -> None:
        since = event.time - event.details["seconds"]
        ranks = event.details["ranks"][:_MOST_LATE]
        for rank in self._late.keys() - set(ranks):  # others still wait, but not for this one
            self._caught_up(rank, event.time)
        for rank in ranks:
            self._late.setdefault(rank, since)

    def _caught_up(self, rank: int, now: float) -> None:
        self._late_seconds[rank] += now - self._late.pop(rank)

    def _late_over(self, event: Event) -> None:
        for rank in list(self._late):
            self._caught_up(rank, event.time)

    # The end

    def _concluded(self, event: Event) -> None:
        self._late_over(event)
        self._rank_ends(event)
        details = event.details
        if details["kind"] not in FAILURES:
            self._is_stopped = True
            return
        self._phase = "failing"
        self._failure = {
            "kind": details["kind"],
            "rank": event.rank,
            "where": details["location"],
            "text": details["text"],
        }

    def _start_failed(self, event: Event) -> None:
        details = event.details
        if details["is_stop"]:
            self._phase = "stopped"
            return
        self._phase = "failed"
        text, _, _ = details["text"].partition("\n")
        if details["code"] is not None:
            text = f"error[{details['code']}]: {text}"
        self._failure = {"kind": "start", "text": text}

    def _ended(self, event: Event) -> None:
        self._late_over(event)
        self._ended_at = event.time
        self._phase = "ended"
        if self._is_stopped:
            self._phase = "stopped"
        elif event.details["exit_code"]:
            self._phase = "failed"

    # The text

    def _families(self, now: float) -> dict[str, list[tuple[Labels, float]]]:
        job = {"launcher": self._launcher, "version": __version__}
        phases = [({"phase": phase}, float(phase == self._phase)) for phase in _PHASES]
        spent = self._before.with_round(self._time, self._ended_at or now)
        found: dict[str, list[tuple[Labels, float]]] = {
            "distboot_job": [(job, 1.0)],
            "distboot_phase": list(phases),
            "distboot_ranks": list(self._ranks()),
            "distboot_round": [({}, self._round)],
            "distboot_restarts": [({}, self._round)],
            "distboot_spent_seconds": [
                ({"on": name}, value) for name, value in spent.by_kind().items()
            ],
            "distboot_late_ranks": [({}, len(self._late))],
            "distboot_late_seconds": list(self._waited_for(now)),
            "distboot_stop_requests": [({}, self._stops)],
            "distboot_updated_timestamp_seconds": [({}, now)],
        }
        if self._failure:
            found["distboot_first_failure"] = [(self._failure, 1.0)]
        return found

    def _waited_for(self, now: float) -> Iterator[tuple[Labels, float]]:
        """The ranks for which others have waited longest."""
        seconds = dict(self._late_seconds)
        for rank, since in self._late.items():
            seconds[rank] = seconds.get(rank, 0.0) + now - since
        longest = sorted(seconds.items(), key=itemgetter(1), reverse=True)
        for rank, value in longest[:_MOST_LATE]:
            yield {"rank": rank}, value

    def _ranks(self) -> Iterator[tuple[Labels, float]]:
        by_end = self._ranks_by_end()
        numbers = {
            "expected": self._time.world_size,
            "joined": len(self._joined),
            "missing": self._time.world_size - len(self._joined),
            "ended": by_end["ended"],
            "stopped": by_end["stopped"],
            "failed": by_end["failed"],
        }
        for state, number in numbers.items():
            yield {"state": state}, float(number)

    def _ranks_by_end(self) -> Counter[str]:
        """How many ranks have ended, and how, as in the report."""
        job = JobState(self._ends)
        ranks = set(job.exited)
        if job.root_cause is not None:  # before it, an external signal may explain a failure
            ranks |= job.failed
            ranks.update(job.root_cause.details["ranks"])
        found: Counter[str] = Counter()
        for rank in ranks:
            how = _HOW_RANKS_END.get(job.of_rank(rank), "")
            if not how and rank in job.failed:  # it cannot report its exit code any more
                how = "failed"
            found[how] += 1
        return found


def _labels(labels: Labels) -> str:
    """`{rank="3",text="…"}`; empty without any."""
    if not labels:
        return ""
    words = []
    for name, value in labels.items():
        text = escape_control(cut(str(value), _LONGEST))
        quoted = text.replace("\\", r"\\").replace('"', r"\"")
        words.append(f'{name}="{quoted}"')
    return f"{{{','.join(words)}}}"
