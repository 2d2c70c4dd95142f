"""`--local_rank`, the first argument by `torch.distributed.launch` and DeepSpeed's launcher.

Scripts written for them ask for it; scripts that were not end with "unrecognized arguments".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ..base.patterns import pattern

LOCAL_RANK = "--local_rank"  # DeepSpeed's spelling, and that of torch before 2.0
_SPELLINGS = pattern(r"--local[-_]rank")
_NUMBER = pattern(r"-?[0-9]{1,9}")
_EMPTY_OR_NUMBER = pattern(r"(-?[0-9]{1,9})?")


class _Given(NamedTuple):
    """The option among the arguments of a script."""

    places: range
    value: str  # empty if it has none


def with_local_rank(
    arguments: Sequence[str], local_rank: int | str, name: str = LOCAL_RANK
) -> list[str]:
    """The arguments of a script with the local rank, once, in the script's own spelling."""
    # First, as the launchers do it: it is then an option of the main parser, and before any "--".
    return [f"{name}={local_rank}", *without_local_rank(arguments, name)]


def without_local_rank(arguments: Sequence[str], name: str = LOCAL_RANK) -> list[str]:
    """The arguments of a script without the local rank, in whatever spelling."""
    rest = list(arguments)
    given = _given(arguments, name)
    for one in reversed(given):
        places = one.places
        del rest[places.start : places.stop]
    return rest


def wrong_local_rank(arguments: Sequence[str], local_rank: int | str) -> str | None:
    """A warning of a local rank in the arguments that is not this one, or None."""
    empty = empty_local_rank(arguments)
    if empty is not None:
        return f"{empty}: leave it out, and init(pass_local_rank=True) supplies it"
    # -1 is what scripts have as their default, for "not given".
    right = (-1, int(local_rank))
    for given in _given(arguments):
        if _NUMBER.fullmatch(given.value) and int(given.value) not in right:
            return (
                f"warning: the arguments say {LOCAL_RANK}={given.value}, and the local rank is "
                f"{local_rank}: the script may use another rank's device; "
                "init(pass_local_rank=True) corrects it; False removes the argument"
            )
    return None


def empty_local_rank(arguments: Sequence[str]) -> str | None:
    """A warning, without the hint, of a local rank in the arguments that has no value, or None."""
    for given in _given(arguments):
        if given.value:
            continue
        option = arguments[given.places.start].rstrip("=")
        return (
            f"warning: {option} has no value "
            "(a shell replaces $LOCAL_RANK before LOCAL_RANK is set)"
        )
    return None


def _given(arguments: Sequence[str], name: str = LOCAL_RANK) -> list[_Given]:
    """Each place of the option. What comes after "--" is the script's own."""
    found = []
    own = list(itertools.takewhile(lambda word: word != "--", arguments))
    for place, word in enumerate(own):
        option, equals, value = word.partition("=")
        is_local_rank = option == name or _SPELLINGS.fullmatch(option)
        if not is_local_rank:
            continue
        given = _Given(range(place, place + 1), value)
        if not equals:
            given = _with_next_word(arguments, place)
        found.append(given)
    return found


def _with_next_word(arguments: Sequence[str], place: int) -> _Given:
    """The option in a word of its own, with the word after it if that is empty or a number."""
    places = range(place, place + 1)
    value = ""
    for word in arguments[place + 1 : place + 2]:
        if _EMPTY_OR_NUMBER.fullmatch(word):
            places = range(place, place + 2)
            value = word
    return _Given(places, value)
