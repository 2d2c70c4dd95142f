"""Whether Python would find a module, without importing any part of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from itertools import accumulate

_LONGEST = 1 << 20  # bytes of a file that are read


def missing_part(name: str) -> str | None:
    """The package or module in a dotted name that does not exist; None if all of them do."""
    # `python -m` looks in the working directory first; the finders skip "" if that was removed
    folders: Sequence[str] | None = ["", *sys.path]
    for part in accumulate(name.split("."), "{}.{}".format):
        if folders is None:  # the parent is not a package
            return part
        # The finders of editable installs are in it, too
        found = (finder.find_spec(part, folders, None) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is None:
            return part
        if _changes_its_path(spec):  # only Python itself knows what is below
            return None
        folders = spec.submodule_search_locations
    return None


def _changes_its_path(spec: ModuleSpec) -> bool:
    """Whether the __init__ of this package may change where Python looks for its modules."""
    if spec.submodule_search_locations is None or not spec.origin:
        return False
    with suppress(OSError), open(spec.origin, encoding="utf-8", errors="replace") as file:
        return "__path__" in file.read(_LONGEST)
    return True
