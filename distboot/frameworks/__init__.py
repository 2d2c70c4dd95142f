"""The frameworks that `init` can start. Each has a file of its own, which alone imports it, and only when called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from ..context import Context
from ..errors import DistbootError
from ..exports import Exported
from ..rollcall.meeting import Meeting

# All ranks together, where to export, backend, timeout in seconds.
Starter = Callable[[Meeting, Exported, str | None, float | None], Context]

KNOWN = ("torch",)


def starter(framework: str) -> Starter:
    """The function that starts a framework.

    Raises:
        DistbootError: `unknown-framework`.
    """
    if framework not in KNOWN:
        raise DistbootError("unknown-framework", f"{framework!r} is no framework", f"frameworks: {', '.join(KNOWN)}")
    start: Starter = _module(framework).start
    return start


def on_cpu(framework: str, backend: str | None) -> bool:
    """Whether starting a known framework like this uses no accelerator."""
    return bool(_module(framework).on_cpu(backend))


def _module(framework: str) -> ModuleType:
    return import_module(f".{framework}", __name__)
