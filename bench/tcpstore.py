"""The counterpart of `rendezvous.py`: as many ranks join torch's TCPStore, as `init_process_group` lets them do.

    python bench/tcpstore.py root 1024    seconds, seconds of CPU, and megabytes

The server is the real one, in a process of its own. The clients are simulated, one loop for all as for the roll call,
and send what torch's own client sends (recorded with torch 2.13): torch's asks the name server for the name of each
connection, which would be most of what is measured where there is none. All are counted when the server is through; no
rank knows of another one by then.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
from datetime import timedelta

from rendezvous import Cost, Meter

_LIMIT = timedelta(seconds=120)
# What a client sends: a magic number; PING and a number of four bytes, which comes back; ADD 1 to "init/", whose new
# value of eight bytes comes back.
_VALIDATE = bytes.fromhex("00cef7853c")
_PING = bytes.fromhex("0d")
_ADD = (
    bytes.fromhex("04") + len(b"init/").to_bytes(8, "little") + b"init/" + (1).to_bytes(8, "little")
)


def clients(port: int, world_size: int) -> None:
    """All other ranks: each connects, says who speaks, and counts itself."""
    print("ready", flush=True)
    sys.stdin.readline()
    poll, waiting = select.epoll(), {}
    for rank in range(1, world_size):
        connection = socket.create_connection((f"127.0.{rank % 200}.{1 + rank % 250}", port))
        connection.sendall(_VALIDATE + _PING + rank.to_bytes(4, "little"))
        waiting[connection.fileno()] = connection, _PING
        poll.register(connection, select.EPOLLIN)
    joined: list[socket.socket] = []
    while waiting:
        for descriptor, _ in poll.poll():
            connection, stage = waiting[descriptor]
            answer = connection.recv(64)
            if stage == _PING:
                assert len(answer) == 4, answer
                connection.sendall(_ADD)
                waiting[descriptor] = connection, _ADD
            else:
                assert len(answer) == 8, answer
                poll.unregister(connection)
                joined.append(waiting.pop(descriptor)[0])
    sys.stdin.readline()
    os._exit(0)


def root(world_size: int) -> Cost:
    """Rank 0: from the first connection until all are counted."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    others = subprocess.Popen(
        [sys.executable, __file__, "clients", str(port), str(world_size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert others.stdin is not None
    assert others.stdout is not None
    others.stdout.readline()
    meter = Meter()
    others.stdin.write("\n")
    others.stdin.flush()
    select.select([listener], [], [])
    meter.start()
    store = TCPStore(
        "127.0.0.1", port, world_size, True, _LIMIT, True, master_listen_fd=listener.detach()
    )
    cost = meter.stop()
    others.communicate("\n", timeout=60)
    del store
    return cost


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if sys.argv[1] == "clients":
        clients(int(sys.argv[2]), int(sys.argv[3]))
    else:
        print(*root(int(sys.argv[2])))
        sys.stdout.flush()
        os._exit(0)  # thousands of sockets need not be closed one by one
