"""The network of this host: interfaces, variables that name one for frameworks, resolving names.

Names are resolved under a time limit, as the resolver itself may take half a minute to give up.
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

from ..base.errors import DistbootError
from ..base.text import (
    is_address,
    log_line,
    short_repr,
    without_mapping,
)
from ..base.threads import result_within

_SIOCGIFCONF = 0x8912  # from linux/sockios.h; netdevice(7): all addresses of IPv4
# One of its entries: a name, and an address
_IFREQ = struct.Struct(f"16s4x4s{2 * struct.calcsize('P')}x")
_MOST_ADDRESSES = 1024

_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"
_TENSORPIPE = "TP_SOCKET_IFNAME"
_HOROVOD = "HOROVOD_GLOO_IFACE"

# gRPC, http_proxy_mapper.cc: in this order, and in lower case only. gRPC reads the first one that
# is set.
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
NO_PROXIES = ("no_grpc_proxy", "no_proxy")

PROGRESS = 5.0  # seconds between two lines about what a process waits for, at first
LEAST_PROGRESS = 60.0  # and later: a thousand ranks may write the same line

Found = list[tuple[int, tuple[object, ...]]]  # family and socket address


def addresses() -> list[tuple[str, str]]:
    """Interface and address, of all addresses of this host; none if it does not run Linux."""
    return _ipv4_addresses() + _ipv6_addresses()


def _ipv4_addresses() -> list[tuple[str, str]]:
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        room = array("B", bytes(_MOST_ADDRESSES * _IFREQ.size))
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        length, _ = struct.unpack("iP", fcntl.ioctl(kernel, _SIOCGIFCONF, request))
        for label, address in _IFREQ.iter_unpack(room.tobytes()[:length]):
            name = re.split(rb"[\0:]", label)[0]  # of eth0:1, too
            found.append((os.fsdecode(name), socket.inet_ntoa(address)))
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    found = []
    # fd000000000000000000000000000002 02 40 00 80     eth0
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for digits, *_, name in map(str.split, file):
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            found.append((name, address))
    return found


def address_of_peer(connection: socket.socket) -> str:
    """The address at the other end: `"10.0.0.7"`, `"fe80::1%eth0"`; with its scope, if it has one."""
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    address, _ = socket.getnameinfo(connection.getpeername(), flags)
    return address


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None for loopback."""
    wanted = without_mapping(address.partition("%")[0])
    for name, own_address in addresses():
        if own_address == wanted:
            if name == "lo":
                return None
            return name
    return None


def variables(interface: str | None, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that make the frameworks use an interface, without those that are set already."""
    if interface is None:
        return {}
    wanted = {
        _GLOO: interface,
        _NCCL: f"={interface}",  # without the = any interface whose name begins so
        _TENSORPIPE: interface,
    }
    given = {*environ}
    if _nccl_file_names_interface(environ):
        given.add(_NCCL)
    return {name: text for name, text in wanted.items() if name not in given}


def _nccl_file_names_interface(environ: Mapping[str, str]) -> bool:
    """Whether nccl.conf names an interface; NCCL would prefer the environment to it."""
    own = environ.get("NCCL_CONF_FILE")
    if not own:
        own = os.path.expanduser("~/.nccl.conf")
    for path in (own, "/etc/nccl.conf"):
        with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
            if re.search(rf"^\s*{_NCCL}=", file.read(), re.MULTILINE):
                return True
    return False


def refuse_unknown(environ: Mapping[str, str], present: Sequence[str] | None = None) -> None:
    """Refuse an interface that a variable names and this host, which has `present`, lacks."""
    for variable in (_GLOO, _NCCL, _TENSORPIPE, _HOROVOD):
        text = environ.get(variable, "")
        if not text or text.startswith("^"):  # NCCL's way to exclude some
            continue
        if present is None:
            present = [name for _, name in socket.if_nameindex()]
        missing = _missing_interface(variable, text, present)
        if missing is not None:
            given = f"{variable}={short_repr(text)}"
            listed = ", ".join(present)
            raise DistbootError(
                "unknown-interface",
                f"{given}, but this host has no interface {short_repr(missing)}: it has {listed}",
                f"name one of these, or unset {variable}: "
                "jobs on several nodes then use the one that reaches rank 0",
            )


def _missing_interface(
    variable: str,
    text: str,
    present: Sequence[str],
) -> str | None:
    if variable == _NCCL:  # one match of the list is enough; the others need all of theirs
        if any(nccl_matches(text, name) for name in present):
            return None
        return text.removeprefix("=")
    names = text.split(",")
    for name in names:
        if name not in present:
            return name.removeprefix("=")
    return None


def nccl_matches(choice: str, name: str) -> bool:
    """Whether a list for NCCL includes a name: it has beginnings of names, or names after a `=`."""
    # A port or an alias may follow the name: eth0:1
    listed = filter(None, choice.removeprefix("=").split(","))
    words = [word.partition(":")[0] for word in listed]
    if choice.startswith("="):
        return name in words
    return name.startswith(tuple(words))


def look_up(
    host: str,
    port: int | None,
    limit: float,
) -> Found:
    """Family and socket address, of each address of a host; raises OSError, also when late."""
    ask = partial(_ask, host, port)
    if is_address(host):
        return ask()
    late = f"no name server answered within {limit:.1f} s"
    return result_within(limit, "distboot-resolve", ask, late)


def addresses_of(name: str, limit: float) -> list[str]:
    """The addresses of a host, as `look_up` finds them."""
    return [str(address[0]) for _, address in look_up(name, None, limit)]


def is_this_host(name: str) -> bool:
    """Whether a name is the name of this host, which may not resolve here."""
    short, _, _ = name.partition(".")
    own, _, _ = socket.gethostname().partition(".")
    return short.lower() == own.lower()


def _ask(host: str, port: int | None) -> Found:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # not a valid name
        raise OSError(str(error)) from None
    addresses: Found = []
    for family, _, _, _, address in found:
        addresses.append((family, address))
    return addresses


class Backoff:
    """Retries until a time limit, with a line on stderr every few seconds unless `quiet`."""

    def __init__(
        self,
        who: str | None,
        limit: float,
        what: str,
        *,
        quiet: bool = False,
        first_line: float = 1.0,  # seconds: what succeeds within a second needs no line
    ) -> None:
        now = time.monotonic()
        self._who = who
        self._what = what  # has not happened yet
        self._quiet = quiet
        self._end = now + limit
        self._next_line = now + first_line
        self._between_lines = PROGRESS
        self._pause = 0.01

    def left(self) -> float:
        left = self._end - time.monotonic()
        return max(left, 0.001)

    def sleep_or_expire(self, cause: str) -> bool:
        """Sleep for a moment and return True, or return False once the time is over."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._next_line and not self._quiet:
            self._report(cause, now)
        # Short at first, for ranks that start together. Later with jitter and less often, because a
        # thousand ranks may ask the same name server or connect to the same port.
        jitter = 0.5 + os.urandom(1)[0] / 255
        pause = self._pause * jitter
        time.sleep(min(self.left(), pause))
        self._pause = min(self._pause * 1.5, 0.5)
        return True

    def _report(self, cause: str, now: float) -> None:
        self._next_line = now + self._between_lines
        self._between_lines = min(self._between_lines * 2, LEAST_PROGRESS)
        text = f"{self._what} ({cause}); trying for {self.left():.0f} s more"
        log_line(self._who, text, event="waiting")
