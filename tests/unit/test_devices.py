"""Which device and backend a rank gets, and what oneCCL is told; a stand-in for torch says what is visible."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from captured import one
from conftest import Run
from launched import MPI_ENV, TWO_OF_MPIRUN, json_lines, needs_mpirun, needs_torch

from distboot import (
    DistbootError,
    Placement,
    detect,
    frameworks,
)
from distboot.agent.session import alone
from distboot.cli.run import run as run_wrapper
from distboot.frameworks._torch import device_and_backend, oneccl_variables, set_device

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


_NOT_THERE = "backend-not-available"
_NEEDS_CUDA = (
    f"{_NOT_THERE}: backend 'nccl' needs a cuda device, and torch sees none in this process"
)


@pytest.mark.parametrize(
    ("torch", "wanted", "expected"),
    [
        (_torch(), None, ("cpu", "gloo")),
        (_torch(cuda=0), None, ("cpu", "gloo")),
        (_torch(cuda=4), None, ("cuda", "nccl")),
        (_torch(cuda=4), "gloo", ("cpu", "gloo")),
        (_torch(cuda=4), "nccl", ("cuda", "nccl")),
        (_torch("gloo", cuda=4), None, ("cuda", "gloo")),
        (_torch("gloo xccl", cuda=0, xpu=2), None, ("xpu", "xccl")),
        (_torch("gloo hccl", hpu=8), None, ("hpu", "hccl")),
        (_torch(cuda=4), "cpu:gloo,cuda:nccl", ("cuda", "cpu:gloo,cuda:nccl")),
        (
            _torch("gloo", cuda=4),
            "nccl",
            f"{_NOT_THERE}: this build of torch has no backend 'nccl'",
        ),
        (_torch(cuda=0), "nccl", _NEEDS_CUDA),
        (_torch(cuda=0), "cpu:gloo,cuda:nccl", _NEEDS_CUDA),
    ],
)
def test_device_and_backend(torch: Any, wanted: str | None, expected: object) -> None:
    found: object
    try:
        found = device_and_backend(torch, wanted)
    except DistbootError as error:
        found = f"{error.code}: {error.message}"
    assert found == expected


@pytest.mark.parametrize(
    ("visible", "rank", "environ", "index"),
    [
        (4, 2, {}, 2),
        (8, 3, _ISOLATED, 3),
        (1, 2, _ISOLATED, 0),
        (1, 0, {}, 0),
        (2, 2, {}, None),
        (2, 2, _ISOLATED, None),
        (1, 2, {}, None),
    ],
)
def test_device_is_local_rank_or_only_one(
    visible: int, rank: int, environ: dict[str, str], index: int | None
) -> None:
    torch = _torch(cuda=visible)
    if index is None:
        with pytest.raises(
            DistbootError,
            match=f"local rank 2 of 4 has no cuda device of its own: {visible} visible",
        ):
            set_device(torch, "cuda", _rank(rank), environ)
    else:
        assert set_device(torch, "cuda", _rank(rank), environ) == ("cuda", index)
    assert torch.cuda.chosen == index


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
    placement = Placement(
        "openmpi",
        None,
        3,
        4,
        1,
        2,
        1,
        2,
        "nodea",
        29500,
        None,
    )
    assert oneccl_variables(placement, environ) == expected


def test_oneccl_is_configured_with_an_intel_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = one("openmpi-5.0.11/1node_4procs", 1)
    for there in (True, False):
        monkeypatch.setattr("distboot.host.accelerators.has_intel_gpu", lambda there=there: there)
        exported = frameworks.exports("torch", alone(detect(environ), 1.0), environ)
        assert ("CCL_LOCAL_RANK" in exported) is there


_NO_LOCAL_RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "PMIX_RANK": "1",
}


@pytest.mark.parametrize(
    ("environ", "local_rank"),
    [
        (one("openmpi-5.0.11/1node_4procs", 1), "2"),
        ({**_NO_LOCAL_RANK, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "1"),
        (_NO_LOCAL_RANK, None),
    ],
    ids=["openmpi", "variables", "unknown"],
)
def test_oneccl_is_configured_without_a_rendezvous(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], local_rank: str | None
) -> None:
    exported: dict[str, str] = {}

    def become(_: list[str], environ: dict[str, str], **__: Any) -> None:
        exported.update(environ)
        raise SystemExit

    monkeypatch.setattr("os.environ", {**environ, "DISTBOOT_RENDEZVOUS": "0"})
    monkeypatch.setattr("distboot.cli.run.become", become)
    monkeypatch.setattr("distboot.host.accelerators.has_intel_gpu", lambda: True)
    with pytest.raises(SystemExit):
        run_wrapper(["--exec", "--", "true"])
    assert exported.get("CCL_LOCAL_RANK") == local_rank


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
    expected = [
        {"rank": n, "device": f"xpu:{n}", **_CCL, "CCL_LOCAL_RANK": str(n)} for n in range(2)
    ]
    assert json_lines(result) == expected
