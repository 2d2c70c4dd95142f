"""Threads that receive no signals, and work that they do within a timeout or at the same time."""

from __future__ import annotations

import signal
import threading

from .errors import with_too_few_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    S = TypeVar("S")
    T = TypeVar("T")


def start_without_signals(name: str, work: Callable[[], object]) -> threading.Thread:
    """Start a thread that receives no signal, and does not keep the process alive."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with with_too_few_processes():
            thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def result_within(timeout: float, name: str, work: Callable[[], T], late: str) -> T:
    """What `work` returns or raises in a thread of this name.

    After the timeout, in seconds: a TimeoutError with the text `late`; the thread goes on.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)

    start_without_signals(name, run).join(timeout)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(late)
    return results[0]


def at_once(work: Callable[[S], T], on: Sequence[S]) -> list[T]:
    """The results for each of these, all at the same time, as they may wait for each other."""
    if len(on) == 1:
        return [work(on[0])]
    from concurrent.futures import ThreadPoolExecutor  # here, as only several need it

    with with_too_few_processes(), ThreadPoolExecutor(len(on)) as pool:
        return list(pool.map(work, on))
