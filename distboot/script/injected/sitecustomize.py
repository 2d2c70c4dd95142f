"""Runs at the start of every Python below the wrapper, and installs the hooks that report to it.

It leaves no trace: the script finds sys.path and PYTHONPATH as they were without the wrapper, and
its own sitecustomize has run, even if that fails. Only under `try` do the Pythons that this one
starts run it as well.
"""
# ruff: noqa: INP001 - a folder of PYTHONPATH, and no package

import contextlib
import importlib
import os
import sys
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    is_tried = "DISTBOOT_TRY" in os.environ
    _leave_search_paths(keep_for_children=is_tried)
    pipe = os.environ.pop("DISTBOOT_CRASH_HOOKS", "")
    _name_package()
    # First: the user's sitecustomize may fail, or end this Python
    _report_to(pipe)
    try:
        _run_next()
    finally:
        _install_rest(pipe)
        if is_tried:
            _loaded("injected.trial_hook").install()


def _leave_search_paths(*, keep_for_children: bool) -> None:
    """Take this folder out of sys.path and, unless the children need it, out of PYTHONPATH."""
    searched = [path for path in sys.path if os.path.abspath(path) != _HERE]
    sys.path[:] = searched
    if keep_for_children:
        return
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = os.pathsep.join(path for path in paths if path != _HERE)
    if others:
        os.environ["PYTHONPATH"] = others
    else:
        os.environ.pop("PYTHONPATH", None)


def _name_package() -> None:
    """Make distboot's files importable under a name of their own.

    This Python may have another distboot, or none.
    """
    package = ModuleType("_distboot")
    package.__path__ = [os.path.dirname(os.path.dirname(_HERE))]
    sys.modules["_distboot"] = package


def _report_to(pipe: str) -> None:
    """Install the hooks that report to this pipe: "descriptor:inode"."""
    try:
        number, inode = map(int, pipe.split(":"))
        if os.fstat(number).st_ino != inode:  # another file: the pipe was closed
            return
        os.set_inheritable(number, False)
        _loaded("crash_hooks").install(number)
        _loaded("progress").install()
    except (OSError, ValueError):  # the pipe was closed, or there is none
        return
    except Exception as error:  # noqa: BLE001 - this Python is too old
        version = sys.version.partition(" ")[0]
        said = "does not report uncaught exceptions to distboot, only its exit code:"
        print("distboot: warning: Python", version, said, repr(error), file=sys.stderr)


def _run_next() -> None:
    """Run the user's sitecustomize, or the system's; Python prints its exception, as always."""
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


def _install_rest(pipe: str) -> None:
    """Install what works without the pipe, and the excepthook over one of the user's."""
    with contextlib.suppress(Exception):  # an old Python runs without it
        _loaded("hints").install()
        _loaded("workers").install_at_start()
        if pipe:
            _loaded("crash_hooks").wrap_excepthook()


def _loaded(name: str) -> ModuleType:
    return importlib.import_module(f"_distboot.script.{name}")


_start()
