"""Looking up the name of rank 0's host.

Under a time limit, because the resolver itself may take half a minute to give up; and so that a host finds itself even
where nobody has told it its own name.
"""

from __future__ import annotations

import queue
import socket
import threading

_Found = list[tuple[int, tuple[object, ...]]]


def reachable_at(host: str, port: int, limit: float) -> _Found:
    """Family and socket address of each way to a host; loopback, if it is this very host and its name does not resolve.

    Raises:
        OSError: the name does not resolve, or did not within `limit` seconds.
    """
    try:
        return look_up(host, port, limit)
    except OSError:
        if host.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower():
            return [(socket.AF_INET, ("127.0.0.1", port))]
        raise


def look_up(host: str, port: int, limit: float) -> _Found:
    """Family and socket address of each address of a host.

    Raises:
        OSError: the name does not resolve, or did not within `limit` seconds.
    """
    if ":" in host or host.replace(".", "").isdigit():
        return _ask(host, port)
    answer: queue.SimpleQueue[_Found | OSError] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put(_ask(host, port))
        except OSError as error:
            answer.put(error)

    threading.Thread(target=work, name="distboot-resolve", daemon=True).start()
    try:
        found = answer.get(timeout=limit)
    except queue.Empty:
        raise TimeoutError(f"no name server answered for {host!r} within {limit:.1f} s") from None
    if isinstance(found, OSError):
        raise found
    return found


def _ask(host: str, port: int) -> _Found:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that cannot be one
        raise OSError(str(error)) from None
    return [(family, address) for family, _, _, _, address in found]
