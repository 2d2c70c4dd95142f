"""Why the ranks have not met or started, for the report: an error, or a signal that stopped them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.errors import DistbootError
from ..base.text import cut, first_line, without_secret

_LONGEST = 4000  # characters
# By exit code; DISTBOOT_STOP_SIGNALS may have others than those that end a process
_STOPS = {128 + number: number.name for number in signal.Signals}


class StartFailure(NamedTuple):
    """Why the ranks have not met or started."""

    text: str
    code: str | None  # of a DistbootError
    hint: str
    is_stop: bool  # whether a signal has stopped the start, Ctrl-C for example

    @classmethod
    def from_error(cls, error: BaseException) -> StartFailure:
        what = type(error).__name__
        code = None
        hint = ""
        name = stopped_by(error)
        if isinstance(error, DistbootError):
            what = error.message
            code = error.code
            hint = error.hint
        elif name is not None:
            what = f"stopped by an external {name}"
        elif str(error):
            what = f"{what}: {first_line(error)}"
        return cls(
            text=cut(without_secret(what), _LONGEST),
            code=code,
            hint=cut(without_secret(hint), _LONGEST),
            is_stop=code == "stopped" or not isinstance(error, Exception),
        )

    def as_cause(self, ranks: Sequence[int]) -> dict[str, Any]:
        """This failure as the report has a first failure."""
        return {
            "text": self.text,
            "code": self.code,
            "hint": self.hint,
            "ranks": list(ranks),
            "rank": None,
            "traceback": "",
        }


def stopped_by(error: BaseException) -> str | None:
    """The signal for which this is raised, by its name: `"SIGTERM"`; None: it is another error."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT.name
    code = getattr(error, "code", None)
    if not isinstance(code, int):
        return None
    return _STOPS.get(code)
