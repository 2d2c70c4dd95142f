"""PAI DLC and AIHC: with NPROC_PER_NODE above 1, RANK and WORLD_SIZE count pods."""

from __future__ import annotations

from functools import partial

from ..node_platform import NodePlatform
from . import has_any

PODS = NodePlatform(
    name="pods",
    title="Alibaba Cloud PAI DLC, Baidu AIHC (PyTorch jobs, several processes per pod)",
    page="https://www.alibabacloud.com/help/en/pai/general-environment-variables",
    index_variable="RANK",
    count_variable="WORLD_SIZE",
    per_node=("NPROC_PER_NODE",),
    job_id=("AIHC_JOB_NAME",),
    marks=("NPROC_PER_NODE",),
    needed={"KUBERNETES_SERVICE_HOST"},
    unless=("LOCAL_RANK",),
    alone=("", "NPROC_PER_NODE"),  # then these are ranks
    claim=partial(has_any, names=("RANK", "WORLD_SIZE")),
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample=(
        "RANK=1 WORLD_SIZE=2 NPROC_PER_NODE=8 MASTER_ADDR=demo-master-0 MASTER_PORT=23456 "
        "KUBERNETES_SERVICE_HOST=10.96.0.1"
    ),
    note=(
        "On Kubernetes, and if `NPROC_PER_NODE` is above 1; with one process per pod these are "
        "ranks."
    ),
)
