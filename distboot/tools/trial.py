"""Launches that are tried on this host: `"mpirun 2x4"` is two nodes with four ranks each.

A launch gives each rank the environment that the launcher would give it, as the captures in
`tests/captures` have it, and is run without the launcher.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ..base.errors import DistbootError
from ..base.internal_variables import INTERNAL, RANK
from ..base.patterns import pattern
from ..base.text import did_you_mean, short_repr
from ..detection.launchers import sample_of
from ..detection.order import LAUNCHERS
from ..host import network

_SHAPE = pattern(r"(\w[\w ]*?) +(?:([1-9]\d{0,2})x([1-9]\d{0,2})|([1-9]\d{0,2})\+1)")
_STOPPING = 10.0  # seconds for a process to end after a signal
# All run on this host, each a wrapper and a script: eight nodes with eight ranks
_MOST_RANKS = 64
_HINT = (
    "--as 'mpirun 2x4' is two nodes with four ranks each, "
    "--as 'kubeflow 3+1' three workers and a master"
)

# The variables of a rank by launcher, besides MASTER_ADDR and MASTER_PORT, which job scripts and
# platforms set. Those of Open MPI are without the address of its server: MPI itself cannot be used.
VARIABLES: Mapping[str, str] = {
    "mpirun": LAUNCHERS["openmpi"].sample,
    "srun": LAUNCHERS["slurm"].sample,
    "torchrun": LAUNCHERS["torchrun"].sample,
    # Azure ML's distribution of type mpi
    "azureml mpi": (
        f"{LAUNCHERS['openmpi'].sample} AZUREML_RUN_ID=try AZ_BATCH_MASTER_NODE=node-0:6000"
    ),
    # A PyTorchJob of the training operator: RANK counts pods, and there is no local rank.
    "kubeflow": """
RANK={rank} WORLD_SIZE={size} PYTHONUNBUFFERED=1 PET_NNODES={nodes} PET_NPROC_PER_NODE=auto
KUBERNETES_SERVICE_HOST=10.96.0.1
""",
}
_LAUNCHER_VARIABLE = pattern(
    r"(OMPI|PMIX?|PRTE|SLURMD?|TORCHELASTIC|ROLE|GROUP|PET|AZ|AZUREML|KUBERNETES)_|"
    r"((LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|NUM_NODES|MASTER_(ADDR|PORT))$"
)
# Variables of distboot that a launch does not get
_NOT_FOR_LAUNCH = {
    # They would replace the launch: a user or an outer distboot sets them
    *("DISTBOOT_LAUNCHER", "DISTBOOT_NPROC_PER_NODE", *RANK, *INTERNAL),
    # Where a job leaves what others read: a launch here is no job
    *("DISTBOOT_BAD_HOSTS_FILE", "DISTBOOT_METRICS"),
}


class Launch(NamedTuple):
    """A launcher, and the nodes and ranks that it starts."""

    text: str
    launcher: str
    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def environs(self, port: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
        """By rank: `environ`, with the variables of this launcher in place of all others."""
        common = {name: value for name, value in environ.items() if not _is_of_launch(name)}
        common["MASTER_ADDR"] = self._address()
        common["MASTER_PORT"] = str(port)
        common["DISTBOOT_KUBEFLOW_STATUS"] = "0"
        found = []
        for rank in range(self.ranks):
            node = f"node-{rank // self.per_node}"
            own = sample_of(VARIABLES[self.launcher], rank, self.nodes, self.per_node)
            found.append({**common, **own, "DISTBOOT_HOST": node})
        return found

    def _address(self) -> str:
        """An address of this host, as a node of several has it."""
        address = _address_of_route()
        for _, own_address in network.addresses():
            if address is None and not ipaddress.ip_address(own_address).is_loopback:
                address = own_address
        if address is not None:
            return address
        if self.nodes == 1:
            return "127.0.0.1"
        raise DistbootError(
            "usage",
            f"{short_repr(self.text)} has several nodes, and this host has no address for"
            " another one: loopback is its only interface",
            "connect it to a network, or try one node: --as 'mpirun 1x2'",
        )


def _is_of_launch(variable: str) -> bool:
    """Whether a launcher, or distboot for one launch, sets this variable."""
    return variable in _NOT_FOR_LAUNCH or _LAUNCHER_VARIABLE.match(variable) is not None


def parse(text: str) -> Launch:
    """Read `"srun 2x4"` or `"kubeflow 3+1"`."""
    given = f"--as {short_repr(text)}"
    found = _SHAPE.fullmatch(text.strip())
    if text.strip() in VARIABLES:
        raise DistbootError("usage", f"{given} lacks the number of nodes and ranks", _HINT)
    if found is None:
        raise DistbootError("usage", f"{given} is not a launcher and a shape", _HINT)
    launcher, nodes, per_node, workers = found.groups()
    if launcher not in VARIABLES:
        hint = f"{did_you_mean(launcher, VARIABLES)}one of {', '.join(VARIABLES)}"
        raise DistbootError("usage", f"{given}: unknown launcher", hint)
    if not workers:
        launch = Launch(text.strip(), launcher, int(nodes), int(per_node))
    elif launcher == "kubeflow":
        launch = Launch(text.strip(), launcher, int(workers) + 1, 1)
    else:
        raise DistbootError("usage", f"{given}: only kubeflow has a master beside workers", _HINT)
    if launcher == "kubeflow" and launch.per_node > 1:
        message = f"{given}: a pod of a PyTorchJob has one process"
        pods = launch.ranks
        raise DistbootError("usage", message, f"use {pods} pods: --as 'kubeflow {pods}x1'")
    if launch.ranks > _MOST_RANKS:
        message = f"{given} has {launch.ranks} ranks; at most {_MOST_RANKS} run on one machine"
        raise DistbootError("usage", message, "use fewer ranks, for example --as 'mpirun 2x4'")
    return launch


def _address_of_route() -> str | None:
    """The address of this host for the way to others; None: it has no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737); nothing is sent
        return str(probe.getsockname()[0])
    return None


