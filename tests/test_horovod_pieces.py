"""What is decided before Horovod starts: MPI or Gloo, the device, and where rank 0 serves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from captured import one

from distboot import DistbootError, detect
from distboot.frameworks._horovod_build import Build
from distboot.frameworks._horovod_controller import controller
from distboot.frameworks._horovod_module import device
from distboot.frameworks._horovod_rendezvous import Rendezvous
from distboot.rollcall.meeting import Meeting

_ALL, _NO_GLOO, _NO_MPI = Build(True, True, "Open MPI v4.1.4"), Build(True, False), Build(False, True)
_OLD, _MPICH = replace(_ALL, gloo=False), replace(_ALL, library="MPICH Version: 4.0.2")


@pytest.mark.parametrize(
    ("build", "job", "env", "backend", "expected"),
    [
        (_ALL, "openmpi-4.1.4/1node_4procs", {}, None, "mpi"),
        (_ALL, "openmpi-4.1.4/1node_4procs", {"HOROVOD_CONTROLLER": "gloo"}, None, "gloo"),
        (_ALL, "openmpi-4.1.4/1node_4procs", {"HOROVOD_CONTROLLER": "gloo"}, "mpi", "contradicts backend='mpi'"),
        (_ALL, "openmpi-4.1.4/1node_4procs", {"HOROVOD_CONTROLLER": "nccl"}, None, "is neither mpi nor gloo"),
        (_ALL, "openmpi-4.1.4/1node_4procs", {}, "nccl", "Horovod has 'mpi' and 'gloo'"),
        (_ALL, "openmpi-5.0.11/1node_4procs", {}, None, "gloo"),
        (_ALL, "openmpi-5.0.11/1node_4procs", {}, "mpi", "does not work under the mpirun of Open MPI 5"),
        (_OLD, "openmpi-5.0.11/1node_4procs", {}, None, "does not work under the mpirun of Open MPI 5"),
        (_MPICH, "openmpi-4.1.4/1node_4procs", {}, None, "gloo"),
        (_MPICH, "mpich-4.0.2/1node_4procs", {}, None, "mpi"),
        (_NO_MPI, "openmpi-4.1.4/1node_4procs", {}, None, "gloo"),
        (_NO_MPI, "openmpi-4.1.4/1node_4procs", {}, "mpi", "HOROVOD_WITH_MPI=1"),
        (_ALL, "slurm-srun-22.05.8/1node_4procs", {}, None, "gloo"),
        (_ALL, "slurm-srun-22.05.8/1node_4procs", {"HOROVOD_CPU_OPERATIONS": "MPI"}, None, "contradicts Gloo"),
        (_ALL, "slurm-srun-22.05.8/1node_4procs", {}, "mpi", "mpi"),
        (_NO_GLOO, "torchrun-2.13.0/1node_4procs", {}, None, "HOROVOD_WITH_GLOO=1"),
        (_NO_GLOO, "slurm-srun-22.05.8/1node_4procs", {}, None, "HOROVOD_WITH_GLOO=1"),
    ],
)  # fmt: skip
def test_controller(build: Build, job: str, env: dict[str, str], backend: str | None, expected: str) -> None:
    environ = {**one(job, 0), **env}
    try:
        found = controller(build, detect(environ), environ, backend)
    except DistbootError as error:
        found = str(error)
    assert found == expected if len(expected) < 5 else expected in found


def test_gpus_that_horovod_was_not_built_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # no accelerator can be had here
    hvd = SimpleNamespace(cuda_built=lambda: False, rocm_built=lambda: False)
    with pytest.raises(DistbootError, match="HOROVOD_GPU_OPERATIONS=NCCL"):
        device(hvd, detect({}), {})


def test_rendezvous_on_ipv6_alone_is_refused() -> None:
    meeting = Meeting(detect({}), 1.0)
    meeting.own_address = "2001:db8::1"
    with pytest.raises(DistbootError, match="needs IPv4, and rank 0 was reached at 2001:db8::1"):
        Rendezvous(meeting)
