"""JAX's own variables, which number processes: Kubeflow Trainer's JAX runtime, or set by hand.

The port is that of JAX's coordinator, which runs in process 0 once all are there.
"""

from __future__ import annotations

from functools import partial

from ..env_reader import EnvReader
from . import Launcher, Numbers, has_peers

_RANK = "JAX_PROCESS_ID"
_SIZE = "JAX_NUM_PROCESSES"
_ADDRESS = "JAX_COORDINATOR_ADDRESS"


def _read(reader: EnvReader) -> None:
    port = reader.take_own_address(_ADDRESS)
    reader.port_seed = reader.own_address
    reader.record_own_port(_ADDRESS, port)


JAX = Launcher(
    name="jax",
    title="JAX processes (JAX_*; Kubeflow Trainer's JAX runtime, by hand)",
    source="documentation: Kubeflow Trainer v2, pkg/runtime/framework/plugins/jax/jax.go",
    sample=(
        "JAX_NUM_PROCESSES={size} JAX_PROCESS_ID={rank} "
        "JAX_COORDINATOR_ADDRESS=job-node-0-0.job:6666"
    ),
    markers=(_SIZE, _RANK),
    claim=partial(has_peers, _RANK, _SIZE),
    numbers=Numbers(rank=_RANK, world_size=_SIZE),
    read=_read,
    in_order=(),
    compared_with_nodes=True,
    of_one_process="JAX_(NUM_PROCESSES|PROCESS_ID|COORDINATOR_ADDRESS)$",
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
)
