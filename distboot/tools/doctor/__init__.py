"""The checks of `doctor`: whether this container is ready for a distributed job.

A check is a function from a `Machine` to its findings, and is named after what it looks at. It
reads files below the machine's root, an environment, and a few answers of the kernel and the
resolver; nothing else, so that a test can show it any machine. It is quick, imports no framework,
and changes nothing.

- `finding`: what a check returns
- `machine`: what a check reads
- `launch`, `addresses`, `limits`, `accelerators`, `visible_devices`, `torch_build`, `rdma`, `nccl`:
  the checks, by subject
- `CHECKS`: all of them, in the order in which they are run and shown
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import (
    accelerators,
    addresses,
    launch,
    limits,
    nccl,
    rdma,
    torch_build,
    visible_devices,
)
from .finding import Finding
from .machine import Machine

Check = Callable[[Machine], Finding | Iterable[Finding]]

ON_EVERY_SYSTEM: tuple[Check, ...] = (
    launch.launcher,
    launch.allocation,
    launch.settings,
    addresses.host_name,
    addresses.master_addr,
    addresses.ports,
    addresses.proxies,
    launch.clock,
)
CHECKS: tuple[Check, ...] = (
    *ON_EVERY_SYSTEM,
    # These read /proc, /sys and /dev as Linux has them.
    limits.cpus,
    limits.shared_memory,
    limits.memlock,
    limits.open_files,
    accelerators.accelerators,
    visible_devices.visible_devices,
    torch_build.driver,
    rdma.rdma_devices,
    rdma.rdma_ports,
    rdma.rdma_libraries,
    rdma.rdma_gids,
    nccl.interfaces,
    nccl.nccl_rdma,
    nccl.nccl_settings,
)
