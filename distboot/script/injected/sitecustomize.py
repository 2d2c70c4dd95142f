"""Runs at the start of every Python under the wrapper: it reports an uncaught exception to our agent.

It leaves no trace: the script finds sys.path and PYTHONPATH as they were, and its own sitecustomize has run, which may
fail. Only under `try` are the Pythons that this one starts to run it, too.
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
    where = os.environ.pop("DISTBOOT_CRASH_HOOKS", "")
    # Our files as a package of another name: for this Python there may be another distboot, or none.
    package = sys.modules["_distboot"] = ModuleType("_distboot")
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    # First: the user's may fail, or end this Python
    try:
        _report_to(*map(int, where.split(":")))
    except (OSError, ValueError):  # it has closed the pipe, or has none
        pass
    except Exception as error:  # noqa: BLE001 - it is too old
        version = sys.version.partition(" ")[0]
        said = "does not report uncaught exceptions to distboot, only its exit code:"
        print("distboot: warning: Python", version, said, repr(error), file=sys.stderr)
    try:
        _run_next()
    finally:
        with contextlib.suppress(Exception):  # an old Python does without
            _loaded("hints").install()
            _loaded("workers").install_at_start()
            if where:  # the user's may have set a hook of its own
                _loaded("crash_hooks").wrap_excepthook()
        if is_tried:
            _loaded("injected.trial_hook").install()


def _run_next() -> None:
    """Run the user's sitecustomize, or the system's; an exception of it is Python's to print, as without us."""
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


def _report_to(pipe: int, inode: int) -> None:
    if os.fstat(pipe).st_ino == inode:
        os.set_inheritable(pipe, False)
        _loaded("crash_hooks").install(pipe)
        _loaded("progress").install()


def _loaded(name: str) -> ModuleType:
    return importlib.import_module(f"_distboot.script.{name}")


_begin()
