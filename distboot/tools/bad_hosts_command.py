"""`badhosts`: the hosts of a file of bad hosts, for `srun --exclude` and the like."""

from __future__ import annotations

import os

from ..agent.bad_hosts import names
from ..base.errors import DistbootError
from ..base.text import log_line, short_repr
from ..cli.output import emit
from ..cli.parser import Parser
from .input_files import opened

_LARGEST = 16 << 20  # characters of a file


def badhosts(arguments: list[str]) -> int:
    """The command `badhosts`."""
    parser = Parser(
        "badhosts",
        "Print the hosts of a file of bad hosts, with commas: srun --exclude=$(distboot badhosts).",
        detects=False,
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="the file (default: DISTBOOT_BAD_HOSTS_FILE)",
    )
    options = parser.parse_args(arguments)
    path = options.file or os.environ.get("DISTBOOT_BAD_HOSTS_FILE")
    if not path:
        parser.error("no file: name one, or set DISTBOOT_BAD_HOSTS_FILE")
    emit(",".join(names(_text(path))))
    return 0


def _text(path: str) -> str:
    """The content of a file; a file that is not there has no bad host yet."""
    try:
        with opened(path) as file:
            text = file.read(_LARGEST)
    except FileNotFoundError:
        log_line(
            None, f"{short_repr(path)} does not exist: no host is bad yet, or the name is wrong"
        )
        return ""
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DistbootError(
            "usage",
            f"{short_repr(path)} cannot be read: {why}",
            "name the file that DISTBOOT_BAD_HOSTS_FILE has made",
        ) from None
    if len(text) == _LARGEST:  # an endless device, for example
        raise DistbootError(
            "usage",
            f"{short_repr(path)} has {_LARGEST >> 20} MiB or more, and is no list of bad hosts",
            "name the file that DISTBOOT_BAD_HOSTS_FILE has made",
        )
    return text
