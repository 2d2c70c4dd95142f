"""Whether the script reads `ctx.preempted`, before it has: then `init()` handles SIGTERM already.

A stop between `init()` and the first read would end a script that is about to read. A variable of
this name, or an attribute that is only set, is the script's own, and no such read.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

from .exceptions import OF_LIBRARIES

_NAME = "preempted"
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_OF_SCRIPT = (*OF_LIBRARIES, _OWN)


def mentions_preempted() -> bool:
    """Whether the code of the script reads an attribute of this name.

    Only functions on the stacks of this thread and of the main thread are searched, with the
    functions that they define: a module's code has all functions of that file.
    """
    frames = sys._current_frames()  # noqa: SLF001
    for thread in {threading.get_ident(), threading.main_thread().ident}:
        frame = frames.get(thread or 0)
        if any(map(_mentions, _codes_of_script(frame))):
            return True
    return False


def _codes_of_script(frame: FrameType | None) -> Iterator[CodeType]:
    """The code of each frame of a stack, without libraries and distboot."""
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in _NOT_OF_SCRIPT):
            yield frame.f_code
        frame = frame.f_back


def _mentions(code: CodeType) -> bool:
    if _NAME in code.co_names:
        from .attributes import reads_attribute  # here, as few scripts have the name

        if reads_attribute(code, _NAME):
            return True
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(map(_mentions, inner))
