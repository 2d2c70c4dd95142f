"""What each rank says once more, when it has its framework and device and is ready to start, or cannot."""

from __future__ import annotations

from dataclasses import dataclass

from ..record import is_problem
from .wire import WireError


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank is ready.

    Attributes:
        device: id of its accelerator as the framework knows it; None: it has none, or the framework does not say.
        problem: code, message and hint of the error for which it is not ready.
    """

    device: str | None = None
    problem: tuple[str, str, str] | None = None

    def as_message(self) -> dict[str, object]:
        """As plain JSON types."""
        return {"device": self.device, "problem": self.problem}

    @classmethod
    def from_message(cls, message: object) -> Ready:
        """What a peer sent.

        Raises:
            WireError: it is none.
        """
        if not isinstance(message, dict) or message.keys() != {"device", "problem"}:
            raise WireError("sends a broken word of being ready")
        device, problem = message["device"], message["problem"]
        if not (device is None or isinstance(device, str)) or not (problem is None or is_problem(problem)):
            raise WireError("sends a broken word of being ready")
        return cls(device, None if problem is None else (problem[0], problem[1], problem[2]))
