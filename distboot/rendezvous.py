"""Before the ranks meet: rank 0 has an address and a port, or an error says what to pass; and how long to wait."""

from __future__ import annotations

import os
import time

from .address import DERIVED_PORTS, is_address
from .detection import launcher_of
from .errors import DistbootError, quoted, tell
from .placement import VARIABLES, Placement

MPI_LAUNCHERS = ("openmpi", "intelmpi", "mpich", "mvapich")  # which mpi4py can be asked under
DEFAULT_JOIN_TIMEOUT = 300.0  # seconds; torch's own default for its store
_PROGRESS = 5.0  # seconds between two lines that say what is being waited for, at first
_LEAST_PROGRESS = 60.0  # and later: a thousand ranks may say the same


def seconds(said: str, value: object, code: str = "usage") -> float:
    """A time limit in seconds, above 0 and at most a day.

    Raises:
        DistbootError: with this code, it is not.
    """
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        number = 0.0
    if not 0 < number <= 86400:
        raise DistbootError(code, f"{said} is not a number of seconds", "give a number above 0, at most 86400")
    return number


def join_timeout_setting(given: object, name: str = "join_timeout") -> float:
    """The join timeout in seconds: as given, under this name, or DISTBOOT_JOIN_TIMEOUT, or the default.

    Raises:
        DistbootError: `usage` or `broken-environment`, it is not a positive number.
    """
    if given is not None:
        return seconds(f"{name}={quoted(given)}", given)
    text = os.environ.get("DISTBOOT_JOIN_TIMEOUT", str(DEFAULT_JOIN_TIMEOUT))
    return seconds(f"DISTBOOT_JOIN_TIMEOUT={quoted(text)}", text, "broken-environment")


def roll_call_setting() -> bool:
    """Whether the ranks are to meet before the framework starts: DISTBOOT_ROLL_CALL, 1 (the default) or 0.

    Raises:
        DistbootError: `broken-environment`, it is something else.
    """
    text = os.environ.get("DISTBOOT_ROLL_CALL", "1")
    if text not in ("0", "1"):
        raise DistbootError(
            "broken-environment", f"DISTBOOT_ROLL_CALL={quoted(text)} is neither 0 nor 1", "unset it, or set it to 0"
        )
    return text == "1"


def settled(placement: Placement) -> Placement:
    """The placement with an address of rank 0 that resolves, and a port.

    Args:
        placement: as detected.

    Raises:
        DistbootError: `no-master-addr` or `no-master-port`.
    """
    if placement.master_addr is None:
        raise DistbootError(
            "no-master-addr",
            f"launcher {placement.launcher!r} started {placement.world_size} processes"
            f"{'' if placement.num_nodes is None else ' on several nodes'}, "
            "and nothing in the environment says on which host rank 0 is",
            f"name the host of rank 0: {_how_to_pass(placement, 'MASTER_ADDR', '<host of rank 0>')}"
            + ("; and a free port there as MASTER_PORT" if placement.master_port is None else "")
            + ("; or install mpi4py, which init() asks" if placement.launcher in MPI_LAUNCHERS else ""),
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


def wait_until_resolves(placement: Placement, join_timeout: float) -> None:
    """Wait until the name of rank 0's host resolves.

    Raises:
        DistbootError: `unresolvable-address`, it did not within `join_timeout` seconds.
    """
    host = str(placement.master_addr)
    if is_address(host):
        return
    from .resolve import look_up

    waiting = Wait(placement.who, join_timeout, f"{host!r} does not resolve yet")
    while True:
        try:
            look_up(host, None, waiting.left())
        except OSError as error:
            cause = error.strerror or str(error)
        else:
            return
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
        quiet: whether somebody else on this node says the same.
    """

    def __init__(self, who: str | None, limit: float, what: str, *, quiet: bool = False) -> None:
        self._start = time.monotonic()
        self._limit = limit
        self._quiet = quiet
        self._pause = 0.01
        self._between = _PROGRESS
        self._said = 1.0  # what is there within a second needs no line
        self._who, self._what = who, what

    def waited(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        return max(self._limit - self.waited(), 0.001)

    def once_more(self, cause: str) -> bool:
        """Sleep a moment and say True, or say False when the time is over."""
        if self.waited() >= self._limit:
            return False
        if self.waited() >= self._said and not self._quiet:
            self._said = self.waited() + self._between
            self._between = min(self._between * 2, _LEAST_PROGRESS)
            tell(self._who, f"{self._what} ({cause}); trying for {self.left():.0f} s more")
        # Soon at first, for ranks that start together; then with jitter and less often, because a thousand of them
        # ask the same name server or knock at the same port.
        time.sleep(min(self.left(), self._pause * (0.5 + os.urandom(1)[0] / 255)))
        self._pause = min(self._pause * 1.5, 0.5)
        return True
