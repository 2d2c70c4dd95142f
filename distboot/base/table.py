"""A rule with cases, as a table."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    Outcome = TypeVar("Outcome")


def first_that_holds(*rows: tuple[bool, Outcome]) -> Outcome:
    """The outcome of the first row whose condition holds; that of the last row is `True`."""
    for holds, outcome in rows:
        if holds:
            return outcome
    raise AssertionError("no row holds")
