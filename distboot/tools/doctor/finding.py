"""A finding: what one check saw, how bad it is, and the remedy."""

from __future__ import annotations

from functools import partial

from ...base.dataclass import dataclass
from ...base.errors import DistbootError
from ...rendezvous.protocol import of, text, valid

LONGEST = 2000  # characters of one text of a finding
# The worst first, as they are shown. A problem: the job will fail, hang, or fall back to something
# many times slower.
STATUSES = ("problem", "warning", "unknown", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. With `--job` the ranks send theirs to rank 0."""

    name: str = of(text(LONGEST))  # of the check, kebab-case, stable; `examine` adds it
    status: str = of(valid(STATUSES.__contains__, "status"))
    seen: str = of(text(LONGEST))  # what was found, in one line
    # What to do, as exact as possible; may have several lines
    remedy: str = of(text(LONGEST), default="")


ok = partial(Finding, "", "ok")  # nothing to do
warning = partial(Finding, "", "warning")  # may be slow, or not intended
problem = partial(Finding, "", "problem")
unknown = partial(Finding, "", "unknown")  # the machine does not tell


def problem_if(is_severe: bool, seen: str, remedy: str) -> Finding:
    """A problem, or else a warning."""
    if is_severe:
        return problem(seen, remedy)
    return warning(seen, remedy)


def refused(error: DistbootError) -> Finding:
    """The job itself would end with this error."""
    return problem(error.message.replace("\n", "; "), error.hint)
