"""distboot: the first second of a distributed training job. `distboot.init()` is right under every launcher."""

from __future__ import annotations

__all__ = ["Context", "DistbootError", "Placement", "__version__", "detect", "init"]

# `import distboot` costs next to nothing: each public name is imported when it is first used (PEP 562). Editors and
# type checkers read `__init__.pyi`, which names the same homes.
_HOMES = {
    "Context": "context",
    "DistbootError": "base.errors",
    "Placement": "detection.placement",
    "__version__": "base.version",
    "detect": "detection.detect",
    "init": "initialize",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
