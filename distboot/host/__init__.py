"""Facts of this host, found out without a framework: accelerators, CPUs, network; and here its ports."""

from __future__ import annotations

import os
from contextlib import suppress

from ..errors import DistbootError

FRAMEWORK = "framework to start"  # the one fact about a process that all ranks must have alike

# Above the usual ephemeral ranges (Linux 32768-60999), so that an outgoing connection does not sit on the port.
DERIVED_PORTS = range(61000, 65536)


def derived_port(job_id: str) -> int:
    """A port in `DERIVED_PORTS` that is the same wherever the job id is the same."""
    import zlib  # here and below, so that reading an address does not pay for it

    return DERIVED_PORTS[zlib.crc32(job_id.encode(errors="surrogatepass")) % len(DERIVED_PORTS)]


def free_port() -> int:
    """A TCP port that no process on this host listens on, above the ephemeral range so that it stays so."""
    import socket

    # From a random place, so that processes that look at the same time do not meet; every 45th port from there.
    start = int.from_bytes(os.urandom(4), "big")
    for attempt in range(100):
        port = DERIVED_PORTS[(start + 45 * attempt) % len(DERIVED_PORTS)]
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise DistbootError(
        "port-taken",
        "100 ports tried in 61000 to 65535, and none is free on this host",
        "set MASTER_PORT to a free port",
    )
