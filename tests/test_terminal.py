"""The wrapper in a terminal: one Ctrl-C is one SIGINT, and stopping and continuing is the shell's business."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time

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
    """What the terminal shows, up to and with `text`."""
    shown, end = "", time.monotonic() + seconds
    while text not in shown:
        assert time.monotonic() < end, f"never saw {text!r} in {shown!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode()
    return shown


def test_interrupt_and_input_in_a_terminal(clean_env: dict[str, str]) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable, [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", _CHILD], clean_env
        )
    try:
        _read_until(terminal, "ready")
        os.write(terminal, b"\x03")
        _read_until(terminal, "interrupt")
        os.write(terminal, b"hello\n")
        assert "interrupt" not in _read_until(terminal, "line hello"), "one Ctrl-C is one SIGINT"
        os.write(terminal, b"end\n")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
    finally:
        os.close(terminal)


def test_interrupt_by_kill_is_forwarded_in_a_terminal(clean_env: dict[str, str]) -> None:
    # docker run -t with STOPSIGNAL SIGINT: not the keys of the terminal, so the child has not got it yet.
    command = [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", _CHILD]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, clean_env)
    try:
        _read_until(terminal, "ready")
        os.kill(pid, signal.SIGINT)
        _read_until(terminal, "interrupt")
        os.write(terminal, b"end\n")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
    finally:
        os.close(terminal)
