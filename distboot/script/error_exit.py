"""The exit code of a script that ends with an error of distboot: that of the command for this error.

Python ends with 1 for every uncaught exception, unless its hook raises SystemExit.
"""

from __future__ import annotations

import sys
from functools import cache

from .crash_hooks import is_the_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


@cache
def install() -> None:
    """From now on an uncaught error with an `exit_code` ends the script with that."""
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        code = getattr(error, "exit_code", None)
        if code is not None and is_the_end():
            raise SystemExit(code)

    sys.excepthook = excepthook
