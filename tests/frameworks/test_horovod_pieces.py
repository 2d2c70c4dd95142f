"""What is decided before Horovod starts (MPI or Gloo, device, where rank 0 serves), and the numbers of horovodrun."""

import itertools
from collections import defaultdict
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from captured import one
from inside import replace

from distboot import DistbootError, detect
from distboot.agent.session import Session
from distboot.frameworks._horovod_build import Build, set_own_device
from distboot.frameworks._horovod_controller import controller
from distboot.frameworks._horovod_gloo import serve_rendezvous

_ALL = Build(True, True, "Open MPI v4.1.4")
_NO_GLOO = Build(True, False)
_NO_MPI = Build(False, True)
_OLD = _ALL._replace(gloo=False)
_MPICH = _ALL._replace(library="MPICH Version: 4.0.2")


@pytest.mark.parametrize(
    ("build", "job", "env", "backend", "expected"),
    [
        (_ALL, "openmpi-4.1.4/1node_4procs", {}, None, "mpi"),
        (_ALL, "openmpi-4.1.4/1node_4procs", {"HOROVOD_CONTROLLER": "gloo"}, None, "gloo"),
        (
            _ALL,
            "openmpi-4.1.4/1node_4procs",
            {"HOROVOD_CONTROLLER": "gloo"},
            "mpi",
            "contradicts backend='mpi'",
        ),
        (
            _ALL,
            "openmpi-4.1.4/1node_4procs",
            {"HOROVOD_CONTROLLER": "nccl"},
            None,
            "is neither mpi nor gloo",
        ),
        (_ALL, "openmpi-4.1.4/1node_4procs", {}, "nccl", "Horovod has 'mpi' and 'gloo'"),
        (_ALL, "openmpi-5.0.11/1node_4procs", {}, None, "gloo"),
        (
            _ALL,
            "openmpi-5.0.11/1node_4procs",
            {},
            "mpi",
            "does not work under the mpirun of Open MPI 5",
        ),
        (
            _OLD,
            "openmpi-5.0.11/1node_4procs",
            {},
            None,
            "does not work under the mpirun of Open MPI 5",
        ),
        (_MPICH, "openmpi-4.1.4/1node_4procs", {}, None, "gloo"),
        (_MPICH, "mpich-4.0.2/1node_4procs", {}, None, "mpi"),
        (_NO_MPI, "openmpi-4.1.4/1node_4procs", {}, None, "gloo"),
        (_NO_MPI, "openmpi-4.1.4/1node_4procs", {}, "mpi", "HOROVOD_WITH_MPI=1"),
        (_ALL, "slurm-srun-22.05.8/1node_4procs", {}, None, "gloo"),
        (
            _ALL,
            "slurm-srun-22.05.8/1node_4procs",
            {"HOROVOD_CPU_OPERATIONS": "MPI"},
            None,
            "contradicts Gloo",
        ),
        (_ALL, "slurm-srun-22.05.8/1node_4procs", {}, "mpi", "mpi"),
        (_NO_GLOO, "torchrun-2.13.0/1node_4procs", {}, None, "HOROVOD_WITH_GLOO=1"),
        (_NO_GLOO, "slurm-srun-22.05.8/1node_4procs", {}, None, "HOROVOD_WITH_GLOO=1"),
    ],
)
def test_controller(
    build: Build, job: str, env: dict[str, str], backend: str | None, expected: str
) -> None:
    environ = {**one(job, 0), **env}
    try:
        found = controller(build, detect(environ), environ, backend)
    except DistbootError as error:
        found = str(error)
    assert found == expected if len(expected) < 5 else expected in found


def test_gpus_without_a_build_for_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # no accelerator can be had here
    hvd = SimpleNamespace(cuda_built=lambda: False, rocm_built=lambda: False)
    with pytest.raises(DistbootError, match="HOROVOD_GPU_OPERATIONS=NCCL"):
        set_own_device(hvd, detect({}), {})


def test_rendezvous_on_ipv6_alone_is_refused() -> None:
    job = Session(detect({}), 1.0)
    job.result = replace(job.result, own_address="2001:db8::1")
    with pytest.raises(DistbootError, match="needs IPv4, and rank 0 was reached at 2001:db8::1"):
        serve_rendezvous(job, ExitStack())


Layout = tuple[tuple[str, int], ...]


def _environs(layout: Layout) -> list[tuple[str, dict[str, str]]]:
    """Host and environment of each rank, as horovod/runner/common/util/hosts.py (0.28.1) assigns them for -H."""
    ranks: list[tuple[str, int, int]] = []
    cross: dict[int, dict[str, int]] = defaultdict(dict)
    for host, slots in layout:
        for local_rank in range(slots):
            cross[local_rank][host] = len(cross[local_rank])
            ranks.append((host, local_rank, slots))
    environs = []
    for rank, (host, local_rank, slots) in enumerate(ranks):
        numbers = {"RANK": rank, "SIZE": len(ranks), "LOCAL_RANK": local_rank, "LOCAL_SIZE": slots}
        numbers |= {"CROSS_RANK": cross[local_rank][host], "CROSS_SIZE": len(cross[local_rank])}
        environ = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
        server = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.77.0.10",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "35055",
        }
        environs.append((host, environ | server))
    return environs


# Equal nodes of one and of two processes, and a single node: completely.
_KNOWN = ((("a", 1), ("b", 1), ("c", 1)), (("a", 2), ("b", 2)), (("a", 3),))


@pytest.mark.parametrize("most", [3, pytest.param(4, marks=pytest.mark.all)])
def test_every_layout_of_some_mentions_of_three_hosts(most: int) -> None:
    mentions = list(itertools.product("abc", (1, 2, 3)))
    known = 0
    for layout in itertools.chain(
        *(itertools.product(mentions, repeat=count) for count in range(1, most + 1))
    ):
        environs = _environs(layout)
        hosts = [host for host, _ in environs]
        nodes = list(dict.fromkeys(hosts))
        for rank, (host, environ) in enumerate(environs):
            here = [other for other, its_host in enumerate(hosts) if its_host == host]
            p = detect(environ)
            truth = (here.index(rank), len(here), nodes.index(host), len(nodes))
            stated = (p.local_rank, p.local_world_size, p.node_rank, p.num_nodes)
            assert (p.rank, p.world_size) == (rank, len(hosts))
            assert all(
                number in (None, true) for number, true in zip(stated, truth, strict=True)
            ), (layout, rank)
            assert stated == truth or layout not in _KNOWN
            known += p.local_rank is not None
    assert known > {3: 500, 4: 5_000}[most]
