"""The round before this one, as a rank that is missing in this one is described."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..base.text import escape_control, ranges
from .membership import EarlierAgent

_MOST_HOSTS = 8  # in one line
# The hint for missing ranks, when all agents have met before
COME_BACK = (
    "start the wrapper of what is missing again, with the same rank or node rank, on that host or"
    " another one; the others wait for DISTBOOT_JOIN_TIMEOUT, after the grace (DISTBOOT_GRACE)"
)


def describe_earlier(agents: Sequence[EarlierAgent], unit: str) -> str:
    """Where these were in the round before, a part for each host, as the end of a sentence.

    `"; ranks 2-3 on nodeb were lost at 15:13:02 and have not come back"`
    """
    by_host: dict[str, list[EarlierAgent]] = {}
    for agent in agents:
        there = by_host.setdefault(agent.host, [])
        there.append(agent)
    text = ""
    for host, there in list(by_host.items())[:_MOST_HOSTS]:
        text += _describe_host(host, there, unit)
    more = len(by_host) - _MOST_HOSTS
    if more > 0:
        text += f"; and those of {more} other hosts"
    return text


def _describe_host(host: str, agents: Sequence[EarlierAgent], unit: str) -> str:
    were = "was"
    have = "has"
    if len(agents) > 1:
        unit += "s"
        were = "were"
        have = "have"
    numbers = ranges([agent.number for agent in agents])
    lost_at = max(agent.lost_at for agent in agents)
    state = "there in the round before"
    if lost_at:
        when = time.strftime("%H:%M:%S", time.localtime(lost_at))
        state = f"lost at {when} and {have} not come back"
    return f"; {unit} {numbers} on {escape_control(host)} {were} {state}"
