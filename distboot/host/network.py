"""The network of this host: its interfaces, the variables that tell Gloo, NCCL and TensorPipe which one to use, and
looking up a name under a time limit, as the resolver itself may take half a minute to give up, or again and again.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from ..errors import DistbootError
from ..process import result_within
from ..text import is_address, log_line, short_repr, without_mapping

_SIOCGIFCONF = 0x8912  # from linux/sockios.h; netdevice(7): all addresses of IPv4
# One of its entries: a name, and an address
_IFREQ = struct.Struct(f"16s4x4s{2 * struct.calcsize('P')}x")
_MOST_ADDRESSES = 1024

_GLOO, _NCCL, _TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
_HOROVOD = "HOROVOD_GLOO_IFACE"

# gRPC, http_proxy_mapper.cc: in this order, and in lower case only. The first that is there is the one it reads.
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
NO_PROXIES = ("no_grpc_proxy", "no_proxy")

PROGRESS = 5.0  # seconds between two lines that say what is being waited for, at first
LEAST_PROGRESS = 60.0  # and later: a thousand ranks may say the same

Found = list[tuple[int, tuple[object, ...]]]  # family and socket address


def addresses() -> list[tuple[str, str]]:
    """Interface and address of all addresses of this host; empty where the kernel is not Linux or does not tell."""
    found: list[tuple[str, str]] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        room = array("B", bytes(_MOST_ADDRESSES * _IFREQ.size))
        wanted = struct.pack("iP", len(room), room.buffer_info()[0])
        length, _ = struct.unpack("iP", fcntl.ioctl(kernel, _SIOCGIFCONF, wanted))
        for name, its in _IFREQ.iter_unpack(room.tobytes()[:length]):
            # Also of eth0:1
            found.append((os.fsdecode(re.split(rb"[\0:]", name)[0]), socket.inet_ntoa(its)))
    # fd000000000000000000000000000002 02 40 00 80     eth0
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for digits, *_, name in map(str.split, file):
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None for loopback, which carries nothing to another host."""
    address = without_mapping(address.partition("%")[0])
    name = next((name for name, its in addresses() if its == address), None)
    return None if name == "lo" else name


def variables(interface: str | None, environ: Mapping[str, str]) -> dict[str, str | None]:
    """What to set so that the frameworks use this interface: only what is not set yet."""
    if interface is None:
        return {}
    # NCCL takes names for beginnings of names, unless a = comes first.
    wanted = {_GLOO: interface, _NCCL: f"={interface}", _TENSORPIPE: interface}
    is_set = {*environ, _NCCL} if _is_in_a_file(environ) else {*environ}
    return {name: value for name, value in wanted.items() if name not in is_set}


def _is_in_a_file(environ: Mapping[str, str]) -> bool:
    """Whether an administrator has set it for NCCL, which prefers the environment (NCCL documentation, nccl.conf)."""
    own = environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for path in (own, "/etc/nccl.conf"):
        with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
            if any(line.strip().startswith(f"{_NCCL}=") for line in file):
                return True
    return False


def refuse_unknown(environ: Mapping[str, str], present: Sequence[str] | None = None) -> None:
    """Refuse an interface that the user named and that this host, with the interfaces `present`, does not have."""
    for variable in (_GLOO, _NCCL, _TENSORPIPE, _HOROVOD):
        text = environ.get(variable, "")
        if not text or text.startswith("^"):  # NCCL's way to name those that it is not to use
            continue
        present = [name for _, name in socket.if_nameindex()] if present is None else present
        # NCCL uses whatever matches of its list, the others need all of theirs.
        missing = next((name for name in text.split(",") if name not in present), None)
        if variable == _NCCL:
            missing = None if any(nccl_means(text, name) for name in present) else text
        if missing is not None:
            raise DistbootError(
                "unknown-interface",
                f"{variable}={short_repr(text)}, and this host has no interface "
                f"{short_repr(missing.removeprefix('='))}: it has {', '.join(present)}",
                f"name one of these, or unset {variable}: over several nodes the one that reaches rank 0 is then used",
            )


def nccl_means(choice: str, name: str) -> bool:
    """Whether a list of NCCL's means this one: beginnings of names, or after a = whole ones."""
    # A port or an alias may follow the name: eth0:1
    words = [word.partition(":")[0] for word in choice.removeprefix("=").split(",") if word]
    return name in words if choice.startswith("=") else name.startswith(tuple(words))


def look_up(host: str, port: int | None, limit: float) -> Found:
    """Family and socket address of each address of a host."""
    ask, late = partial(_ask, host, port), f"no name server answered within {limit:.1f} s"
    return ask() if is_address(host) else result_within(limit, "distboot-resolve", ask, late)


def is_this_host(name: str) -> bool:
    """Whether a name is that of this very host, which it need not resolve for."""
    return name.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower()


def _ask(host: str, port: int | None) -> Found:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that cannot be one
        raise OSError(str(error)) from None
    return [(family, address) for family, _, _, _, address in found]


class Backoff:
    """Trying again until a time limit, with a line on stderr every few seconds; `quiet`: without."""

    def __init__(self, who: str | None, limit: float, what: str, *, quiet: bool = False) -> None:
        self._who, self._what, self._quiet = who, what, quiet
        now = time.monotonic()
        # What is there within a second needs no line
        self._end, self._next_line = now + limit, now + 1.0
        self._pause, self._between = 0.01, PROGRESS

    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.001)

    def sleep_or_expire(self, cause: str) -> bool:
        """Sleep a moment and say True, or say False when the time is over."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._next_line and not self._quiet:
            self._next_line = now + self._between
            self._between = min(self._between * 2, LEAST_PROGRESS)
            log_line(
                self._who,
                f"{self._what} ({cause}); trying for {self.left():.0f} s more",
                event="waiting",
            )
        # Soon at first, for ranks that start together; then with jitter and less often, because a thousand of them
        # ask the same name server or call the same port.
        time.sleep(min(self.left(), self._pause * (0.5 + os.urandom(1)[0] / 255)))
        self._pause = min(self._pause * 1.5, 0.5)
        return True
