"""A connection of the roll call that is handed over to what comes after it."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from .wire import Session


class Handed(NamedTuple):
    """An open connection.

    Attributes:
        ranks: at the other end: one; or, at rank 0, all for which the relay of their node speaks.
        connection: the socket.
        session: what its messages are sealed with.
        is_relay: whether a relay is at the other end.
    """

    ranks: tuple[int, ...]
    connection: socket.socket
    session: Session
    is_relay: bool = False


def say_goodbye(connections: Iterable[Handed]) -> None:
    """Tell those at the other ends that these connections will not be used any more, and end them."""
    for _, connection, session, _ in connections:
        with suppress(OSError):
            connection.send(session.sealed("bye", "null"))
        connection.close()
