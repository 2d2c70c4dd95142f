"""The frameworks that `init` can start. Each has a file of its own, which alone imports it, and only when called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..context import Context
from ..errors import DistbootError
from ..exports import Exported
from ..placement import Placement

# Placement with address and port, where to export, backend, join timeout and timeout in seconds.
Starter = Callable[[Placement, Exported, str | None, float, float | None], Context]

KNOWN = ("torch",)


def starter(framework: str) -> Starter:
    """The function that starts a framework.

    Raises:
        DistbootError: `unknown-framework`.
    """
    if framework not in KNOWN:
        raise DistbootError("unknown-framework", f"{framework!r} is no framework", f"frameworks: {', '.join(KNOWN)}")
    start: Starter = import_module(f".{framework}", __name__).start
    return start
