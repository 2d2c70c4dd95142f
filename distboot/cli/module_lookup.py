"""Where Python would find a module, without importing any part of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from itertools import accumulate
from operator import methodcaller

_LONGEST = 1 << 20  # bytes of a file that are read


def missing_part(name: str) -> str | None:
    """The package or module in a dotted name that does not exist; None if all of them do."""
    for part, spec in _look_up(name):
        if spec is None:
            return part
    return None


def file_of_module(name: str) -> str:
    """The file that `python -m` runs: of a package its `__main__`; empty if it is not found."""
    spec = dict(_look_up(name)).get(name)
    folders_of_package = getattr(
        spec,
        "submodule_search_locations",
        None,
    )
    if folders_of_package is not None:
        name = f"{name}.__main__"
        spec = dict(_look_up(name)).get(name)
    origin = getattr(spec, "origin", "")  # of a module that Python has in itself: "built-in"
    return str(origin)


def _look_up(name: str) -> Iterator[tuple[str, ModuleSpec | None]]:
    """Each package of a dotted name, and the module, with where Python would find it; None: nowhere.

    It ends at what is missing, and where only Python itself knows what is below.
    """
    # `python -m` looks in the working directory first; the finders skip "" if that was removed
    folders: Sequence[str] = ["", *sys.path]
    for part in accumulate(name.split("."), "{}.{}".format):
        find = methodcaller("find_spec", part, folders, None)
        found = map(find, sys.meta_path)  # the finders of editable installs are in it, too
        spec = next(filter(None, found), None)
        yield part, spec
        if spec is None or _changes_its_path(spec):
            return
        folders = spec.submodule_search_locations or []  # none, of a module that is no package


def _changes_its_path(spec: ModuleSpec) -> bool:
    """Whether the __init__ of this package may change where Python looks for its modules."""
    path = spec.origin or os.devnull  # a package without an __init__ has none
    with (
        suppress(OSError),
        open(path, encoding="utf-8", errors="replace") as file,
    ):
        text = file.read(_LONGEST)
        return "__path__" in text
    return True
