"""Before the ranks meet: rank 0 has an address and a port, or an error says what to pass for this launcher."""

from __future__ import annotations

from ..detection.detect import launcher_of
from ..detection.launchers.records import MPI_LAUNCHERS
from ..detection.placement import VARIABLES, Placement
from ..errors import DistbootError
from ..host import free_port
from ..text import is_address


def require_master(placement: Placement) -> Placement:
    """The placement, as detected, with address and port of rank 0; else `no-master-addr` or `no-master-port`."""
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
        # No other process has to know it. One that is derived or handed over may be a sibling's.
        placement = placement.with_fields("found free on this host", {"master_port": free_port()})
    return placement


def _how_to_pass(placement: Placement, name: str, value: str) -> str:
    return launcher_of(placement).env_forwarding_hint.replace("NAME", name).replace("VALUE", value)


def wait_until_resolves(placement: Placement, join_timeout: float) -> None:
    """Wait until the name of rank 0's host resolves; `unresolvable-address`: it did not in time."""
    host = str(placement.master_addr)
    if is_address(host):
        return
    from ..host.network import look_up
    from .worker import Backoff  # here, as a process that is alone does without dataclasses

    backoff = Backoff(placement.who, join_timeout, f"{host!r} does not resolve yet")
    while True:
        try:
            look_up(host, None, backoff.left())
        except OSError as error:
            cause = error.strerror or str(error)
        else:
            return
        if not backoff.sleep_or_expire(cause):
            raise DistbootError(
                "unresolvable-address",
                f"{placement.sources['master_addr']} says that rank 0 is at {host!r}, "
                f"which did not resolve in {join_timeout:g} s: {cause}",
                "check the name, or give an address that this host can look up",
            )
