"""PAI DLC and AIHC: with NPROC_PER_NODE above 1, RANK and WORLD_SIZE count pods."""

from __future__ import annotations

from collections.abc import Mapping

from ..node_platform import NodePlatform
from . import has_any


def _claim(environ: Mapping[str, str]) -> bool:
    has_several = environ["NPROC_PER_NODE"] != "1"
    return has_several and has_any(environ, ("RANK", "WORLD_SIZE"))


PODS = NodePlatform(
    name="pods",
    title="Alibaba Cloud PAI DLC, Baidu AIHC (PyTorch jobs, several processes per pod)",
    source="https://www.alibabacloud.com/help/en/pai/general-environment-variables",
    index_variable="RANK",
    count_variable="WORLD_SIZE",
    per_node=("NPROC_PER_NODE",),
    job_id_variables=("AIHC_JOB_NAME",),
    own_markers=("NPROC_PER_NODE",),
    needed={"KUBERNETES_SERVICE_HOST"},
    unless=("LOCAL_RANK",),
    claim=_claim,
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
