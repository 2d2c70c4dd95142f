"""distboot: the first second of a distributed training job. `distboot.init()` is right under every launcher."""

from __future__ import annotations

# Type checkers take the name for typing's, whose import costs more than all of this
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .base.errors import DistbootError as DistbootError
    from .base.version import __version__ as __version__
    from .context import Context as Context
    from .detection.detect import detect as detect
    from .detection.placement import Placement as Placement
    from .initialize import init as init

__all__ = ["Context", "DistbootError", "Placement", "__version__", "detect", "init"]

# `import distboot` costs next to nothing: each public name is imported when it is first used (PEP 562).
_HOMES = {
    "Context": "context",
    "DistbootError": "base.errors",
    "Placement": "detection.placement",
    "__version__": "base.version",
    "detect": "detection.detect",
    "init": "initialize",
}


if not TYPE_CHECKING:  # else a type checker would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return list(__all__)
