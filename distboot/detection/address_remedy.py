"""What to do where MASTER_ADDR or MASTER_PORT is wrong or missing, or both are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ADDRESS = "MASTER_ADDR"
_PORT = "MASTER_PORT"
_PLAIN = "torch"  # the launcher of RANK and WORLD_SIZE alone
_BY_HAND = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    _ADDRESS,
    _PORT,
)
_SET_HOST = "set MASTER_ADDR to the host of rank 0"
# By what is wrong: what to do, and what to unset where the launcher can do without
_REMEDIES = {
    (_ADDRESS,): (_SET_HOST, "it"),
    (_PORT,): ("set MASTER_PORT to a free port on the host of rank 0", "it"),
    (_ADDRESS, _PORT): (f"{_SET_HOST} and MASTER_PORT to a free port there", "them"),
}


def address_remedy(problems: Sequence[str], can_do_without: Mapping[str, bool]) -> str:
    """The remedy for these problems, each of which begins with the name of the variable.

    `can_do_without`: whether the launcher has an address, or a port, without the variable.
    """
    wrong = []
    for name in (_ADDRESS, _PORT):
        if any(problem.startswith(name) for problem in problems):
            wrong.append(name)
    hint, pronoun = _REMEDIES[tuple(wrong)]
    if all(can_do_without[name] for name in wrong):
        return f"{hint}, or unset {pronoun}"
    return hint


def is_by_hand(launcher: str, platform: str | None) -> bool:
    """Whether a person, or what they ran before in this shell, may have set RANK and WORLD_SIZE."""
    if platform is not None:
        return False
    return launcher == _PLAIN


def or_unset(launcher: str, platform: str | None, sources: Mapping[str, str]) -> str:
    """`"; or unset RANK, WORLD_SIZE if they are left over"`; empty where a launcher set them.

    `sources`: of the placement, by field.
    """
    if not is_by_hand(launcher, platform):
        return ""
    used = set(sources.values())
    there = ", ".join(filter(used.__contains__, _BY_HAND))
    return f"; or unset {there} if they are left over"
