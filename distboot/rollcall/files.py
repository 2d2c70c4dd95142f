"""How many files, and so connections, rank 0 may have open. The usual soft limit is 1,024."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

_OWN = 64  # files that the process has open for itself


def files_allowed() -> int:
    """The soft limit of this process (getrlimit(2))."""
    import resource  # not on Windows, where nothing of this runs; here, as elsewhere, so that importing works

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_files(connections: int, least: int, say: Callable[[str], None]) -> int | None:
    """Raise the soft limit for so many connections as far as may be, and `say` it when that is not the `least` of them.

    Returns:
        What it was; None if it stays.
    """
    import resource

    needed = connections + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return None
    reachable = needed if hard == unlimited else min(needed, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if files_allowed() < least + _OWN:
        say(
            f"warning: {least + _OWN} open files are needed for the connections of all ranks, and this process may "
            f"have {files_allowed()}: raise the limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=…)"
        )
    return soft
