"""What to do where MASTER_ADDR or MASTER_PORT is wrong, or both are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SET_TO = {
    "MASTER_ADDR": "MASTER_ADDR to the host of rank 0",
    "MASTER_PORT": "MASTER_PORT to a free port there",
}


def address_remedy(problems: Sequence[str], can_do_without: Mapping[str, bool]) -> str:
    """The remedy for these problems, each of which begins with the name of the variable.

    `can_do_without`: whether the launcher has an address, or a port, without the variable.
    """
    wrong = []
    for name in _SET_TO:
        if any(problem.startswith(name) for problem in problems):
            wrong.append(name)
    values = " and ".join(_SET_TO[name] for name in wrong)
    hint = f"set {values}"
    pronoun = "them"
    if len(wrong) == 1:
        hint = hint.replace("there", "on the host of rank 0")
        pronoun = "it"
    if all(can_do_without[name] for name in wrong):
        return f"{hint}, or clear {pronoun}"
    return hint
