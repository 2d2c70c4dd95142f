"""`badhosts`: the hosts of a file of bad hosts, for `srun --exclude` and the like."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..agent.bad_hosts import entries, is_name
from ..base.errors import DistbootError, reason_of
from ..base.text import counted, log_line, short_repr
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
    hosts = []
    others = {}
    for number, entry in entries(_text(path)).items():
        if is_name(entry):
            hosts.append(entry)
        elif entry:
            others[number] = entry
    if others:
        _warn_of_lines(path, others)
    emit(",".join(dict.fromkeys(hosts)))
    return 0


def _warn_of_lines(path: str, others: Mapping[int, str]) -> None:
    """Warn of lines that name no host: the next job may use the host that was meant."""
    number, entry = next(iter(others.items()))
    text = f"line {number} of {short_repr(path)} is not the name of one host: {short_repr(entry)}"
    end = "it is left out"
    if len(others) > 1:
        text = f"{text}, and {counted(len(others) - 1, 'other line')}"
        end = "they are left out"
    log_line(None, f"warning: {text}; {end}")


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
        why = reason_of(error)
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
