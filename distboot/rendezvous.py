"""Before any framework starts: rank 0 has an address that resolves and a port, or an error says what to pass."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from types import MappingProxyType

from .address import DERIVED_PORTS
from .detection import by_name
from .errors import DistbootError
from .placement import Placement

DEFAULT_JOIN_TIMEOUT = 300.0  # seconds; torch's own default for its store
_PROGRESS = 5.0  # seconds between two lines that say what is being waited for


def join_timeout_setting(given: float | None, environ: dict[str, str] | os._Environ[str] = os.environ) -> float:
    """The join timeout in seconds: as given, or DISTBOOT_JOIN_TIMEOUT, or the default.

    Raises:
        DistbootError: `usage`, it is not a positive number.
    """
    said, value = "join_timeout", given
    if given is None and "DISTBOOT_JOIN_TIMEOUT" in environ:
        said = f"DISTBOOT_JOIN_TIMEOUT={environ['DISTBOOT_JOIN_TIMEOUT']!r}"
        try:
            value = float(environ["DISTBOOT_JOIN_TIMEOUT"])
        except ValueError:
            value = -1.0
    value = DEFAULT_JOIN_TIMEOUT if value is None else value
    if not 0 < value <= 86400:
        raise DistbootError("usage", f"{said} is not a number of seconds", "give a number from above 0 to 86400")
    return value


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
            f"launcher {placement.launcher!r} started {placement.world_size} processes on several nodes, "
            "and nothing in the environment says where rank 0 is",
            f"name the host of rank 0: {_how_to_pass(placement, 'MASTER_ADDR', '<host of rank 0>')}",
        )
    if placement.master_port is None:
        if placement.world_size > 1:
            raise DistbootError(
                "no-master-port",
                f"launcher {placement.launcher!r} gives neither a port nor a job id to derive one from",
                f"choose a free port: {_how_to_pass(placement, 'MASTER_PORT', '29500')}",
            )
        sources = MappingProxyType({**placement.sources, "master_port": "found free on this host"})
        placement = replace(placement, master_port=free_port(), sources=sources)
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
    raise DistbootError("port-taken", "100 ports tried in 61000 to 65535, and none is free on this host")


def _how_to_pass(placement: Placement, name: str, value: str) -> str:
    launcher = by_name(placement.launcher)
    passing = launcher.passing if launcher else "set NAME=VALUE for every process"
    return passing.replace("NAME=VALUE", f"{name}={value}")


def _wait_until_resolves(placement: Placement, join_timeout: float) -> None:
    host, start, said = str(placement.master_addr), time.monotonic(), 0.0
    while (cause := _resolution_failure(host)) is not None:
        waited = time.monotonic() - start
        left = join_timeout - waited
        if left <= 0:
            raise DistbootError(
                "unresolvable-address",
                f"rank {placement.rank}: {placement.sources['master_addr']} says that rank 0 is at {host!r}, "
                f"which did not resolve in {join_timeout:g} s: {cause}",
                "check the name, or give an address that this host can look up",
            )
        if waited >= said:
            said += _PROGRESS
            line = f"rank {placement.rank}: {host!r} does not resolve yet ({cause}); trying for {left:.0f} s more"
            print(f"distboot: {line}", file=sys.stderr, flush=True)
        # With jitter, because a thousand ranks ask the same name server.
        time.sleep(min(left, 0.2 + os.urandom(1)[0] / 320))


def _resolution_failure(host: str) -> str | None:
    if ":" in host or host.replace(".", "").isdigit():
        return None  # an address, checked when it was read
    import socket

    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
