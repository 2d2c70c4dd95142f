"""The connection of a node, which carries the lines of all ranks there: between rank 0 and the relay of the node."""

from __future__ import annotations

from ..rollcall.relayed import said_from
from ..rollcall.wire import WireError
from .line import Line


class Trunk(Line):
    """The connection of a node, as rank 0 has it."""

    def heard(self, now: float) -> list[tuple[int | None, str, object]]:
        found: list[tuple[int | None, str, object]] = []
        for kind, content in self.receive(now):
            if kind != "of":
                raise WireError(f"sends {kind} for nobody")
            found += said_from(content)
        return found

    def tell(self, rank: int | None, kind: str, content: object) -> None:
        self.send("to", [rank, kind, content])


def said_to(content: object) -> tuple[int | None, str, object]:
    """For which rank rank 0 has a message, and what it is; None: for all of the node.

    Raises:
        WireError: it is something else.
    """
    rank, kind, said = content if isinstance(content, list) and len(content) == 3 else (None, None, None)
    if not (rank is None or type(rank) is int) or not isinstance(kind, str):
        raise WireError("sends a broken message for a rank")
    return rank, kind, said
