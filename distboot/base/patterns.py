"""Regular expressions that are compiled when they are first used.

Python takes up to 2 ms for an expression with many alternatives. A process that starts uses few of
those of this package: without this, they take a tenth of the time of `init` in one process.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, AnyStr


class _Pattern:
    """Stands for a `re.Pattern`, and compiles it at the first use of one of its methods."""

    def __init__(self, text: str | bytes, flags: int) -> None:
        self._text = text
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(self._text, self._flags)  # `re` keeps it
        found = getattr(compiled, name)
        setattr(self, name, found)  # the next use costs no more than one of a `re.Pattern`
        return found


def pattern(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """The same as `re.compile`, later."""
    return _Pattern(text, flags)  # type: ignore[return-value]
