"""What a later call of `init` may ask of the context that is there, and the local rank in `sys.argv`."""

from __future__ import annotations

import sys

from .. import frameworks
from ..base.errors import DistbootError
from ..base.text import log_line
from ..context import who_of
from ..detection.local_rank_option import (
    with_local_rank,
    without_local_rank,
    wrong_local_rank,
)
from .start import Current


def refuse_different(held: Current, options: frameworks.Options, launcher: str | None) -> None:
    """Refuse a different framework, and warn of arguments that have no effect any more."""
    if held.options.framework != options.framework:
        raise DistbootError(
            "already-initialized",
            f"init({options.framework!r}) after init({held.options.framework!r}) in the same "
            "process",
            "close() the first context, or use one framework a process",
        )
    differences = options.differences(held.options)
    if launcher not in (None, held.launcher, held.context.launcher):
        differences.append(f"launcher={launcher!r} after launcher={held.context.launcher!r}")
    if differences:
        log_line(
            who_of(held.context),
            f"warning: init() was called again: {', '.join(differences)} has no effect, the first "
            "context stays",
        )


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
