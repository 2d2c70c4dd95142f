"""Runs at the start of every Python under the wrapper, so that the wrapper hears of an uncaught exception.

It leaves no trace: the script finds sys.path and PYTHONPATH as they were, and its own sitecustomize has run.
"""

import contextlib
import importlib.util
import os
import sys


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != here]
    if others and others != [""]:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)
    said = os.environ.pop("DISTBOOT_LAST_WORDS", "")
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")  # the user's, or the system's
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)
    with contextlib.suppress(Exception):  # an old Python, or one that has closed the pipe, does without
        _listen(here, *map(int, said.split(":")))


def _listen(here: str, pipe: int, inode: int) -> None:
    if os.fstat(pipe).st_ino == inode:
        os.set_inheritable(pipe, False)
        path = os.path.join(os.path.dirname(here), "last_words.py")
        spec = importlib.util.spec_from_file_location("_distboot_last_words", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["_distboot_last_words"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.leave_to(pipe)


_begin()
