"""Packets to and from one host are late: what `tc netem` does, on kernels that are built without it.

It runs in the network of the switch of tests/cluster. The host's port leaves the bridge, and a tap takes its place
there; each frame waits here on its way from one to the other.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hosts import Hosts

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000  # linux/if_tun.h
_ALL = 0x0003  # ETH_P_ALL
_TAP = "slow0"
# The host computes all checksums, and cuts segments itself: SIOCETHTOOL with ETHTOOL_STXCSUM.
_WHOLE = """
import array, fcntl, socket, struct
value = array.array("I", [0x17, 0])
fcntl.ioctl(socket.socket(), 0x8946, struct.pack("16sP", b"eth0", value.buffer_info()[0]))
"""


@contextmanager
def slow_host(hosts: Hosts, name: str, seconds: float) -> Iterator[None]:
    """Frames to and from a host take so much longer."""
    switch = (hosts.root / "run" / "pids").read_text().split()[0]
    assert hosts.run(name, [sys.executable, "-c", _WHOLE]).returncode == 0
    here = ["nsenter", "--target", switch, "--net", "--", sys.executable, str(Path(__file__))]
    command = [*here, f"port{hosts.names.index(name)}", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def main(port: str, seconds: float) -> None:
    """Until it is ended."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", _TAP.encode(), _TAP_WITHOUT_HEADER))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    wire.bind((port, 0))
    for words in (f"set {port} nomaster promisc on", f"set {_TAP} master br0 up"):
        subprocess.run(["ip", "link", *words.split()], check=True)
    print("ready", flush=True)
    both: list[Any] = [tap, wire]
    to_bridge: deque[tuple[float, bytes]] = deque()
    to_host: deque[tuple[float, bytes]] = deque()
    while True:
        ends = [queue[0][0] for queue in (to_bridge, to_host) if queue]
        ready = select.select(
            both, [], [], max(min(ends) - time.monotonic(), 0.0) if ends else None
        )[0]
        now = time.monotonic()
        if wire in ready:
            frame, address = wire.recvfrom(1 << 16)
            if address[2] != socket.PACKET_OUTGOING:
                to_bridge.append((now + seconds, frame))
        if tap in ready:
            to_host.append((now + seconds, os.read(tap, 1 << 16)))
        while to_bridge and to_bridge[0][0] <= now:
            os.write(tap, to_bridge.popleft()[1])
        while to_host and to_host[0][0] <= now:
            wire.send(to_host.popleft()[1])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
