"""The link of one host is bad: frames are late, slow, lost, or come from no other host than some.

What `tc netem` and `tbf` do, on kernels that are built without them. It runs in the network of the switch of
tests/cluster. The host's port leaves the bridge, and a tap takes its place there; each frame waits here on its way
from one to the other.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hosts import Hosts

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000  # linux/if_tun.h
_ALL = 0x0003  # ETH_P_ALL
_TAP = "slow0"
_IPV4 = b"\x08\x00"
_TYPE = slice(12, 14)  # of an Ethernet frame
_SOURCE = slice(26, 30)  # of the packet of IPv4 in it
# The host computes all checksums, and cuts segments itself: SIOCETHTOOL with ETHTOOL_STXCSUM.
_WHOLE = """
import array, fcntl, socket, struct
value = array.array("I", [0x17, 0])
fcntl.ioctl(socket.socket(), 0x8946, struct.pack("16sP", b"eth0", value.buffer_info()[0]))
"""


@contextmanager
def bad_link(
    hosts: Hosts,
    name: str,
    *,
    delay: float = 0.0,  # seconds, each way
    rate: float = 1e12,  # bytes a second, each way
    loss: float = 0.0,  # part of the frames, each way
    deaf_to: str = "",  # the address of a host from which nothing arrives
) -> Iterator[None]:
    """Frames to and from a host pass so."""
    switch = (hosts.root / "run" / "pids").read_text().split()[0]
    assert hosts.run(name, [sys.executable, "-c", _WHOLE]).returncode == 0
    how = json.dumps({"delay": delay, "rate": rate, "loss": loss, "deaf_to": deaf_to})
    here = ["nsenter", "--target", switch, "--net", "--", sys.executable, str(Path(__file__))]
    port = f"port{hosts.names.index(name)}"
    with subprocess.Popen([*here, port, how], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()
            _put_back(switch, port)


def _put_back(switch: str, port: str) -> None:
    for words in (f"set {port} promisc off", f"set {port} master br0"):
        command = ["nsenter", "--target", switch, "--net", "--", "ip", "link", *words.split()]
        subprocess.run(command, check=True)


class _Way:
    """One way of the link."""

    def __init__(
        self, send: Callable[[bytes], object], delay: float, rate: float, loss: float
    ) -> None:
        self._send = send
        self._delay = delay
        self._rate = rate
        self._loss = loss
        self._free_at = 0.0  # when the frames so far have left
        self._frames: deque[tuple[float, bytes]] = deque()

    def take(self, frame: bytes, now: float) -> None:
        if random.random() < self._loss:
            return
        self._free_at = max(self._free_at, now) + len(frame) / self._rate
        if len(self._frames) < 1000:  # a queue of a switch
            self._frames.append((self._free_at + self._delay, frame))

    def due(self) -> float:
        return self._frames[0][0] if self._frames else float("inf")

    def pass_on(self, now: float) -> None:
        while self.due() <= now:
            self._send(self._frames.popleft()[1])


def main(port: str, delay: float, rate: float, loss: float, deaf_to: str) -> None:
    """Until it is ended."""
    deaf = socket.inet_aton(deaf_to) if deaf_to else b""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", _TAP.encode(), _TAP_WITHOUT_HEADER))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    wire.bind((port, 0))
    for words in (f"set {port} nomaster promisc on", f"set {_TAP} master br0 up"):
        subprocess.run(["ip", "link", *words.split()], check=True)
    print("ready", flush=True)
    both: list[Any] = [tap, wire]
    to_bridge = _Way(lambda frame: os.write(tap, frame), delay, rate, loss)
    to_host = _Way(wire.send, delay, rate, loss)
    while True:
        due = min(to_bridge.due(), to_host.due())
        limit = None if due == float("inf") else max(due - time.monotonic(), 0.0)
        ready = select.select(both, [], [], limit)[0]
        now = time.monotonic()
        if wire in ready:
            frame, address = wire.recvfrom(1 << 16)
            if address[2] != socket.PACKET_OUTGOING:
                to_bridge.take(frame, now)
        if tap in ready:
            frame = os.read(tap, 1 << 16)
            is_heard = frame[_TYPE] != _IPV4 or frame[_SOURCE] != deaf
            if is_heard:
                to_host.take(frame, now)
        to_bridge.pass_on(now)
        to_host.pass_on(now)


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
