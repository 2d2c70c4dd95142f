"""Pairs of nodes for measurements between two: the rounds of a round-robin tournament.

In each round every node works with another one. A node that is slow shows in all of its pairs, a
link in one.
"""

from __future__ import annotations

_MOST_ROUNDS = 15
Pair = tuple[int, int]  # of nodes


def rounds_of_pairs(nodes: int) -> list[list[Pair]]:
    """The rounds of a tournament: in each a node is in one pair, or in none where they are odd.

    The circle method: the first place stays, all others move on by one in each round.
    """
    places: list[int | None] = [*range(nodes)]
    if nodes % 2:
        places.append(None)
    rounds = []
    for _ in range(min(len(places) - 1, _MOST_ROUNDS)):
        pairs = []
        for first, second in zip(places, reversed(places[len(places) // 2 :]), strict=False):
            if first is not None and second is not None:
                pairs.append((min(first, second), max(first, second)))
        rounds.append(sorted(pairs))
        places.insert(1, places.pop())
    return rounds
