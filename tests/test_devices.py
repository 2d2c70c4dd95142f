"""Which device and backend a rank gets, and what oneCCL is told; a stand-in for torch says what is visible."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from captured import one
from conftest import Run
from launched import MPI_ENV, TWO_OF_MPIRUN, json_lines, needs_mpirun, needs_torch

from distboot import DistbootError, Placement, detect, frameworks
from distboot.frameworks._torch import device_and_backend, oneccl_variables, set_device
from distboot.rendezvous.job_info import alone

_ISOLATED = {"CUDA_VISIBLE_DEVICES": "3"}


def _accelerator(count: int) -> Any:
    """`torch.cuda` or `torch.xpu` of a machine with so many devices."""
    one = SimpleNamespace(chosen=None, is_available=lambda: count > 0, device_count=lambda: count)
    one.set_device = partial(setattr, one, "chosen")
    return one


def _torch(backends: str = "gloo nccl", **accelerators: int) -> Any:
    return SimpleNamespace(
        distributed=SimpleNamespace(is_backend_available=lambda name: name in backends.split()),
        device=lambda kind, index=None: (kind, index),
        **{name: _accelerator(count) for name, count in accelerators.items()},
    )


def _rank(rank: int) -> Placement:
    return detect(one("openmpi-4.1.4/1node_4procs", rank))


@pytest.mark.parametrize(
    ("torch", "wanted", "device_type", "backend"),
    [
        (_torch(), None, "cpu", "gloo"),
        (_torch(cuda=0), None, "cpu", "gloo"),
        (_torch(cuda=4), None, "cuda", "nccl"),
        (_torch(cuda=4), "gloo", "cpu", "gloo"),
        (_torch(cuda=4), "nccl", "cuda", "nccl"),
        (_torch("gloo", cuda=4), None, "cuda", "gloo"),
        (_torch("gloo xccl", cuda=0, xpu=2), None, "xpu", "xccl"),
        (_torch("gloo hccl", hpu=8), None, "hpu", "hccl"),
        (_torch(cuda=4), "cpu:gloo,cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
    ],
)
def test_device_and_backend(torch: Any, wanted: str | None, device_type: str, backend: str) -> None:
    assert device_and_backend(torch, wanted) == (device_type, backend)


@pytest.mark.parametrize(
    ("torch", "wanted", "said"),
    [
        (_torch("gloo", cuda=4), "nccl", "this build of torch has no backend 'nccl'"),
        (_torch(cuda=0), "nccl", "'nccl' needs a cuda device, and torch sees none"),
        (_torch(cuda=0), "cpu:gloo,cuda:nccl", "'nccl' needs a cuda device, and torch sees none"),
    ],
)
def test_backend_that_is_not_there_is_refused(torch: Any, wanted: str, said: str) -> None:
    with pytest.raises(DistbootError, match=said) as refusal:
        device_and_backend(torch, wanted)
    assert refusal.value.code == "backend-not-available"


@pytest.mark.parametrize(
    ("visible", "rank", "isolated", "index"), [(4, 2, False, 2), (8, 3, True, 3), (1, 2, True, 0), (1, 0, False, 0)]
)
def test_device_is_the_local_rank_or_the_only_one_shown(visible: int, rank: int, isolated: bool, index: int) -> None:
    torch = _torch(cuda=visible)
    assert set_device(torch, "cuda", _rank(rank), _ISOLATED if isolated else {}) == ("cuda", index)
    assert torch.cuda.chosen == index


@pytest.mark.parametrize(("visible", "isolated"), [(2, False), (2, True), (1, False)])
def test_too_few_devices_are_named(visible: int, isolated: bool) -> None:
    said = f"local rank 2 of 4 has no cuda device of its own: {visible} visible"
    with pytest.raises(DistbootError, match=said) as refusal:
        set_device(_torch(cuda=visible), "cuda", _rank(2), _ISOLATED if isolated else {})
    assert refusal.value.code == "too-few-accelerators"


_CCL = {"CCL_PROCESS_LAUNCHER": "none", "CCL_LOCAL_RANK": "1", "CCL_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PMIX_RANK": "3"}, _CCL),  # Open MPI, or srun --mpi=pmix
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, _CCL),  # srun --mpi=pmi2
        ({"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, {}),  # Hydra
        ({"RANK": "3", "LOCAL_RANK": "1"}, {}),  # torch says it
        ({"PMIX_RANK": "3", "CCL_PROCESS_LAUNCHER": "pmix"}, {}),  # the user does
    ],
)
def test_oneccl_is_told_the_local_rank(environ: dict[str, str], expected: dict[str, str]) -> None:
    placement = Placement("openmpi", None, 3, 4, 1, 2, 1, 2, "nodea", 29500, None)
    assert oneccl_variables(placement, environ) == expected


def test_oneccl_is_told_where_there_is_a_gpu_of_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = one("openmpi-5.0.11/1node_4procs", 1)
    for there in (True, False):
        monkeypatch.setattr("distboot.host.accelerators.has_intel_gpu", lambda there=there: there)
        exported = frameworks.exports("torch", alone(detect(environ), 1.0), environ)
        assert ("CCL_LOCAL_RANK" in exported) is there


@pytest.mark.all
@needs_mpirun
@needs_torch
def test_init_on_an_xpu_tells_it(run: Run) -> None:
    script = """
import json, os, sys, distboot, torch
torch.xpu.is_available, torch.xpu.device_count, torch.xpu.set_device = lambda: True, lambda: 2, lambda index: None
with distboot.init(join_timeout=60) as ctx:
    found = {name: value for name, value in os.environ.items() if "CCL_" in name}
    sys.stdout.write(json.dumps({"rank": ctx.rank, "device": str(ctx.device), **found}) + "\\n")
"""
    result = run(*TWO_OF_MPIRUN, sys.executable, "-c", script, env=MPI_ENV)
    expected = [{"rank": n, "device": f"xpu:{n}", **_CCL, "CCL_LOCAL_RANK": str(n)} for n in range(2)]
    assert json_lines(result) == expected
