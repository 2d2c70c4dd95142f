"""Facts of this host, read without a framework: accelerators, CPUs, network; and here its ports."""

from __future__ import annotations

import os
import sys
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


def lease_name(port: int) -> str:
    """The name of the Unix socket that the job binds which has a port of this host.

    In the abstract namespace, which is as wide as that of the ports (unix(7)).
    """
    return f"\0distboot-port-{port}"


def free_port() -> int:
    """A TCP port that is free on this host, and above the ephemeral ports, so that it stays so.

    It is also none that another job has, whose script does not listen there yet.
    """
    import socket

    # Every 45th port from a random one, so that processes that search at the same time do not
    # collide.
    start = int.from_bytes(os.urandom(4), "big")
    for attempt in range(100):
        port = DERIVED_PORTS[(start + 45 * attempt) % len(DERIVED_PORTS)]
        with (
            suppress(OSError),
            socket.socket() as probe,
            socket.socket(socket.AF_UNIX) as lease,
        ):
            probe.bind(("", port))
            if sys.platform == "linux":
                lease.bind(lease_name(port))
            return port
    raise DistbootError(
        "port-taken",
        "none of 100 ports tried from 61000 to 65535 is free on this host",
        "set MASTER_PORT to a free port",
    )
