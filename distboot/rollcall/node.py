"""The ranks of a node in a large job share one connection to rank 0: that of the relay, which the first of them starts.

Whoever comes first is told by the kernel: an abstract Unix socket has one owner in a network, and it is gone when
nobody has it open. Whatever goes wrong with it, a rank goes to rank 0 itself, as in a small job.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from .. import detached, handoff
from ..placement import Placement
from ..record import Record
from .wire import Membership

RELAYS_FROM = 4096  # ranks: below it a connection for each costs rank 0 up to half a second (docs/explanation/scale.md)
CREDENTIALS = struct.Struct("3i")  # struct ucred, unix(7): pid, uid, gid


def is_used(placement: Placement) -> bool:
    """Whether the ranks of this job go through relays, as far as this one knows."""
    return placement.world_size >= RELAYS_FROM and placement.local_world_size != 1 and sys.platform == "linux"


def connections_of(own: Record) -> int:
    """How many connections rank 0 has when all ranks are there: at least so many, where it does not know its node."""
    if own.world_size < RELAYS_FROM:
        return own.world_size
    return own.world_size // own.local_world_size if own.local_world_size else 1


def connected(
    hosts: Sequence[str],
    ports: Sequence[int],
    own: Record,
    membership: Membership,
    *,
    join_timeout: float,
    source: str,
    again: bool,
) -> socket.socket | None:
    """A connection to the relay of this node, which is started if there is none; None if that fails.

    Args:
        hosts: where rank 0 may be.
        ports: where it may listen.
        own: this rank's record.
        membership: what tells the ranks of this job from everybody else.
        join_timeout: seconds for the relay to reach rank 0.
        source: what says that rank 0 is there.
        again: whether these ranks have met before, in the wrappers around them.
    """
    # Of Popen: no Python, or none in time; and OSError: also where there is no /proc.
    with suppress(OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        name = name_of(membership.job, own.world_size, hosts, again=again)
        with socket.socket(socket.AF_UNIX) as listener:
            if _is_first(listener, name):
                listener.listen(1024)
                plan = {
                    "hosts": list(hosts), "ports": list(ports), "starter": own.rank,
                    "job": membership.job, "secret": membership.secret,
                    "join_timeout": join_timeout, "source": source, "world_size": own.world_size,
                }  # fmt: skip
                _start(listener, json.dumps(plan))
        return _connection(name)
    return None


def name_of(job: str, world_size: int, hosts: Sequence[str], *, again: bool) -> str:
    """The name of the relay's socket on each node: that of the wrappers' roll call may be about to end."""
    # Of each container its own: the relay ends with the container in which it was started. And of each job: of two
    # without an id, at one port, rank 0 is elsewhere, or this very rank finds out in another way.
    container = os.stat("/proc/self/ns/pid").st_ino
    return f"\0distboot-{os.getuid()}-{handoff.digest(f'{job}:{world_size}:{hosts}:{again}:{container}')}"


def is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end of a Unix socket."""
    # Anybody on this host may own the name, or connect to it.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _is_first(listener: socket.socket, name: str) -> bool:
    try:
        listener.bind(name)
    except OSError:
        return False
    return True


def _start(listener: socket.socket, plan: str) -> None:
    ours, theirs = socket.socketpair()
    # Not under the numbers of the standard streams, which may be closed here, and are others' there.
    files = [fcntl.fcntl(each.fileno(), fcntl.F_DUPFD_CLOEXEC, 3) for each in (listener, theirs)]
    with ours, theirs:
        # By name, as what it does after the roll call is a matter of the lifeline.
        try:
            started = detached.start("distboot.lifeline.relay", *files)
        finally:
            for file in files:
                os.close(file)
        ours.sendall(plan.encode() + b"\n")
        started.wait(detached.START_LIMIT)


def _connection(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(10.0)
        connection.connect(name)
        if is_ours(connection):
            return connection
    except OSError:
        pass
    connection.close()
    return None
