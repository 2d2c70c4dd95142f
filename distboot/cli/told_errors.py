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

# What options that begin so say, is not in the environment: which rank this is, and of how many
_OF_PLACEMENT = ("--launcher", "--nproc", "--nnodes", "--node", "--master", "--rdzv")


@contextmanager
def told_of_options(words: list[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Print and tell an error of this block, in which the options are not known, if the rank is."""
    per_node = environ.get("DISTBOOT_NPROC_PER_NODE")
    try:
        yield
    except DistbootError as error:
        show_error(error)
        if not per_node and not any(word.startswith(_OF_PLACEMENT) for word in words):
            with suppress(DistbootError):
                _tell(error, detect_here(environ), environ)
        raise SystemExit(error.exit_code) from None


@contextmanager
def told_errors(
    options: SimpleNamespace, placement: Placement, environ: Mapping[str, str]
) -> Iterator[None]:
    """Print and tell an error of this block."""
    try:
        yield
    except DistbootError as error:
        show_error(error.of(placement.who))
        with suppress(DistbootError):
            ranks = 0
            if options.nproc_per_node:
                ranks = count_of(options, placement, environ)
            _tell(error, placement, environ, ranks)
        raise SystemExit(error.exit_code) from None


def _tell(
    error: DistbootError, placement: Placement, environ: Mapping[str, str], ranks: int = 0
) -> None:
    from ..startup.refusals import tell_others  # here, as most start

    tell_others(error, placement, environ, ranks)
