"""What the wrapper refuses before its rank joins: the ranks that have joined learn of it, too.

To tell them may take seconds, in which a signal may end this process: it prints the error first.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress

from ..base.errors import DistbootError
from ..detection.here import detect_here
from .nproc_per_node import count_of
from .output import show_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import SimpleNamespace

    from ..detection.placement import Placement

# Options that begin so place this process: its rank is not in the environment alone
_OF_PLACEMENT = ("--launcher", "--nproc", "--nnodes", "--node", "--master", "--rdzv")


@contextmanager
def report_option_errors(argv: list[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Print an error of this block, in which the options are read.

    The other ranks receive it, too, unless an option may have placed this process.
    """
    per_node = environ.get("DISTBOOT_NPROC_PER_NODE")
    try:
        yield
    except DistbootError as error:
        show_error(error)
        if not per_node and not any(word.startswith(_OF_PLACEMENT) for word in argv):
            with suppress(DistbootError):
                _report(error, detect_here(environ), environ)
        raise SystemExit(error.exit_code) from None


@contextmanager
def report_errors(
    options: SimpleNamespace, placement: Placement, environ: Mapping[str, str]
) -> Iterator[None]:
    """Print an error of this block, and report it to the other ranks."""
    try:
        yield
    except DistbootError as error:
        show_error(error.of(placement.who))
        with suppress(DistbootError):
            ranks = 0
            if options.nproc_per_node:
                ranks = count_of(options, placement, environ)
            _report(error, placement, environ, ranks)
        raise SystemExit(error.exit_code) from None


def _report(
    error: DistbootError, placement: Placement, environ: Mapping[str, str], ranks: int = 0
) -> None:
    from ..startup.refusals import tell_others  # here, as most start

    tell_others(error, placement, environ, ranks)
