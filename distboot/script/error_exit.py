"""The exit code of a script that ends with an error of distboot: the error's own.

Python ends with 1 for every uncaught exception, unless `sys.excepthook` raises SystemExit.
"""

from __future__ import annotations

import sys
from functools import cache

from ..base.errors import DistbootError
from .crash_hooks import is_the_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


@cache
def install() -> None:
    """From now on an uncaught `DistbootError` ends the script with its own exit code."""
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        # Not every exception that has an `exit_code`: click's have one, too
        if isinstance(error, DistbootError) and is_the_end():
            raise SystemExit(error.exit_code)

    sys.excepthook = excepthook
