"""Looking up the name of a host under a time limit: the resolver itself may take half a minute to give up."""

from __future__ import annotations

import queue
import socket

from .address import is_address
from .threads import start_without_signals

Found = list[tuple[int, tuple[object, ...]]]  # family and socket address


def look_up(host: str, port: int | None, limit: float) -> Found:
    """Family and socket address of each address of a host.

    Raises:
        OSError: the name does not resolve, or did not within `limit` seconds.
    """
    if is_address(host):
        return _ask(host, port)
    answer: queue.SimpleQueue[Found | OSError] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put(_ask(host, port))
        except OSError as error:
            answer.put(error)

    start_without_signals("distboot-resolve", work)  # it may outlive us
    try:
        found = answer.get(timeout=limit)
    except queue.Empty:
        raise TimeoutError(f"no name server answered within {limit:.1f} s") from None
    if isinstance(found, OSError):
        raise found
    return found


def is_this_host(name: str) -> bool:
    """Whether a name is that of this very host, which it need not resolve for."""
    return name.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower()


def _ask(host: str, port: int | None) -> Found:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that cannot be one
        raise OSError(str(error)) from None
    return [(family, address) for family, _, _, _, address in found]
