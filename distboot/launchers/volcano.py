"""Volcano jobs on Kubernetes: its `pytorch` plugin numbers pods, and nothing says how many processes each is to run."""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# Plugins pytorch, svc and env, 1 master and 2 workers, the last worker:
#   RANK=2   WORLD_SIZE=3   MASTER_ADDR=job-master-0.job   MASTER_PORT=23456
#   VC_TASK_INDEX=1 (within its kind of task)   VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job   VC_WORKER_NUM=2
_MARKERS = ("VC_TASK_INDEX", "VK_TASK_INDEX")


def _read(environ: Mapping[str, str]) -> Placement | None:
    # LOCAL_RANK: somebody has started processes in the pod, and numbered them. TF_CONFIG: the tensorflow plugin.
    if not claims(environ, _MARKERS) or "LOCAL_RANK" in environ or "TF_CONFIG" in environ:
        return None
    reading = Reading(environ, "volcano")
    if not claims(environ, ("RANK", "WORLD_SIZE")):
        if _pods(environ) == 1:
            return None
        index = next(marker for marker in _MARKERS if marker in environ)
        reading.problems.append(f"RANK and WORLD_SIZE are missing, and {index} only counts the pods of one kind")
        reading.remedy = (
            "give the job Volcano's pytorch plugin (or its tensorflow or mpi plugin), or set DISTBOOT_LAUNCHER=none if "
            "each pod works alone"
        )
        return reading.placement()
    reading.integer("RANK", "rank")
    reading.put("num_nodes", reading.integer("WORLD_SIZE", "world_size"), "WORLD_SIZE: Volcano counts pods")
    if reading.number("world_size") != 1:
        reading.node_level = "Volcano's RANK counts pods, and nothing says how many processes each is to run"
    return reading.placement()


def _pods(environ: Mapping[str, str]) -> int:
    """How many pods the svc plugin counts; 0 when it is not there."""
    counts = [value for name, value in environ.items() if name.startswith("VC_") and name.endswith("_NUM")]
    return sum(int(count) for count in counts if count.isascii() and count.isdigit() and len(count) <= 8)


VOLCANO = Launcher(
    name="volcano",
    title="Volcano jobs (plugins pytorch and env)",
    markers=_MARKERS,
    read=_read,
    source="documentation: Volcano, pkg/controllers/job/plugins/distributed-framework/pytorch and plugins/env",
    reads_plain=True,
    passing="an env entry NAME=VALUE in the pod template",
)
