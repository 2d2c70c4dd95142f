"""`init("deepspeed")`: DeepSpeed on the process group that torch has started.

DeepSpeed's own `mpi_discovery` needs mpi4py, runs `hostname -I` and overwrites RANK and
MASTER_ADDR. It never runs here, because DeepSpeed uses a process group that exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..agent.session import Session
from ..context import Context
from ..detection import inherited
from ..detection.export import EnvTransaction, variables
from . import Options, _process_group, _torch
from ._base import imported, raised_as

# If it is set, it must equal LOCAL_RANK (deepspeed/runtime/engine.py, _configure_with_arguments).
# Processes that torchrun has started inside mpirun inherit one that does not.
_MPIRUNS_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


def on_cpu(options: Options) -> bool:
    """Whether the user asked for a CPU backend, or for DeepSpeed on the CPU."""
    return _torch.on_cpu(_with_backend(options))


def exports(session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of DeepSpeed's launcher that DeepSpeed reads, and what would disturb it.

    Its parallel checkpoint writer reads the number of this node and of all nodes. Not LOCAL_SIZE:
    on CPUs DeepSpeed then allocates 66 MB of shared memory per rank, more than Docker's default of
    64 MB, and never removes it.
    """
    placement = session.placement
    bare, _ = inherited.restored(environ)
    needed = {
        "CROSS_RANK": str(placement.node_rank),
        "CROSS_SIZE": str(placement.num_nodes),
    }
    if _MPIRUNS_LOCAL_RANK in bare:
        needed[_MPIRUNS_LOCAL_RANK] = str(variables(placement, environ)["LOCAL_RANK"])
    needed |= _torch.exports(session, environ)
    return {name: value for name, value in needed.items() if bare.get(name) != value}


def start(session: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start torch's process group, and let DeepSpeed use it."""
    return _process_group.start(
        session,
        exported,
        _with_backend(options),
        prepare=partial(imported, "deepspeed"),
        adopt=_adopt,
        others=exports(session, exported.environ_before()),
    )


def _with_backend(options: Options) -> Options:
    """The options with the CPU's backend, if DeepSpeed is to run on the CPU."""
    if options.backend is None and os.environ.get("DS_ACCELERATOR") == "cpu":
        return options._replace(backend="gloo")
    return options


def _adopt(deepspeed: Any, backend: str) -> Callable[[], None]:
    """Let DeepSpeed use the group; return DeepSpeed's function that ends it."""
    problem = f"DeepSpeed could not use the process group on {backend!r}"
    hint = (
        "if it is about building deepspeed_shm_comm, install DeepSpeed with DS_BUILD_SHM_COMM=1, "
        "or a compiler"
    )
    # On the CPU DeepSpeed compiles an extension at this point, which fails in many ways
    with raised_as("process-group-failed", problem, hint, Exception):
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    destroy: Callable[[], None] = deepspeed.comm.destroy_process_group
    return destroy
