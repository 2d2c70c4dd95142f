"""The check of all nodes, between the roll call and the start, as a service of the job.

The first agent of each node looks at its node (`NodeSeen`), and waits for its neighbor
(`Probeable`). Rank 0 lets each node probe the next one, all at the same time (`Probe`): the links
are a ring. Then it compares all nodes and all links with the median (`node_findings`).

    look       until each node waits for its neighbor, or `_LOOK` seconds
    probe      until each link was probed twice
    again      only the links that are odd, for `_AGAIN` seconds: a busy host slows down a link, too
    over       when all of this is done and each node was seen, or `LIMIT` seconds after the start

Until the check is over no rank starts its
framework (`Keys.held`): that costs nothing while ranks still import theirs. A finding is a
warning; with DISTBOOT_CHECK=stop the job ends for it.

An agent whose own DISTBOOT_CHECK is `off` says that it has seen nothing, and cannot be probed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import filterfalse
from math import inf
from operator import attrgetter
from typing import Any

from ..base.dataclass import dataclass, field
from ..base.errors import CODES, DistbootError
from ..base.text import escape_control
from ..rendezvous.messages import READY
from .effects import Blame, Conclude, Record, Say, Send
from .facts import Facts
from .keys import Keys
from .messages import NodeSeen, Probe, Probeable, Probed
from .node_findings import (
    Finding,
    Link,
    odd_links,
    odd_nodes,
    why_none_works,
)
from .node_texts import describe_links, describe_node
from .odd_variables import odd_variables
from .root_cause import RankState, from_check
from .service import Emit, Service

_STOP = "stop"  # a value of DISTBOOT_CHECK
LIMIT = 3.0  # seconds for the whole check, at any size
_LOOK = 0.8  # seconds for all nodes to wait for their neighbors
_PROBES_OF_ALL = 2
_AGAIN = 2.0  # seconds from the start
_MOST_AGAIN = 8  # links that are probed again
_MOST_PRINTED = 20
_MOST_RECORDED = 2000  # nodes, the odd ones first
_HINT = (
    "start the job without that host (srun --exclude=HOST, or the hostfile of mpirun), or set "
    "DISTBOOT_CHECK=warn"
)
_NOT_IN_TIME = "its link probe timed out"


@dataclass(slots=True)
class _Node:
    """One node, as its first agent reports it."""

    number: int
    rank: int  # the first one there
    host: str
    seen: NodeSeen | None = None
    at: Probeable | None = None
    probes: list[Probed] = field(default_factory=list)  # of the link to the next node
    has_left: bool = False  # its agent, as its command has ended


_problem = attrgetter("problem")


class CheckService(Service):
    """Compares all nodes, and the links between them."""

    def __init__(
        self,
        facts: Facts,
        emit: Emit,
        keys: Keys,
        addresses: Mapping[int, str],  # of other nodes, by their first rank
    ) -> None:
        super().__init__(facts, emit)
        self._keys = keys
        self._addresses = addresses
        self._nodes = _nodes_of(facts.members)
        self._by_rank = {node.rank: node for node in self._nodes}
        numbers = range(len(self._nodes))
        # The nodes that do not wait for their neighbors yet, and may; those that were not seen yet;
        # and those that are to answer the last probe
        self._unsettled = set(numbers)
        self._unseen = set(numbers)
        self._probing: set[int] = set()
        self._knows_links = False  # whether no link is probed any more
        self._began = inf  # inf: not yet
        self._number = 0  # of the last probe; 0: none yet
        self._is_over = not facts.settings.checks
        if not self._is_over:
            keys.held = READY
        self.handlers = {
            Probeable: self._probeable,
            NodeSeen: self._seen,
            Probed: self._probed,
        }

    def tick(self, now: float) -> None:
        if not self._is_over:
            self._go_on(now)

    def due(self) -> float:
        if self._is_over:
            return inf
        if self._began == inf:
            return -inf
        if not self._number:
            return self._began + _LOOK
        return self._began + LIMIT

    def left(self, member: RankState, why: str) -> None:
        """The agent of a node is gone, which is no matter of this check."""
        del why
        node = self._by_rank.get(member.rank)
        if node is not None:
            node.at = None
            node.has_left = True
            self._unsettled.discard(node.number)
            self._unseen.discard(node.number)
            self._probing.discard(node.number)

    # What nodes report; an agent that is not the first one of its node has nothing to report

    def _probeable(self, member: RankState, message: Probeable, now: float) -> None:
        node = self._by_rank.get(member.rank)
        if node is not None:
            node.at = message
            self._unsettled.discard(node.number)
            self.tick(now)

    def _seen(self, member: RankState, message: NodeSeen, now: float) -> None:
        node = self._by_rank.get(member.rank)
        if node is not None:
            node.seen = message
            self._unsettled.discard(node.number)
            self._unseen.discard(node.number)
            self.tick(now)

    def _probed(self, member: RankState, message: Probed, now: float) -> None:
        node = self._by_rank.get(member.rank)
        is_answer = message.number == self._number
        if node is not None and is_answer and node.number in self._probing:
            self._probing.discard(node.number)
            node.probes.append(message)
            self.tick(now)

    # The check

    def _go_on(self, now: float) -> None:
        self._began = min(self._began, now)
        if now >= self._began + LIMIT:
            self._end(now)
        elif self._knows_links:
            if not self._unseen:
                self._end(now)
        elif self._probing:
            return
        elif self._number < _PROBES_OF_ALL:
            self._probe_all(now)
        else:
            self._probe_again(now)

    def _probe_all(self, now: float) -> None:
        is_late = now >= self._began + _LOOK
        if is_late or not self._unsettled:
            self._probe(self._nodes)
            self._go_on(now)

    def _probe_again(self, now: float) -> None:
        """Probe the odd links again, if there are any."""
        odd: list[Finding] = []
        if now < self._began + _AGAIN:
            odd = odd_links(self._links(), self._hosts)
        if odd:
            again = odd[:_MOST_AGAIN]
            self._probe(self._nodes[finding.node] for finding in again)
        if not self._probing:  # no link is odd, or the nodes of those that are have gone
            self._knows_links = True
            self._go_on(now)

    def _probe(self, nodes: Iterable[_Node]) -> None:
        """Let these nodes probe the next one, as far as both can."""
        self._number += 1
        for node in nodes:
            neighbor = self._next_to(node)
            is_alone = node is neighbor
            if is_alone or node.at is None or neighbor.at is None:
                continue
            self._probing.add(node.number)
            probe = Probe(
                number=self._number,
                host=self._addresses.get(neighbor.rank, ""),
                port=neighbor.at.port,
                token=neighbor.at.token,
            )
            self._emit(Send(probe, (node.rank,)))

    def _next_to(self, node: _Node) -> _Node:
        return self._nodes[(node.number + 1) % len(self._nodes)]

    def _links(self) -> list[Link]:
        """The links that were probed; that a node has left is no problem of its link."""
        links = []
        for node in self._nodes:
            neighbor = self._next_to(node)
            probes = node.probes
            if node.has_left or neighbor.has_left:
                probes = list(filterfalse(_problem, probes))
            if probes:
                links.append(Link(node.number, neighbor.number, probes))
        return links

    @cached_property
    def _hosts(self) -> list[str]:
        """The names of all nodes, with their numbers where two have the same."""
        counts = Counter(map(attrgetter("host"), self._nodes))
        found = []
        for node in self._nodes:
            name = node.host
            if counts[name] > 1:
                name = f"{name} (node {node.number})"
            found.append(name)
        return found

    def _end(self, now: float) -> None:
        """Report what was found, and let the ranks start, or end the job."""
        self._is_over = True
        for number in self._probing:
            probe = Probed(self._number, problem=_NOT_IN_TIME)
            self._nodes[number].probes.append(probe)
        findings = []
        for number in sorted(self._unseen):
            text = f"its check did not finish within {LIMIT:g} s"
            findings.append(Finding(number, text))
        seen = {node.number: node.seen for node in self._nodes if node.seen is not None}
        hosts = self._hosts
        links = self._links()
        findings += odd_nodes(seen)
        findings += odd_links(links, hosts)
        self._blame(findings)
        findings += why_none_works(links, hosts)
        lines = [f"{hosts[finding.node]}: {finding.text}" for finding in findings]
        variables = odd_variables(seen, hosts)
        details = {
            "seconds": round(now - self._began, 3),
            "findings": lines,
            "variables": variables,
            "nodes": self._rows(findings, links),
        }
        self._emit(Record("checked", None, details))
        if findings and self._facts.settings.check == _STOP:
            self._stop(findings[0].node, lines)
        else:
            self._warn([*lines, *variables])
        self._keys.let_start()

    def _rows(self, findings: list[Finding], links: list[Link]) -> list[dict[str, Any]]:
        """The table of nodes for the report, with what was seen on each: the odd ones first."""
        texts = _by_node(findings)
        hosts = self._hosts
        of_links = describe_links(links, hosts)
        ordered = sorted(self._nodes, key=lambda node: node.number not in texts)
        found = []
        for node in ordered[:_MOST_RECORDED]:
            seen = describe_node(node.seen or NodeSeen())
            seen.update(of_links.get(node.number, {}))
            row = {
                "node_rank": node.number,
                "host": hosts[node.number],
                "findings": texts.get(node.number, []),
                "seen": seen,
            }
            found.append(row)
        return found

    def _blame(self, findings: list[Finding]) -> None:
        reasons = _by_node(findings)
        self._facts.unfit.update(reasons)
        for number, texts in reasons.items():
            blame = Blame(
                self._nodes[number].host,
                "; ".join(texts),
            )
            self._emit(blame)

    def _warn(self, lines: list[str]) -> None:
        for line in lines[:_MOST_PRINTED]:
            said = Say(
                f"warning: {line}",
                event="check",
                details={"finding": line},
            )
            self._emit(said)
        more = len(lines) - _MOST_PRINTED
        if more > 0:
            self._emit(Say(f"warning: {more} more findings of the check"))

    def _stop(self, node: int, lines: list[str]) -> None:
        """The job does not start: all ranks get the error, or end for it."""
        shown = lines[:_MOST_PRINTED]
        more = len(lines) - _MOST_PRINTED
        if more > 0:
            shown.append(f"{more} more findings of the check")
        text = "; ".join(shown)
        error = DistbootError(
            "node-check",
            text,
            _HINT,
        )
        if self._facts.is_starting:
            self._keys.fail_start(error)
            return
        cause = from_check(
            self._nodes[node].rank,
            lines,
            CODES["node-check"][0],
        )
        conclusion = Conclude(
            cause,
            cause.headline,
            kind="check",
        )
        self._emit(conclusion)


def _by_node(findings: Iterable[Finding]) -> dict[int, list[str]]:
    """What is wrong with each node that has a finding."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for finding in findings:
        found[finding.node].append(finding.text)
    return found


def _nodes_of(members: Mapping[int, RankState]) -> list[_Node]:
    """All nodes of the job, in their order."""
    first = [member for member in members.values() if member.local_rank == 0]
    first.sort(key=attrgetter("node_rank"))
    found = []
    for member in first:
        node = _Node(
            member.node_rank,
            member.rank,
            escape_control(member.host),
        )
        found.append(node)
    return found
