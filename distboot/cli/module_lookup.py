"""Whether Python would find a module, without importing any part of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate

_LONGEST = 1 << 20  # bytes of a file that are read


def missing_part(name: str) -> str | None:
    """The package or module in a dotted name that does not exist; None if all of them do."""
    path: Sequence[str] | None = None
    has_parent = False
    for part in accumulate(name.split("."), "{}.{}".format):
        if has_parent and path is None:  # the parent is not a package
            return part
        spec = _spec(part, path)
        if spec is None:
            return part
        # An __init__ may change the path of its package: only Python itself knows what is below.
        if _changes_its_path(spec):
            return None
        path = spec.submodule_search_locations
        has_parent = True
    return None


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """What Python would import; `path`: the folders of its package, None at the top."""
    if path is None:
        # `python -m` looks in the working directory first.
        spec = PathFinder.find_spec(name, [os.getcwd()])
        if spec is not None:
            return spec
    # The finders of editable installs are in it, too
    found = (finder.find_spec(name, path, None) for finder in sys.meta_path)
    return next(filter(None, found), None)


def _changes_its_path(spec: ModuleSpec) -> bool:
    if spec.submodule_search_locations is None or not spec.origin:
        return False
    try:
        with open(spec.origin, encoding="utf-8", errors="replace") as file:
            return "__path__" in file.read(_LONGEST)
    except OSError:
        return True
