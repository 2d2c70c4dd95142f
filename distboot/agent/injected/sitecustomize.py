"""Runs at the start of every Python under the wrapper: it reports an uncaught exception to our agent.

It leaves no trace: the script finds sys.path and PYTHONPATH as they were, and its own sitecustomize has run. Only under
`try` are the Pythons that this one starts to run it, too.
"""
# ruff: noqa: INP001 - a folder of PYTHONPATH, and no package

import contextlib
import importlib
import os
import sys
from types import ModuleType


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    is_tried = "DISTBOOT_TRY" in os.environ
    others = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path != here or is_tried
    ]
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
    # Our files as a package of another name: for this Python there may be another distboot, or none.
    package = sys.modules["_distboot"] = ModuleType("_distboot")
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    with contextlib.suppress(Exception):  # an old Python does without
        _loaded("hints").install()
        _loaded("workers").install()
    if is_tried:
        _loaded("injected.trial_hook").install()
    with contextlib.suppress(Exception):  # and one that has closed the pipe, or has none
        _listen(*map(int, said.split(":")))


def _listen(pipe: int, inode: int) -> None:
    if os.fstat(pipe).st_ino == inode:
        os.set_inheritable(pipe, False)
        _loaded("crash_hooks").install(pipe)
        _loaded("progress").install()


def _loaded(name: str) -> ModuleType:
    return importlib.import_module(f"_distboot.agent.{name}")


_begin()
