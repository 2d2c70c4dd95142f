"""SageMaker training jobs without a distribution: the script starts once on each host of the cluster.

With the MPI or torch_distributed distribution `mpirun` or torchrun starts the processes, and owns the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..hostlist import json_hosts
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher, claims

# Second host of two:
#   SM_HOSTS=["algo-1","algo-2"]   SM_CURRENT_HOST=algo-2   SM_NUM_GPUS=8   TRAINING_JOB_NAME=digits-2026-11-21-09-12-41
# Under mpirun SM_CURRENT_HOST is the first host's on every rank: it comes with the variables of mpirun's own host.
_MARKERS = ("SM_HOSTS", "SM_CURRENT_HOST")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "sagemaker")
    hosts = reading.parsed("SM_HOSTS", json_hosts)
    current = reading.text("SM_CURRENT_HOST")
    if hosts and current is not None and current not in hosts:
        reading.problems.append(f"{variable(environ, 'SM_CURRENT_HOST')} is not in {variable(environ, 'SM_HOSTS')}")
    elif hosts and current is not None:
        reading.put("rank", hosts.index(current), "SM_CURRENT_HOST in SM_HOSTS")
        reading.put("world_size", len(hosts), "SM_HOSTS")
        reading.put("num_nodes", len(hosts), "SM_HOSTS")
    gpus = reading.integer("SM_NUM_GPUS", required=False)
    if hosts and len(hosts) > 1 and gpus is not None and gpus > 1:
        reading.node_level = f"{variable(environ, 'SM_NUM_GPUS')}, and one process was started on each host"
    reading.job_id("TRAINING_JOB_NAME")
    return reading.placement(own_address=(hosts[0], "first host of SM_HOSTS") if hosts else None, nodes_are_hosts=True)


SAGEMAKER = Launcher(
    name="sagemaker",
    title="SageMaker training jobs without a distribution, one process a host",
    markers=_MARKERS,
    read=_read,
    source="documentation: SageMaker Training Toolkit, 'Environment variables'",
    passing="an entry NAME: VALUE in the estimator's environment",
)
