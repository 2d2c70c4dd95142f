"""Whether the numbers of one process fit together.

An unknown number takes part as NaN, with which every comparison is false: so a check that has
nothing to compare finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan, nan

from .placement import NUMBERS

_DO_NOT_FIT = "{world_size}, {local_world_size}, {num_nodes} do not fit together"


def contradictions(
    numbers: Sequence[int | None], in_order: tuple[str, ...], describe: Callable[[str], str]
) -> list[str]:
    """What cannot be so together, as sentences.

    Args:
        numbers: as in `NUMBERS`; None: not known.
        in_order: those of the local rank and the node rank that follow the order of ranks.
        describe: gives a field with its value for the sentences.
    """
    known = list(map(_or_nan, numbers))
    rank, world_size, local_rank, here, node_rank, nodes = known
    others = world_size - here
    checks = (
        (rank >= world_size, "{rank} is not below {world_size}"),
        (
            isnan(rank) and world_size == 0,
            "{world_size} cannot be 0: this process is there",
        ),
        (local_rank >= here, "{local_rank} is not below {local_world_size}"),
        (
            isnan(here) and local_rank >= world_size,
            "{local_rank} is not below {world_size}",
        ),
        (node_rank >= nodes, "{node_rank} is not below {num_nodes}"),
        (
            isnan(nodes) and node_rank >= world_size,
            "{node_rank} is not below {world_size}",
        ),
        (_is_out_of_order(known, in_order), "{rank} of {world_size} cannot be at {place}"),
        (here == 0, "{local_world_size} cannot be 0: this process is there"),
        (here > world_size, "{local_world_size} is more than {world_size}"),
        (nodes == 0, "{num_nodes} cannot be 0: this process is there"),
        (nodes > world_size, "{num_nodes} is more than {world_size}"),
        # Every other node has at least one process; on a single node they are all here.
        (others < nodes - 1, _DO_NOT_FIT),
        (nodes == 1 and others > 0, _DO_NOT_FIT),
    )
    found = [sentence for is_wrong, sentence in checks if is_wrong]
    if not found:
        return []
    described = _described(numbers, describe)
    return [sentence.format_map(described) for sentence in found]


def _or_nan(number: int | None) -> float:
    if number is None:
        return nan
    return number


def _described(
    numbers: Sequence[int | None],
    describe: Callable[[str], str],
) -> dict[str, str]:
    """The known fields as the sentences show them, by name, and the place on the nodes."""
    described = {}
    for field, number in zip(NUMBERS, numbers, strict=True):
        if number is not None:
            described[field] = describe(field)
    place = map(described.get, ("local_rank", "local_world_size", "node_rank"))
    described["place"] = ", ".join(filter(None, place))
    return described


def _is_out_of_order(numbers: Sequence[float], in_order: tuple[str, ...]) -> bool:
    """Whether no job in this order has the rank at this place on the nodes."""
    rank, world_size, local_rank, here, node_rank, nodes = numbers
    if isnan(rank + world_size):
        return False
    if "local_rank" not in in_order:
        local_rank = nan
    if "node_rank" not in in_order:
        node_rank = nan
    is_first = local_rank == 0 and node_rank == 0
    checks = (
        # Below this rank are one of each node before, and all of this node with a lower local rank.
        rank < node_rank,
        rank < local_rank,
        rank < node_rank + local_rank,
        # Above it are those with a higher one.
        world_size - rank < here - local_rank,
        is_first and rank > 0,
        nodes == 1 and rank > local_rank,
    )
    return any(checks)
