"""What oneCCL, which torch uses on Intel's GPUs, is told of the local rank.

There is no such GPU here, and a mock stands in for it: what oneCCL and torch's ProcessGroupXCCL do with the variables
is from their sources.
"""

from __future__ import annotations

import sys

import pytest
from captured import one
from conftest import Run
from launched import MPI_ENV, MPIRUN, json_lines, needs_mpirun, needs_torch

from distboot import Placement, detect, frameworks
from distboot.frameworks import _oneccl
from distboot.rollcall.meeting import alone

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
    assert _oneccl.variables(placement, environ) == expected


def test_oneccl_is_told_where_there_is_a_gpu_of_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = one("openmpi-5.0.11/1node_4procs", 1)
    for there in (True, False):
        monkeypatch.setattr("distboot.frameworks._oneccl.has_intel_gpu", lambda there=there: there)
        exported = frameworks.exports("torch", alone(detect(environ), 1.0), environ)
        assert ("CCL_LOCAL_RANK" in exported) is there


@needs_mpirun
@needs_torch
def test_init_on_an_xpu_tells_it(run: Run) -> None:
    assert MPIRUN is not None
    script = """
import json, os, sys, distboot, torch
torch.xpu.is_available, torch.xpu.device_count, torch.xpu.set_device = lambda: True, lambda: 2, lambda index: None
with distboot.init(join_timeout=60) as ctx:
    found = {name: value for name, value in os.environ.items() if "CCL_" in name}
    sys.stdout.write(json.dumps({"rank": ctx.rank, "device": str(ctx.device), **found}) + "\\n")
"""
    result = run(MPIRUN, "-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable, "-c", script, env=MPI_ENV)
    assert json_lines(result) == [
        {"rank": rank, "device": f"xpu:{rank}", **_CCL, "CCL_LOCAL_RANK": str(rank)} for rank in range(2)
    ]
