"""The local rank in `sys.argv`, as `init` finds it or puts it there."""

from __future__ import annotations

import sys

from ..base.text import log_line
from ..context import who_of
from ..detection.local_rank_option import (
    with_local_rank,
    without_local_rank,
    wrong_local_rank,
)
from .start import Current


def adjust_arguments(held: Current, pass_local_rank: bool | None, *, is_new: bool) -> None:
    """Put the local rank into `sys.argv`, or remove it; or warn of a different one."""
    given = sys.argv[1:]
    if pass_local_rank:
        sys.argv[1:] = with_local_rank(given, held.local_rank)
    elif pass_local_rank is False:
        sys.argv[1:] = without_local_rank(given)
    elif is_new:
        warning = wrong_local_rank(given, held.local_rank)
        if warning is not None:
            log_line(who_of(held.context), warning)
