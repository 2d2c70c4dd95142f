"""A command on a terminal of its own, with what it shows there."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LIMIT = 60.0  # seconds


class Terminal:
    """What a command writes to its terminal."""

    def __init__(self, file: int, process: subprocess.Popen[bytes], limit: float) -> None:
        self._file = file
        self._limit = limit  # seconds for anything to be shown
        self.process = process
        self.text = ""

    def wait_for(self, text: str) -> None:
        """Read until a text is shown."""
        end = time.monotonic() + self._limit
        while text not in self.text:
            assert time.monotonic() < end, self.text
            assert self._read(end), self.text

    def type(self, keys: bytes) -> None:
        """Let somebody type there."""
        os.write(self._file, keys)

    def finish(self) -> int:
        """Read all that follows; the exit code."""
        end = time.monotonic() + self._limit
        while self._read(end):
            pass
        return self.process.wait(self._limit)

    def _read(self, end: float) -> bool:
        """Read what there is; whether more may follow."""
        ready, _, _ = select.select([self._file], [], [], max(end - time.monotonic(), 0))
        assert ready, self.text
        try:
            data = os.read(self._file, 4096)
        except OSError:  # no process has the terminal any more
            return False
        self.text += data.decode()
        return bool(data)


@contextmanager
def terminal(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    columns: int = 120,
    folder: Path | None = None,
    limit: float = LIMIT,
) -> Iterator[Terminal]:
    """Run a command whose output is a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={"TERM": "xterm", **environ},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        yield Terminal(master, process, limit)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(LIMIT)
        os.close(master)
