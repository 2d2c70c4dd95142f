"""What each rank says once more, when it has its framework and device and is ready to start, or cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..record import is_problem
from .wire import WireError

_LONGEST_OFFER = 300  # characters


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank is ready.

    Attributes:
        device: id of its accelerator as the framework knows it; None: it has none, or the framework does not say.
        offer: what the other ranks need to know to start the framework, for example the address that it will serve
            at; at most 300 characters. All of them get it with the word to go.
        problem: code, message and hint of the error for which it is not ready.
    """

    device: str | None = None
    offer: str | None = None
    problem: tuple[str, str, str] | None = None

    def as_message(self) -> dict[str, object]:
        """As plain JSON types."""
        return {"device": self.device, "offer": self.offer, "problem": self.problem}

    @classmethod
    def from_message(cls, message: object) -> Ready:
        """What a peer sent.

        Raises:
            WireError: it is none.
        """
        if not isinstance(message, dict) or message.keys() != {"device", "offer", "problem"}:
            raise WireError("sends a broken word of being ready")
        device, offer, problem = message["device"], message["offer"], message["problem"]
        if not all(value is None or isinstance(value, str) for value in (device, offer)):
            raise WireError("sends a broken word of being ready")
        if not (problem is None or is_problem(problem)) or not _is_offer(offer or ""):
            raise WireError("sends a broken word of being ready")
        return cls(device, offer, None if problem is None else (problem[0], problem[1], problem[2]))


def offers_message(offers: Mapping[int, str]) -> object:
    """What the ranks offer, by rank, as plain JSON types."""
    return [[rank, offer] for rank, offer in sorted(offers.items())]


def offers_from(message: object, world_size: int) -> dict[int, str]:
    """What the ranks offer, as rank 0 sent it.

    Raises:
        WireError: it is something else.
    """
    offers: dict[int, str] = {}
    for pair in message if isinstance(message, list) else [None]:
        rank, offer = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if type(rank) is not int or not 0 <= rank < world_size or not isinstance(offer, str) or not _is_offer(offer):
            raise WireError("sends a broken word to go")
        offers[rank] = offer
    return offers


def _is_offer(text: str) -> bool:
    return len(text) <= _LONGEST_OFFER and text.isprintable()
