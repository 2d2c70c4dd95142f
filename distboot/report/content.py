"""The report as plain JSON types: the beginning of the job, which is the same however it ended. All times are UTC."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from datetime import datetime, timezone

from .. import __version__
from ..ending import FROM_OUTSIDE
from ..errors import DistbootError, first_line
from ..roster import ranks_said
from .history import History
from .steps import STEPS, slowest

OwnSteps = Mapping[int, Mapping[str, float]]  # of each rank, by its own clock
_LONGEST = 4000  # characters of an error
_STOPS = {128 + number: number.name for number in FROM_OUTSIDE}
_MOST_MISSING = 10_000  # ranks that are missing and have a record each; of more there are only the runs


def utc(seconds: float) -> str:
    """A time as the report has it: `"2026-11-22T09:14:02.118+00:00"`."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def beginning(history: History, own: OwnSteps) -> dict[str, object]:
    """What there is to say of how the job began."""
    steps = {rank: _steps(history, rank, own.get(rank, {})) for rank in history.arrivals}
    return {
        "launcher": history.launcher,
        "versions": {"distboot": __version__, **(history.versions or {})},
        "findings": list(history.findings),
        "slowest": [
            {
                "step": one.phase.end,
                "rank": one.rank,
                "seconds": round(one.seconds, 3),
                "median": round(one.median, 3),
                "said": one.phase.said,
            }
            for one in slowest(steps)
        ],
    }


def of_rank(history: History, rank: int, own: Mapping[str, float]) -> dict[str, object]:
    """What there is to say of how one rank began."""
    clock = history.clock(rank)
    return {
        "steps": {name: utc(when) for name, when in _steps(history, rank, own).items()},
        "clock": {"ahead": round(clock.ahead, 6), "within": round(clock.within, 6)},
    }


def not_begun(history: History, own: OwnSteps, error: BaseException | None, now: float) -> dict[str, object]:
    """The report of a job whose lifeline has not begun: how it failed before, or, without an error, that it started."""
    runs = _missing(history)
    count = sum(map(len, runs))
    missing = [] if count > _MOST_MISSING else [rank for run in runs for rank in run]
    said = ranks_said(missing) if missing else f"{count} ranks"
    waited_for = f"{said} {'was' if count == 1 else 'were'} missing" if count else ""
    hosts = {one.node: one.host for _, one in sorted(history.arrivals.items(), reverse=True)}
    failed = isinstance(error, Exception)  # else somebody has stopped us, with Ctrl-C say
    cause = None if error is None else _cause(error, missing if count else list(history.unready))
    return {
        "outcome": "started" if error is None else "failed" if failed else "stopped",
        "headline": _headline(history, waited_for, error),
        "world_size": history.world_size,
        "hosts": [hosts[node] for node in sorted(hosts)],
        "start": utc(history.began),
        "end": utc(now),
        "first_failure": cause if failed else None,
        "stopped": None if failed else cause,
        "later_failures": 0,
        "unlisted": [[run[0], run[-1]] for run in runs if not missing],
        **beginning(history, own),
        "ranks": [_rank(history, rank, hosts, own.get(rank, {})) for rank in sorted([*history.arrivals, *missing])],
    }


def _missing(history: History) -> list[range]:
    """The ranks that are missing, of which there may be millions: a WORLD_SIZE is soon mistyped."""
    there = [*sorted(history.arrivals), history.world_size]
    return [range(before + 1, rank) for before, rank in zip([-1, *there], there, strict=False) if rank > before + 1]


def _steps(history: History, rank: int, own: Mapping[str, float]) -> dict[str, float]:
    """When a rank took which step, by rank 0's clock."""
    one = history.arrivals.get(rank)
    if one is None:
        return {}
    told = {"process_start": one.started, "detected": one.detected, **own}
    found = {name: when - one.clock.ahead for name, when in told.items() if when}
    found["joined"] = one.joined
    if history.met is not None:
        found["all_joined"] = history.met
    return {name: found[name] for name in STEPS if name in found}


def _headline(history: History, waited_for: str, error: BaseException | None) -> str:
    if error is None:
        return f"All {history.world_size} ranks have started; how they ended is not known, as they have no lifeline"
    if isinstance(error, Exception):
        return f"The job did not start: {_text(error).splitlines()[0]}"
    return f"The job was stopped {f'while {waited_for}' if waited_for else 'early'}"


def _cause(error: BaseException, ranks: list[int]) -> dict[str, object]:
    code, hint = (error.code, error.hint) if isinstance(error, DistbootError) else (None, "")
    return {"text": _text(error), "code": code, "hint": hint[:_LONGEST], "ranks": ranks, "rank": None, "traceback": ""}


def _text(error: BaseException) -> str:
    if isinstance(error, DistbootError):
        return error.message[:_LONGEST]
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "code", None)
    if isinstance(code, int) and code in _STOPS:
        return f"stopped by {_STOPS[code]} from outside"
    said = type(error).__name__
    return f"{said}: {first_line(error)}"[:_LONGEST] if str(error) else said


def _rank(history: History, rank: int, hosts: Mapping[int, str], own: Mapping[str, float]) -> dict[str, object]:
    one, here = history.arrivals.get(rank), history.ranks_a_node
    node, local_rank = (None, None) if here is None else divmod(rank, here)
    if one is not None:
        node, local_rank = one.node, one.local_rank
    return {
        "rank": rank,
        "host": None if node is None else hosts.get(node),
        "node_rank": node,
        "local_rank": local_rank,
        "pid": None if one is None else one.pid,
        "start": None,
        "end": None,
        "exit_code": None,
        "signal": None,
        "lost": False,
        "state": "missing" if one is None else "not ready" if rank in history.unready else "joined",
        **of_rank(history, rank, own),
    }
