"""In the process of the script: how the exception that ends it is printed.

Each rank of a node writes to the same stream, and so do the agents. Python's own hook writes a
traceback in pieces, and lines of other processes could be between them: here it is collected first
and written at once. What a hook of the script prints is left alone.

This file is also read by the Python of an unmodified script: standard library only.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from .exceptions import OF_LIBRARIES, escaped, is_of_distboot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import TextIO

_LIBRARIES = (*OF_LIBRARIES, "<frozen ")


class _Collected(io.StringIO):
    """What is written to a stream, to be written in one piece."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def fileno(self) -> int:  # Python 3.13 looks whether it is a terminal
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def show(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> bool:
    """Let the hook that there is print an exception; returns whether it is where stderr goes by then."""
    stream = sys.stderr
    if not _reaches_file(stream):
        before(kind, error, trace)
        return False
    if before is not sys.__excepthook__:
        before(kind, error, trace)
        return True
    collected = _Collected(stream)
    sys.stderr = collected
    try:
        before(kind, error, trace)
    finally:
        sys.stderr = stream
    with suppress(Exception):  # as Python's hook does without a stderr
        _write(stream, collected.getvalue())
        stream.flush()
    return True


def _write(stream: TextIO, text: str) -> None:
    """Write a text, with escapes in place of what the encoding of a file lacks."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "utf-8"
        data = text.encode(encoding, "backslashreplace")
        stream.write(data.decode(encoding))


def _reaches_file(stream: TextIO | None) -> bool:
    """Whether a stream writes to a file; torch collects in memory what a hook prints."""
    if stream is None:
        return False
    try:
        return stream.fileno() >= 0
    except Exception:  # noqa: BLE001 - it may be any object of the script
        return False


def print_interrupted(trace: TracebackType) -> None:
    """Print in one line where Ctrl-C has arrived: all ranks of a node get it, and their tracebacks would be mixed."""
    place = _innermost_of_script(trace)
    code = place.tb_frame.f_code
    where = f"{code.co_name} ({os.path.basename(code.co_filename)}:{place.tb_lineno})"
    who = f"rank {os.environ['DISTBOOT_RANK']}"
    text = f"interrupted in {where}"
    line = f"distboot: {who} on {escaped(os.uname().nodename)}: {text}\n"
    if os.environ.get("DISTBOOT_LOG_FORMAT") == "json":
        from ..base.text import as_json

        line = as_json(who, text)
    # Not to a file in memory in place of stderr, whose lines torch's hook shows with a prefix: "[rank0]: "
    stderr = sys.__stderr__ or sys.stderr
    stderr.write(line)


def _innermost_of_script(trace: TracebackType) -> TracebackType:
    """The innermost frame of the script's own code, else the outermost one."""
    found = trace
    inner: TracebackType | None = trace
    # Not by `traceback`: its import calls `eval`, and Python forgets that Ctrl-C ends it
    while inner is not None:
        file = inner.tb_frame.f_code.co_filename
        is_of_library = any(part in file for part in _LIBRARIES)
        if not is_of_library and not is_of_distboot(file):
            found = inner
        inner = inner.tb_next
    return found
