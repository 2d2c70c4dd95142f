"""Whether this container is ready for a distributed job: why it will fail, hang or be slow, before it starts.

A check is a small function from the machine to its findings, and reads nothing but that view of it. One that crashes is
a finding itself. Nothing here takes long, imports a framework, or changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import first_line
from .devices import accelerators
from .finding import Finding, unknown
from .limits import memlock, open_files, shared_memory
from .machine import Machine
from .nccl import interface_names, nccl_rdma, nccl_settings
from .network import host_name, master_address, ports, proxies
from .rdma import rdma_devices, rdma_gids, rdma_libraries, rdma_ports
from .start import clock, cpus, launcher
from .torch_build import driver
from .visible import visible_devices

Check = Callable[[Machine], Iterator[Finding]]

_ANYWHERE: tuple[Check, ...] = (launcher, host_name, master_address, ports, proxies, clock)
_LINUX: tuple[Check, ...] = (
    cpus,
    shared_memory,
    memlock,
    open_files,
    accelerators,
    visible_devices,
    driver,
    rdma_devices,
    rdma_ports,
    rdma_libraries,
    rdma_gids,
    interface_names,
    nccl_rdma,
    nccl_settings,
)


def examine(machine: Machine, checks: tuple[Check, ...] | None = None) -> list[Finding]:
    """All that the checks find, in their order.

    Args:
        machine: to look at.
        checks: these only; default: all that fit its system.
    """
    if checks is None:
        checks = (*_ANYWHERE, *_LINUX) if machine.system == "linux" else _ANYWHERE
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(machine)
        except Exception as error:  # noqa: BLE001, PERF203 - a machine may be stranger than a check expects
            name = check.__name__.replace("_", "-")
            seen = f"the check itself failed: {type(error).__name__}: {first_line(error)}"
            found.append(unknown(name, seen, "please report it, with the output of `python -m distboot doctor --json`"))
    return found
