"""The journals in a folder, for a hint where a file is not one."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice

from ..base.text import short_repr
from ..job.journal import SUFFIX, is_journal
from ..report.files import beginning_of

_MOST = 3
_MOST_READ = 100  # files, as a data set may have thousands


def journals_beside(path: str) -> list[str]:
    """The newest journals in a folder, or beside a file but not it, at most three, quoted."""
    folder = path
    if not os.path.isdir(path):
        folder = os.path.dirname(path)
    found: list[tuple[float, str]] = []
    with suppress(OSError, ValueError), os.scandir(folder or ".") as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                changed = entry.stat(follow_symlinks=False).st_mtime
                found.append((changed, os.path.join(folder, entry.name)))
    newest_first = [other for _, other in sorted(found, reverse=True) if other != path]
    journals = filter(_is_journal, newest_first[:_MOST_READ])
    return [short_repr(journal) for journal in islice(journals, _MOST)]


def _is_journal(path: str) -> bool:
    beginning = beginning_of(path)
    return bool(beginning) and is_journal(beginning)
