"""Add or remove `--local_rank` in an argument list; warn when it disagrees with the detected local rank.

`torch.distributed.launch` and DeepSpeed's launcher pass it as the first argument, and scripts written for them ask for
it; scripts that were not end with "unrecognized arguments". Pure: lists go in and come out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

NAME = "--local_rank"  # DeepSpeed's spelling, and that of torch before 2.0
_NAMES = re.compile(r"--local[-_]rank")
_NUMBER = re.compile(r"-?[0-9]+")


def with_local_rank(arguments: Sequence[str], local_rank: int | str, name: str = NAME) -> list[str]:
    """The arguments of a script with the local rank, once, in the script's own spelling of the option."""
    # First, as the launchers do it: it is then an option of the main parser, and before any "--".
    return [f"{name}={local_rank}", *without_local_rank(arguments, name)]


def without_local_rank(arguments: Sequence[str], name: str = NAME) -> list[str]:
    """The arguments of a script without the local rank, in whatever spelling."""
    spans = [span for span, _ in _found(arguments, name)]
    return [word for at, word in enumerate(arguments) if not any(at in span for span in spans)]


def wrong_local_rank(arguments: Sequence[str], local_rank: int | str) -> str | None:
    """A warning of a local rank in the arguments that is not this one, or None."""
    if (empty := empty_local_rank(arguments)) is not None:
        return f"{empty}: leave it out, and init(pass_local_rank=True) supplies it"
    # -1 is what scripts have as their default, for "not given".
    values = (value for _, value in _found(arguments) if _NUMBER.fullmatch(value))
    wrong = next((value for value in values if int(value) not in (-1, int(local_rank))), None)
    if wrong is None:
        return None
    return (
        f"warning: the arguments say {NAME}={wrong}, and the local rank is {local_rank}: the script may use another "
        "rank's device; init(pass_local_rank=True) puts that right, and False removes the argument"
    )


def empty_local_rank(arguments: Sequence[str]) -> str | None:
    """A warning, without the hint, of a local rank in the arguments that has no value, or None."""
    option = next((arguments[span[0]] for span, value in _found(arguments) if not value), None)
    if option is None:
        return None
    return f"warning: {option.rstrip('=')} has no value (a shell replaces $LOCAL_RANK before LOCAL_RANK is set)"


def _found(arguments: Sequence[str], name: str = NAME) -> Iterator[tuple[range, str]]:
    """Where the option stands, and its value; empty if it has none. What comes after "--" is the script's own."""
    for at, word in enumerate(arguments):
        if word == "--":
            return
        option, equals, value = word.partition("=")
        if option != name and not _NAMES.fullmatch(option):
            continue
        following = "".join(arguments[at + 1 : at + 2])
        two_words = not equals and arguments[at + 1 :] and (following == "" or _NUMBER.fullmatch(following))
        yield range(at, at + 2 if two_words else at + 1), value if equals else following if two_words else ""
