"""Volcano on Kubernetes: its `pytorch` plugin numbers pods, and not processes.

VC_TASK_INDEX counts within one kind of task. VC_WORKER_NUM and its like are of the svc plugin.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...base.patterns import pattern
from ...base.text import digits
from ..env_reader import EnvReader
from ..node_platform import NodePlatform
from . import has_any

_COUNT = pattern(r"VC_.*_NUM|VC_NUM")
_MARKERS = ("VC_TASK_INDEX", "VK_TASK_INDEX")


def _claim(environ: Mapping[str, str]) -> bool:
    if has_any(environ, ("RANK", "WORLD_SIZE")):
        return True
    # VC_WORKER_NUM and its like, by which the svc plugin counts pods, if it is there.
    counts = filter(_COUNT.fullmatch, environ)
    return sum(digits(environ[name]) or 0 for name in counts) != 1


def _read(reader: EnvReader) -> None:
    if not has_any(reader.environ, ("RANK", "WORLD_SIZE")):
        index = reader.first(*_MARKERS)
        reader.problems.append(
            f"RANK and WORLD_SIZE are missing, and {index} only counts the pods of one kind"
        )
        reader.remedy = (
            "give the job Volcano's pytorch plugin (or its tensorflow or mpi plugin), or set "
            "DISTBOOT_LAUNCHER=none if each pod works alone"
        )
        return
    if "RANK" not in reader.environ:
        reader.remedy = (
            "Volcano's pytorch plugin gives RANK to the pods of its master and worker tasks only; "
            "set DISTBOOT_LAUNCHER=none in the pods of another task, such as TensorBoard's, which "
            "work alone"
        )
    reader.integers("RANK", "WORLD_SIZE")
    reader.record("WORLD_SIZE: Volcano counts pods", num_nodes=reader.number("world_size"))
    if reader.number("world_size") != 1:
        reader.node_level = (
            "Volcano's RANK counts pods, and no variable has the number of processes per node"
        )


VOLCANO = NodePlatform(
    name="volcano",
    title="Volcano jobs (plugins pytorch and env)",
    source=(
        "https://github.com/volcano-sh/volcano/tree/master/"
        "pkg/controllers/job/plugins/distributed-framework/pytorch"
    ),
    index_variable="RANK",
    count_variable="WORLD_SIZE",
    own_markers=_MARKERS,
    also_reads=(*_MARKERS, "VC_*_NUM"),
    read=_read,
    # LOCAL_RANK: something has started processes in the pod, and numbered them. TF_CONFIG: the
    # tensorflow plugin.
    unless=("LOCAL_RANK", "TF_CONFIG"),
    claim=_claim,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample=(
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0.job MASTER_PORT=23456 VC_TASK_INDEX=0 "
        "VK_TASK_INDEX=0 VC_MASTER_HOSTS=job-master-0.job VC_WORKER_HOSTS=job-worker-0.job"
    ),
)