def run(
    command: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    limit: float,
    late: Callable[[subprocess.Popen[bytes]], object] = lambda _: None,
    **output: Any,
) -> list[int | None]:
    """Run a command once for each of these ranks; its exit codes, None if not ended within `limit`
    seconds.

    Processes that still run then, or at an interrupt, SIGTERM or SIGHUP, are ended, and no more are
    started. Before, `late` gets the process of rank 0. SIGTERM and SIGHUP raise SystemExit, SIGINT
    KeyboardInterrupt.
    """
    end = time.monotonic() + limit
    processes: list[subprocess.Popen[bytes]] = []
    with _stop_signals() as signals:
        try:
            for environ in environs:
                process = subprocess.Popen(
                    command,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # neither it nor its children get keys of the terminal
                    **output,
                )
                processes.append(process)
                if signals.received or time.monotonic() >= end:
                    break
            with signals.as_exits():
                _wait(processes, end)
                codes = [process.returncode for process in processes]
                codes += [None] * (len(environs) - len(processes))
                if None in codes:
                    late(processes[0])
                return codes
        finally:
            _end(processes)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StopSignals:
    """SIGINT, SIGTERM and SIGHUP: raised in `as_exits`, delayed while processes start or end."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._may_exit = False

    def receive(self, number: int, _: object) -> None:
        """Handle a signal."""
        self.received.append(number)
        if self._may_exit:
            self.exit_if_received()

    @contextmanager
    def as_exits(self) -> Iterator[None]:
        """Exit at a signal in this block, or before it."""
        try:
            self._may_exit = True
            self.exit_if_received()
            yield
        finally:
            self._may_exit = False

    def exit_if_received(self) -> None:
        """Raise for the first signal; a later one does not interrupt the cleanup."""
        if not self.received:
            return
        self._may_exit = False
        first = self.received[0]
        if first == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + first)


@contextmanager
def _stop_signals() -> Iterator[_StopSignals]:
    """Handle signals that end a program in this block, unless they are ignored, as by `nohup`.

    Only the main thread can.
    """
    signals = _StopSignals()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            # None: the handler is not of Python
            if handler not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, signals.receive)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    signals.exit_if_received()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            process.send_signal(number)
        _wait(processes, time.monotonic() + _STOPPING)


def _wait(processes: Sequence[subprocess.Popen[bytes]], end: float) -> None:
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0.0))
