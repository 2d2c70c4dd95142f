"""Sending something to many sockets at the same time, so that a slow one holds up nobody else."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping


def send_to_all(outgoing: Mapping[socket.socket, Callable[[], bytes]], limit: float) -> None:
    """Send to each of these non-blocking sockets what its function returns, within `limit` seconds in all.

    Who has gone, or does not take it in time, does without: whoever waits for him next will say so.
    """
    left: dict[socket.socket, memoryview] = {}
    end = time.monotonic() + limit
    with selectors.PollSelector() as selector:  # which needs no file of its own: there may be none left
        for connection in outgoing:
            selector.register(connection, selectors.EVENT_WRITE)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(0.5):
                connection: socket.socket = key.fileobj  # type: ignore[no-redef]
                # Asked for only now: thousands of copies of a roster would fill the memory.
                data = left.pop(connection, None) or memoryview(outgoing[connection]())
                rest = _sent(connection, data)
                if rest:
                    left[connection] = rest
                else:
                    selector.unregister(connection)


def _sent(connection: socket.socket, data: memoryview) -> memoryview:
    """What is left after sending what the socket takes."""
    try:
        return data[connection.send(data) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]
