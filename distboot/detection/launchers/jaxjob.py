"""The JAXJob of Kubeflow's training operator v1, whose generic names count only together."""

from __future__ import annotations

from functools import partial

from ..env_reader import EnvReader
from ..parse import parse_port
from . import Launcher, Numbers, has_peers

_MARKERS = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")


def _read(reader: EnvReader) -> None:
    reader.take_own_address("COORDINATOR_ADDRESS")
    port = reader.parsed("COORDINATOR_PORT", parse_port)
    reader.record_own_port("COORDINATOR_PORT", port)


JAXJOB = Launcher(
    name="jaxjob",
    title="Kubeflow JAXJob",
    source="documentation: Kubeflow training operator v1, pkg/controller.v1/jax/envvar.go",
    sample=(
        "COORDINATOR_ADDRESS=jaxjob-worker-0 COORDINATOR_PORT=6666 "
        "NUM_PROCESSES={size} PROCESS_ID={rank}"
    ),
    markers=_MARKERS,
    needed={*_MARKERS},
    claim=partial(has_peers, "PROCESS_ID", "NUM_PROCESSES"),
    needs_claim=True,
    numbers=Numbers(rank="PROCESS_ID", world_size="NUM_PROCESSES"),
    read=_read,
    in_order=(),
    compared_with_nodes=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
)
