"""Facts of this host, read without a framework: accelerators, CPUs, network; and here its ports."""

from __future__ import annotations

import os
from contextlib import suppress

from ..base.errors import DistbootError

FRAMEWORK = "framework to start"  # the one fact about a process that must be the same on all ranks

# Above the usual ephemeral ports (Linux: 32768 to 60999), so that no outgoing connection takes the
# port.
DERIVED_PORTS = range(61000, 65536)


def derived_port(job_id: str) -> int:
    """A port in `DERIVED_PORTS`, the same in every process that has the same job id."""
    import zlib  # here and below, as most starts need no port

    checksum = zlib.crc32(job_id.encode(errors="surrogatepass"))
    return DERIVED_PORTS[checksum % len(DERIVED_PORTS)]


def free_port() -> int:
    """A TCP port that is free on this host, and above the ephemeral ports, so that it stays so."""
    import socket

    # Every 45th port from a random one, so that processes that search at the same time do not
    # collide.
    start = int.from_bytes(os.urandom(4), "big")
    for attempt in range(100):
        port = DERIVED_PORTS[(start + 45 * attempt) % len(DERIVED_PORTS)]
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise DistbootError(
        "port-taken",
        "none of 100 ports tried from 61000 to 65535 is free on this host",
        "set MASTER_PORT to a free port",
    )
