"""The file of the report: whether it can be written, before anything starts; and all of it or nothing, at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..errors import DistbootError, first_line, quoted

_OWN_OUTPUT = ("/dev/std", "/dev/fd/", "/proc/")  # the guard's is not the script's, and a log is not to be replaced


def refuse_unwritable(path: str) -> None:
    """Refuse a path at which there could be no report, as it will be hours until it is written.

    Raises:
        DistbootError: `output-failed`.
    """
    try:
        _try(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DistbootError(
            "output-failed",
            f"the report {quoted(path)} cannot be written: {why}",
            "let --report or DISTBOOT_REPORT name a file in a folder of rank 0's host that is there and can be written "
            "to",
        ) from None


def _try(path: str) -> None:
    if os.path.isdir(path):
        raise IsADirectoryError(0, "it is a directory")
    if path.startswith(_OWN_OUTPUT):
        raise ValueError("what is there is another file for each process")
    if not _is_no_file(path):  # else a pipe whose reader is still to come, say
        descriptor, part, _ = _begun(path)
        os.close(descriptor)
        os.unlink(part)


def try_to_write(path: str, content: Callable[[], Mapping[str, object]]) -> str | None:
    """Write the report; a warning if it cannot be written, which is no reason for the job to end in another way."""
    try:
        write(path, content())
    except OSError as error:
        why = error.strerror or str(error)
    except Exception as error:  # noqa: BLE001 - a defect of ours
        why = f"{type(error).__name__}: {first_line(error)}"
    else:
        return None
    return f"warning: the report could not be written: {quoted(path)}: {why}"


def write(path: str, content: Mapping[str, object]) -> None:
    """Write the report: as a page, if the name of the file ends in .html, else as JSON.

    Raises:
        OSError: it cannot be written.
    """
    if path.lower().endswith(".html"):
        from .page import page  # here, as most jobs have none

        _write(path, page(content))
    else:
        _write(path, json.dumps(content, indent=2) + "\n")


def _write(path: str, text: str) -> None:
    """All of it or nothing; but for what is no file: a device, a pipe."""
    data = text.encode(errors="backslashreplace")
    if _is_no_file(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # a pipe that nobody reads is no reason to wait
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        return
    descriptor, part, place = _begun(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, place)
    except BaseException:  # a signal, too
        with suppress(OSError):
            os.unlink(part)
        raise


def _is_no_file(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _begun(path: str) -> tuple[int, str, str]:
    """A new file, open and with its name, and the place for which it is: beside it, as only there it can be renamed."""
    try:
        # Through a link: the kernel refuses that of another user (fs.protected_symlinks), where we would rename.
        mode: int | None = os.stat(path).st_mode & 0o777
    except FileNotFoundError:
        mode = None
    place = os.path.realpath(path) if os.path.islink(path) else path
    part = f"{place}.{os.urandom(4).hex()}.part"
    # Nobody else's file, and through no link of anybody's; for no more eyes than what it takes the place of.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666 if mode is None else mode)
    if mode is not None:
        with suppress(OSError):  # what the umask has taken away
            os.fchmod(descriptor, mode)
    return descriptor, part, place
