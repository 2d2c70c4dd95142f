"""What a launcher would have set: the environment of every rank of a launch that is written `"mpirun 2x4"`.

And how such ranks are run on this host. The environments are those of the captures in `tests/captures`.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from .errors import DistbootError
from .text import did_you_mean, short_repr

_SHAPE = re.compile(r"(\w[\w ]*?) +(?:([1-9]\d{0,2})x([1-9]\d{0,2})|([1-9]\d{0,2})\+1)")
_STOPPING = 10.0  # seconds for what has to end
_HINT = "--as 'mpirun 2x4' is two nodes with four ranks each, --as 'kubeflow 3+1' three workers and a master"

# What each sets for a rank, besides MASTER_ADDR and MASTER_PORT, which job scripts and platforms set.
# Open MPI 5, without the address of its server: MPI itself is not there.
_MPIRUN = """
OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} OMPI_COMM_WORLD_LOCAL_RANK={local}
OMPI_COMM_WORLD_LOCAL_SIZE={per_node} OMPI_COMM_WORLD_NODE_RANK={local} OMPI_UNIVERSE_SIZE={size}
OMPI_WORLD_SIZE={size} OMPI_WORLD_LOCAL_SIZE={per_node} OMPI_VERSION=5.0.11
"""
OF: Mapping[str, str] = {
    "mpirun": _MPIRUN,
    # Slurm 22.05.
    "srun": """
SLURM_JOB_ID=4711 SLURM_JOBID=4711 SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_PROCID={rank} SLURM_LOCALID={local}
SLURM_NTASKS={size} SLURM_NPROCS={size} SLURM_STEP_NUM_TASKS={size} SLURM_NTASKS_PER_NODE={per_node}
SLURM_NODEID={node} SLURM_NNODES={nodes} SLURM_JOB_NUM_NODES={nodes} SLURM_STEP_NUM_NODES={nodes}
SLURM_JOB_NODELIST={hosts} SLURM_NODELIST={hosts} SLURM_STEP_NODELIST={hosts} SLURMD_NODENAME=node-{node}
SLURM_TASKS_PER_NODE={per_node}(x{nodes}) SLURM_STEP_TASKS_PER_NODE={per_node}(x{nodes})
SLURM_SRUN_COMM_HOST=node-0 SLURM_STEP_LAUNCHER_PORT=1
""",
    # PyTorch 2.13, with a store of the script's own.
    "torchrun": """
RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local} LOCAL_WORLD_SIZE={per_node} GROUP_RANK={node}
GROUP_WORLD_SIZE={nodes} ROLE_NAME=default ROLE_RANK={rank} ROLE_WORLD_SIZE={size} OMP_NUM_THREADS=1
TORCHELASTIC_RUN_ID=try TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=False
""",
    # Azure ML's distribution of the type mpi.
    "azureml mpi": f"{_MPIRUN} AZUREML_RUN_ID=try AZ_BATCH_MASTER_NODE=node-0:6000",
    # A PyTorchJob of the training operator: RANK counts pods, and nothing says a local rank.
    "kubeflow": """
RANK={rank} WORLD_SIZE={size} PYTHONUNBUFFERED=1 PET_NNODES={nodes} PET_NPROC_PER_NODE=auto
KUBERNETES_SERVICE_HOST=10.96.0.1
""",
}
_OF_LAUNCHERS = re.compile(
    r"(OMPI|PMIX?|PRTE|SLURMD?|TORCHELASTIC|ROLE|GROUP|PET|AZ|AZUREML|KUBERNETES)_|"
    r"((LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT))$"
)


class Launch(NamedTuple):
    """A launcher, and the shape of what it starts."""

    text: str
    launcher: str
    nodes: int
    per_node: int

    def environs(self, port: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
        """What each rank finds: this environment without what another launcher has set, and with what this one sets."""
        own = {name: value for name, value in environ.items() if not _OF_LAUNCHERS.match(name)}
        own |= {"MASTER_ADDR": _address(), "MASTER_PORT": str(port)}
        found, size, hosts = (
            [],
            self.nodes * self.per_node,
            ",".join(f"node-{node}" for node in range(self.nodes)),
        )
        for rank in range(size):
            node, local = divmod(rank, self.per_node)
            values = {
                **self._asdict(),
                "rank": rank,
                "size": size,
                "local": local,
                "node": node,
                "hosts": hosts,
            }
            of_launcher = dict(
                word.split("=", 1) for word in OF[self.launcher].format(**values).split()
            )
            found.append({**own, **of_launcher, "DISTBOOT_HOST": f"node-{node}"})
        return found


def parse(text: str) -> Launch:
    """`"srun 2x4"`; `DistbootError` (`usage`): it is not a launch."""
    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise DistbootError(
            "usage", f"--as {short_repr(text)} is not a launcher and a shape", _HINT
        )
    launcher, nodes, per_node, workers = found.groups()
    if launcher not in OF:
        meant = did_you_mean(launcher, OF)
        raise DistbootError(
            "usage", f"--as {short_repr(text)}: unknown launcher", f"{meant}one of {', '.join(OF)}"
        )
    if workers and launcher != "kubeflow":
        raise DistbootError(
            "usage", f"--as {short_repr(text)}: only kubeflow has a master beside workers", _HINT
        )
    return Launch(text.strip(), launcher, int(nodes or int(workers) + 1), int(per_node or 1))


def _address() -> str:
    """An address of this host beyond loopback, as a node has one; loopback's if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # of documentation, RFC 5737; nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def run(
    command: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    limit: float,
    late: Callable[[subprocess.Popen[bytes]], object] = lambda _: None,
    **output: Any,
) -> list[int | None]:
    """Run a command once for each of these ranks: the exit codes; None: it has not ended within the limit in seconds.

    What is left then, or at an interrupt, is ended; but first `late` gets the process of rank 0.
    """
    end = time.monotonic() + limit
    # In sessions of their own, so that their children, too, get no key of our terminal.
    processes = [
        subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True, **output
        )
        for environ in environs
    ]
    try:
        _wait(processes, end)
        codes = [process.returncode for process in processes]
        if None in codes:
            late(processes[0])
        return codes
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                process.send_signal(number)
            _wait(processes, time.monotonic() + _STOPPING)


def _wait(processes: Sequence[subprocess.Popen[bytes]], end: float) -> None:
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0.0))
