"""Before any framework starts: rank 0 has an address that resolves and a port, or an error says what to pass."""

from __future__ import annotations

import os
import sys
import time

from .address import DERIVED_PORTS
from .detection import launcher_of
from .errors import DistbootError, on_this_host, quoted
from .placement import VARIABLES, Placement

DEFAULT_JOIN_TIMEOUT = 300.0  # seconds; torch's own default for its store
_PROGRESS = 5.0  # seconds between two lines that say what is being waited for


def seconds(said: str, value: object, code: str = "usage") -> float:
    """A time limit in seconds, above 0 and at most a day.

    Raises:
        DistbootError: with this code, it is not.
    """
    try:
        number = float(value) if isinstance(value, str | int | float) else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number <= 86400:
        raise DistbootError(code, f"{said} is not a number of seconds", "give a number above 0, at most 86400")
    return number


def join_timeout_setting(given: object) -> float:
    """The join timeout in seconds: as given, or DISTBOOT_JOIN_TIMEOUT, or the default.

    Raises:
        DistbootError: `usage` or `broken-environment`, it is not a positive number.
    """
    if given is not None:
        return seconds(f"join_timeout={quoted(given)}", given)
    text = os.environ.get("DISTBOOT_JOIN_TIMEOUT", str(DEFAULT_JOIN_TIMEOUT))
    return seconds(f"DISTBOOT_JOIN_TIMEOUT={quoted(text)}", text, "broken-environment")


def settled(placement: Placement, join_timeout: float) -> Placement:
    """The placement with an address of rank 0 that resolves, and a port.

    Args:
        placement: as detected.
        join_timeout: seconds for which a name that does not resolve yet is tried again.

    Raises:
        DistbootError: `no-master-addr`, `no-master-port` or `unresolvable-address`.
    """
    if placement.master_addr is None:
        raise DistbootError(
            "no-master-addr",
            f"launcher {placement.launcher!r} started {placement.world_size} processes"
            f"{'' if placement.num_nodes is None else ' on several nodes'}, "
            "and nothing in the environment says on which host rank 0 is",
            f"name the host of rank 0: {_how_to_pass(placement, 'MASTER_ADDR', '<host of rank 0>')}"
            + ("; and a free port there as MASTER_PORT" if placement.master_port is None else ""),
        )
    if placement.master_port is None and placement.world_size > 1:
        raise DistbootError(
            "no-master-port",
            f"launcher {placement.launcher!r} gives neither a port nor a job id to derive one from",
            f"choose a free port: {_how_to_pass(placement, 'MASTER_PORT', '29500')}",
        )
    if placement.world_size == 1 and placement.sources.get("master_port") not in VARIABLES.values():
        # Nobody else has to know it. One that is derived or handed over may be a sibling's.
        placement = placement.with_fields("found free on this host", {"master_port": free_port()})
    _wait_until_resolves(placement, join_timeout)
    return placement


def free_port() -> int:
    """A TCP port that nobody on this host listens on, above the ephemeral range so that it stays so."""
    import socket  # here and below, so that a job on one host does not pay for it

    # From a random place, so that processes that look at the same time do not meet; every 45th port from there.
    start = int.from_bytes(os.urandom(4), "big")
    for attempt in range(100):
        port = DERIVED_PORTS[(start + 45 * attempt) % len(DERIVED_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise DistbootError(
        "port-taken",
        "100 ports tried in 61000 to 65535, and none is free on this host",
        "set MASTER_PORT to a free port",
    )


def _how_to_pass(placement: Placement, name: str, value: str) -> str:
    return launcher_of(placement).passing.replace("NAME", name).replace("VALUE", value)


def wait_until_open(placement: Placement, join_timeout: float) -> None:
    """Wait until somebody listens where rank 0 is said to be.

    Raises:
        DistbootError: `join-timeout`, nobody did within `join_timeout` seconds.
    """
    import socket

    where = f"{placement.master_addr}:{placement.master_port}"
    waiting = Wait(placement.who, join_timeout, f"nobody listens at {where} yet")
    while True:
        try:
            with socket.create_connection(
                (placement.master_addr, placement.master_port or 0), timeout=min(waiting.left(), _PROGRESS)
            ):
                return
        except OSError as error:
            cause = error.strerror or str(error)
        if not waiting.once_more(cause):
            raise DistbootError(
                "join-timeout",
                f"nobody listened at {where} "
                f"(from {placement.sources.get('master_addr')}) for {join_timeout:g} s: {cause}",
                "look for rank 0: it did not start, ended early, is on another host, or is behind a firewall",
            )


def _wait_until_resolves(placement: Placement, join_timeout: float) -> None:
    host = str(placement.master_addr)
    waiting = Wait(placement.who, join_timeout, f"{host!r} does not resolve yet")
    while (cause := _resolution_failure(host)) is not None:
        if not waiting.once_more(cause):
            raise DistbootError(
                "unresolvable-address",
                f"{placement.sources['master_addr']} says that rank 0 is at {host!r}, "
                f"which did not resolve in {join_timeout:g} s: {cause}",
                "check the name, or give an address that this host can look up",
            )


class Wait:
    """Trying again until a time limit, with a line on stderr every few seconds.

    Args:
        who: the process that waits, as `Placement.who`.
        limit: seconds.
        what: what it waits for, as the line says it.
    """

    def __init__(self, who: str | None, limit: float, what: str) -> None:
        self._start = time.monotonic()
        self._limit = limit
        self._pause = 0.01
        self._said = 1.0  # what is there within a second needs no line
        self._line = f"distboot: {on_this_host(who)}{what}"

    def waited(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        return max(self._limit - self.waited(), 0.001)

    def once_more(self, cause: str) -> bool:
        """Sleep a moment and say True, or say False when the time is over."""
        if self.waited() >= self._limit:
            return False
        if self.waited() >= self._said:
            self._said = self.waited() + _PROGRESS
            print(f"{self._line} ({cause}); trying for {self.left():.0f} s more", file=sys.stderr, flush=True)
        # Soon at first, for ranks that start together; then with jitter and less often, because a thousand of them
        # ask the same name server or knock at the same port.
        time.sleep(min(self.left(), self._pause * (0.5 + os.urandom(1)[0] / 255)))
        self._pause = min(self._pause * 1.5, 0.5)
        return True


def _resolution_failure(host: str) -> str | None:
    if ":" in host or host.replace(".", "").isdigit():
        return None  # an address, checked when it was read
    import socket

    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
