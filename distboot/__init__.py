"""distboot: the first second of a distributed training job. `distboot.init()` works under any launcher."""

import sys

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

# pip refuses another Python; a clone in PYTHONPATH, or a node with another image, does not
if sys.version_info < (3, 10):  # noqa: UP036
    problem = "distboot needs Python 3.10 or newer, and %s is Python %s"
    problem %= (sys.executable, sys.version.split()[0])
    words = ""
    try:
        with open("/proc/self/cmdline") as file:
            words = file.read()
    except OSError:  # not on Linux
        pass
    if "\0-m\0distboot\0" in words:
        sys.stderr.write("distboot: error: %s\n" % problem)  # noqa: UP031
        sys.exit(78)
    raise ImportError(problem)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
