"""Run pieces of Python, each in a process of its own that has torch imported already: `python snippets.py FOLDER`.

The folder has the pieces as `N.py`, and gets the output of each as `N.out` and its exit code as `N.code`. As many run
side by side as there are CPUs. Importing torch takes longer than most of them, and is done once.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

with suppress(ImportError):
    import torch  # noqa: F401 - for those that are forked below


def main(folder: Path) -> None:
    running: dict[int, Path] = {}
    for piece in sorted(folder.glob("*.py"), key=lambda path: int(path.stem)):
        if len(running) >= (os.cpu_count() or 1):
            _wait(running)
        pid = os.fork()
        if pid == 0:
            _run(piece)
        running[pid] = piece
    while running:
        _wait(running)


def _wait(running: dict[int, Path]) -> None:
    pid, status = os.wait()
    if piece := running.pop(pid, None):  # else a guard that somebody has left behind
        piece.with_suffix(".code").write_text(str(os.waitstatus_to_exitcode(status)))


def _run(piece: Path) -> None:
    """Become the script: what it registers for its end is run when this process ends."""
    descriptor = os.open(piece.with_suffix(".out"), os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    work = piece.with_suffix("")
    work.mkdir()
    os.chdir(work)
    sys.argv = [str(piece)]
    try:
        exec(compile(piece.read_text(), str(piece), "exec"), {"__name__": "__main__"})
    except Exception:  # noqa: BLE001 - whatever it is, it goes into the output
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
