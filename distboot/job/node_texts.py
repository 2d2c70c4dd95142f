"""What the check has seen of each node, as texts for the table of nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.units import bit_rate, duration
from .messages import NodeSeen
from .node_findings import Link, describe_amount

_LINK = "link to the next node"


def describe_node(seen: NodeSeen) -> dict[str, str]:
    """What a node has, by name: `{"free memory": "903 GiB"}`."""
    found = dict(seen.names)
    for name, amount in seen.amounts.items():
        found[name] = describe_amount(name, amount)
    return found


def describe_links(links: Sequence[Link], hosts: Sequence[str]) -> dict[int, dict[str, str]]:
    """The same of the link that starts at a node, by node."""
    found = {}
    for link in links:
        other = hosts[link.end]
        text = f"does not reach {other}"
        if link.rate:
            rate = bit_rate(link.rate)
            text = f"{rate}, {duration(link.round_trip)} to {other}"
        found[link.start] = {_LINK: text}
    return found
