"""JAX's own variables, which number processes: `JAX_*`, and the generic names of Kubeflow's JAXJob.

The port is that of JAX's coordinator, which runs in process 0 once all are there.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..env_reader import EnvReader
from ..parse import parse_address, parse_port
from . import Launcher, has_any


# Kubeflow Trainer v2, the JAX runtime, the second of 3 pods:
#   JAX_NUM_PROCESSES=3   JAX_PROCESS_ID=1   JAX_COORDINATOR_ADDRESS=job-node-0-0.job:6666
def _claim(environ: Mapping[str, str]) -> bool:
    if not has_any(environ, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")):
        return False
    is_one = environ.get("JAX_NUM_PROCESSES") == "1" and environ.get("JAX_PROCESS_ID", "0") == "0"
    return not is_one


def _read(reader: EnvReader) -> None:
    name = "JAX_COORDINATOR_ADDRESS"
    address = reader.parsed(name, parse_address)
    if address is None:
        return
    reader.own_address = (address[0], name)
    if "MASTER_PORT" not in reader.environ:
        reader.put(name, master_port=address[1])
    reader.port_seed = reader.own_address


JAX = Launcher(
    name="jax",
    title="JAX processes (JAX_*; Kubeflow Trainer's JAX runtime, by hand)",
    markers=("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    numbers=("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    more=_read,
    in_order=(),
    claim=_claim,
    source="documentation: Kubeflow Trainer v2, pkg/runtime/framework/plugins/jax/jax.go",
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
)

# Kubeflow training operator v1, JAXJob, the second of 3 pods. The names are generic: only all four are JAXJob's.
#   COORDINATOR_ADDRESS=jaxjob-worker-0   COORDINATOR_PORT=6666   NUM_PROCESSES=3   PROCESS_ID=1
_JAXJOB = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")


def _claim_jaxjob(environ: Mapping[str, str]) -> bool:
    if any(name not in environ for name in _JAXJOB):
        return False
    return environ["NUM_PROCESSES"] != "1" or environ["PROCESS_ID"] != "0"


def _read_jaxjob(reader: EnvReader) -> None:
    address = reader.parsed("COORDINATOR_ADDRESS", parse_address)
    port = reader.parsed("COORDINATOR_PORT", parse_port)
    reader.own_address = address and (address[0], "COORDINATOR_ADDRESS")
    if "MASTER_PORT" not in reader.environ:
        reader.put("COORDINATOR_PORT", master_port=port)


JAXJOB = Launcher(
    name="jaxjob",
    title="Kubeflow JAXJob",
    markers=_JAXJOB,
    numbers=("PROCESS_ID", "NUM_PROCESSES"),
    more=_read_jaxjob,
    in_order=(),
    claim=_claim_jaxjob,
    needs_claim=True,
    source="documentation: Kubeflow training operator v1, pkg/controller.v1/jax/envvar.go",
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
)
