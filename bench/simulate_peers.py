"""All ranks but rank 0 as sockets of one process, which does a step when it is told to."""

from __future__ import annotations

import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from simulate_messages import BEAT, HELLO, Line, lines_of

from distboot.rendezvous.protocol import HEADER, Frames, most_from_rank_0

_MOST = most_from_rank_0(100_000)  # bytes of a frame


class Peers:
    """That process, as rank 0 drives it; every step says what it took."""

    def __init__(self, port: int, world_size: int) -> None:
        command = [sys.executable, __file__, str(port), str(world_size)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.done()  # it is up

    def do(self, step: str) -> float:
        """Let them do a step."""
        self.begin(step)
        return self.done()

    def begin(self, step: str) -> None:
        """Let them begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(step + "\n")
        self._process.stdin.flush()

    def done(self) -> float:
        """Wait until they have done it."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End them."""
        self._process.kill()
        self._process.communicate()


class _All:
    """All lines."""

    def __init__(self, port: int, world_size: int) -> None:
        self._port = port
        self._lines = lines_of(world_size)
        self._connections: list[socket.socket] = []
        for line in self._lines:
            line.record  # noqa: B018 - made now, as it takes time
        self._say: dict[str, Callable[[Line], bytes]] = {
            "ready": Line.ready, "watch": Line.watch,
            "beat": lambda _: BEAT, "stall": Line.stall, "position": Line.position,
            "alike": Line.place, "different": lambda line: line.place(alike=False),
        }  # fmt: skip

    def step(self, step: str) -> float:
        """Seconds of CPU; with "meet" and "die" seconds."""
        start, clock = time.process_time(), time.perf_counter()
        if step in self._say:
            for line, connection in zip(self._lines, self._connections, strict=True):
                connection.sendall(self._say[step](line))
        else:
            steps: dict[str, Callable[[], None]] = {
                "read": self._read,
                "meet": self._meet, "die": self._die,
            }  # fmt: skip
            steps[step]()
        return (
            time.perf_counter() - clock if step in ("meet", "die") else time.process_time() - start
        )

    def _read(self) -> None:
        for connection in self._connections:
            _read_message(connection)

    def _connected(self, number: int) -> socket.socket:
        # From one address there are 28,000 ports to another one.
        connection = socket.create_connection(
            (f"127.0.{number % 200}.{1 + number % 250}", self._port)
        )
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the real ones have it
        return connection

    def _meet(self) -> None:
        """Connect, report, and read the membership: all of them at the same time."""
        reading: dict[int, _Reading] = {}
        left = len(self._lines)
        with selectors.DefaultSelector() as selector:
            while left:
                here = len(self._connections)
                for line in self._lines[here : here + 16]:  # the others want to be heard, too
                    connection = self._connected(line.rank)
                    connection.sendall(HELLO)
                    selector.register(connection, selectors.EVENT_READ, line)
                    self._connections.append(connection)
                    reading[connection.fileno()] = _Reading()
                are_all_here = len(self._connections) == len(self._lines)
                for key, _ in selector.select(None if are_all_here else 0.0):
                    assert isinstance(key.fileobj, socket.socket)
                    if reading[key.fd].read(key.fileobj):
                        if reading[key.fd].messages == 1:  # the challenge
                            key.fileobj.sendall(key.data.record)
                        else:
                            selector.unregister(key.fileobj)
                            left -= 1

    def _die(self) -> None:
        """One rank goes; until all others have been told."""
        self._connections.pop().close()
        for connection in self._connections:
            _read_message(connection)


class _Reading:
    """Counts messages without looking at what they are."""

    def __init__(self) -> None:
        self.messages = 0
        self._head = b""
        self._left = 0

    def read(self, connection: socket.socket) -> bool:
        """Whether this was the end of one."""
        data = connection.recv(1 << 20)
        if not data:
            raise SystemExit("rank 0 has dropped a line")
        if self._left == 0:
            self._head += data
            if len(self._head) < HEADER:
                return False
            length = int.from_bytes(self._head[:4], "big") & 0x7FFFFFFF
            self._left, self._head = length + HEADER - len(self._head), b""
        else:
            self._left -= len(data)
        self.messages += self._left == 0
        return self._left == 0


def _read_message(connection: socket.socket) -> None:
    """The next one that is no beat."""
    frames, found = Frames(_MOST), False
    while not found:
        data = connection.recv(min(frames.missing, 1 << 20))
        if not data:
            raise SystemExit("rank 0 has dropped a line")
        found = any(frame.body for frame in frames.feed(data))


def allow_all_files() -> None:
    """As many as the hard limit has."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    allow_all_files()
    everybody = _All(*map(int, sys.argv[1:]))
    print(0.0, flush=True)
    for order in sys.stdin:
        print(everybody.step(order.strip()), flush=True)
