"""What a relay says to rank 0 for the ranks of its node, and the other way round: in batches, each with its rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from ..record import Record
from .wire import MOST_FROM_A_RANK, Session, WireError, canonical

_MOST_IN_A_BATCH = MOST_FROM_A_RANK - 1024  # bytes; the rest is for the frame
MOST_FROM_A_LOCAL_RANK = MOST_FROM_A_RANK - 2048  # bytes of one frame, so that it fits into a batch

_DEEPER = 100  # lists around it, in the stack of rank 0 or in what it sends on

Said = tuple[int, str, object]  # rank, kind and content of a message


def fitting(item: object) -> str:
    """What a rank says, as rank 0 can read it in a batch: what would be too much ends the line of that rank only.

    Raises:
        WireError: it is too long, or nested too deeply.
    """
    try:
        text = canonical(item)
        json.loads(f"{'[' * _DEEPER}{text}{']' * _DEEPER}")
    except RecursionError:
        raise WireError("sends nonsense") from None
    if len(text) > _MOST_IN_A_BATCH:  # which is ASCII, and so may be longer than what was read
        raise WireError(f"sends a message of {len(text)} bytes, of at most {_MOST_IN_A_BATCH}")
    return text


def batches(sealed: Callable[[str, str], bytes], kind: str, items: Iterable[str]) -> Iterator[bytes]:
    """Frames of this kind that have all items between them, each of them `fitting`, none longer than rank 0 reads."""
    batch: list[str] = []
    size = 0
    for text in items:
        if batch and size + len(text) > _MOST_IN_A_BATCH:
            yield sealed(kind, f"[{','.join(batch)}]")
            batch, size = [], 0
        batch.append(text)
        size += len(text) + 1
    if batch:
        yield sealed(kind, f"[{','.join(batch)}]")


def record_from(content: object) -> Record:
    """The record of a rank.

    Raises:
        WireError: it is none.
    """
    try:
        return Record.from_message(content)
    except (TypeError, ValueError) as error:
        raise WireError(f"sends a broken record: {error}") from None


def records_from(content: object, secret: str) -> list[tuple[Record, Session]]:
    """The records of a batch, and what the messages of each rank are sealed with.

    Raises:
        WireError: it is something else.
    """
    found = []
    for each in content if isinstance(content, list) else [None]:
        message, challenge, nonce = each if isinstance(each, list) and len(each) == 3 else (None, None, None)
        if not isinstance(challenge, str) or not isinstance(nonce, str) or len(challenge) != 32 or len(nonce) != 32:
            raise WireError("sends a broken batch of records")
        found.append((record_from(message), Session(secret, "rank 0", challenge, nonce)))
    return found


def said_from(content: object) -> list[Said]:
    """The messages of a batch.

    Raises:
        WireError: it is something else.
    """
    found = []
    for each in content if isinstance(content, list) else [None]:
        rank, kind, said = each if isinstance(each, list) and len(each) == 3 else (None, None, None)
        if type(rank) is not int or not isinstance(kind, str):
            raise WireError("sends a broken batch")
        found.append((rank, kind, said))
    return found
