"""The signals that the wrapper takes one by one, and the terminal that may send some of them."""

from __future__ import annotations

import os
import signal

from ..base.process import FROM_OUTSIDE

# What the terminal sends to every process of the foreground group, the child included
FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH}
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}  # HUP is "reload" to some
WAITED_FOR = {
    *FROM_OUTSIDE,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGCONT,
    signal.SIGWINCH,
    signal.SIGCHLD,
    signal.SIGALRM,
}


def stop_ignoring() -> None:
    """Let signals arrive that are ignored by default.

    While SIGCHLD is ignored, it never arrives, and the kernel discards the child's exit code. macOS
    drops signals that are ignored by default, even when they are blocked. Starting a program undoes
    a handler.
    """
    for number in (signal.SIGCHLD, signal.SIGWINCH):
        signal.signal(number, lambda *_: None)  # never runs, as the signals are blocked


def next_signal() -> tuple[int, bool]:
    """The next signal, and whether the kernel sent it, as it does for the keys of a terminal."""
    if not hasattr(signal, "sigwaitinfo"):  # on macOS
        return signal.sigwait(WAITED_FOR), True
    info = signal.sigwaitinfo(WAITED_FOR)
    is_from_kernel = info.si_code > 0  # SI_KERNEL; kill() and its like have 0 and less
    return info.si_signo, is_from_kernel


def on_terminal() -> bool:
    """Whether a shell's job control rules our process group.

    This process reads from its terminal, or the terminal sends its signals to the group.
    """
    try:
        # A session of its own, as torchrun's workers have, has no terminal, whatever stdin is.
        with open("/dev/tty", "rb") as terminal:
            if os.isatty(0):
                return True
            foreground = os.tcgetpgrp(terminal.fileno())
            return foreground == os.getpgrp()
    except OSError:
        return False
