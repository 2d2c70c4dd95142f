"""Runs at the start of every Python under the wrapper: for what it can say of an uncaught exception, and to whom.

It leaves no trace: the script finds sys.path and PYTHONPATH as they were, and its own sitecustomize has run.
"""
# ruff: noqa: INP001 - a folder of PYTHONPATH, and no package

import contextlib
import importlib.util
import os
import sys
from types import ModuleType


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != here]
    if others and others != [""]:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)
    said = os.environ.pop("DISTBOOT_CRASH_HOOKS", "")
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")  # the user's, or the system's
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)
    with contextlib.suppress(Exception):  # an old Python does without
        _loaded(here, "hints").install()
        _loaded(here, "workers").install(os.environ.get("DISTBOOT_STOP_SIGNALS", ""))
    with contextlib.suppress(Exception):  # and one that has closed the pipe, or has none
        _listen(here, *map(int, said.split(":")))


def _listen(here: str, pipe: int, inode: int) -> None:
    if os.fstat(pipe).st_ino == inode:
        os.set_inheritable(pipe, False)
        hooks = _loaded(here, "crash_hooks")
        hooks.install(pipe)
        _loaded(here, "progress").install(hooks.emit)


def _loaded(here: str, name: str) -> ModuleType:
    """A file beside our folder, as a module of its own: the rest of the package need not be there for this Python."""
    path = os.path.join(os.path.dirname(here), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_distboot_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_begin()
