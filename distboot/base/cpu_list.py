"""Lists of CPUs as the kernel writes them: `"0-3,8"`."""

from __future__ import annotations

from collections.abc import Iterable

from .patterns import pattern
from .text import runs

_LIST = pattern(r"(\d{1,5}(-\d{1,5})?(,|$))*")
_MOST = 16_384  # CPUs; Linux 6.17 knows 8,192


def is_cpu_list(text: str) -> bool:
    """Whether a text of anybody is such a list, or empty, and of a size to expand."""
    if not _LIST.fullmatch(text):
        return False
    count = sum(map(len, _spans(text)))
    return count <= _MOST


def expanded(listed: str) -> list[int]:
    """`"0-3,8"` -> `[0, 1, 2, 3, 8]`; `ValueError`: it is not such a list."""
    found: list[int] = []
    for span in _spans(listed):
        found += span
    return found


def written(cpus: Iterable[int]) -> str:
    """`[0, 1, 2, 3, 8]` -> `"0-3,8"`."""
    ordered = sorted(cpus)
    spans = []
    for run in runs(ordered):
        span = f"{run.start}-{run.stop - 1}"
        if len(run) == 1:
            span = str(run.start)
        spans.append(span)
    return ",".join(spans)


def _spans(listed: str) -> list[range]:
    found = []
    spans = filter(None, listed.split(","))
    for span in spans:
        ends = [*map(int, span.split("-"))]
        found.append(range(ends[0], ends[-1] + 1))
    return found
