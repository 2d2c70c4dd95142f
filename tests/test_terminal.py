"""The wrapper in a terminal: one Ctrl-C is one SIGINT, and stopping and continuing is the shell's business."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time

import pytest

_CHILD = """
import signal, sys, time
def got(number, frame):
    print("interrupt", flush=True)
signal.signal(signal.SIGINT, got)
print("ready", flush=True)
for line in sys.stdin:
    print("line", line.strip(), flush=True)
    if line.strip() == "end":
        sys.exit(5)
"""


def _read_until(terminal: int, text: str, seconds: float = 20) -> str:
    shown, end = "", time.monotonic() + seconds
    while text not in shown:
        assert time.monotonic() < end, f"never saw {text!r} in {shown!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode()
    return shown


@pytest.mark.parametrize("how", ["keys", "kill"])
def test_interrupt_and_input_in_a_terminal(clean_env: dict[str, str], how: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", _CHILD]
        os.execve(sys.executable, command, clean_env)
    try:
        _read_until(terminal, "ready")
        if how == "keys":
            os.write(terminal, b"\x03")
        else:  # docker run -t with STOPSIGNAL SIGINT: the child has not got it yet
            os.kill(pid, signal.SIGINT)
        _read_until(terminal, "interrupt")
        os.write(terminal, b"hello\n")
        assert "interrupt" not in _read_until(terminal, "line hello"), "one Ctrl-C is one SIGINT"
        os.write(terminal, b"end\n")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
    finally:
        os.close(terminal)
