"""Horovod and the MPI of mpirun: the one that it was built with, another one, or none; never two worlds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run
from horovods import INIT, UNDER_4, WRAPPED, are_one_world, launched, lines_of, needs_horovod, needs_openmpi4
from launched import MPIRUN, needs_mpirun

pytestmark = [needs_horovod, pytest.mark.usefixtures("horovod_scripts")]
MPICH = shutil.which("mpiexec.mpich")
needs_mpich = pytest.mark.skipif(MPICH is None, reason="no mpiexec.mpich (see tests/cluster/packages.txt)")
GLOO_ONLY = Path(sys.prefix, "horovod-gloo")
needs_gloo_only = pytest.mark.skipif(not GLOO_ONLY.is_dir(), reason="no Horovod on Gloo alone (see the Makefile)")
UNDER_5 = (str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2")
# What Horovod finds on a host that has Debian's Open MPI 4 only: here the dynamic linker prefers the 5 of the wheel.
LIBRARY_4 = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
needs_library_4 = pytest.mark.skipif(not LIBRARY_4.exists(), reason="no Open MPI 4 (see tests/cluster/packages.txt)")


@needs_openmpi4
def test_mpi_under_open_mpi_4_and_only_once_a_process(run: Run) -> None:
    lines, _ = launched(run, UNDER_4, "again.py")
    assert are_one_world([line for line in lines if "code" not in line], mpi=True)
    assert [line["code"] for line in lines if "code" in line] == ["already-initialized"] * 2


@needs_openmpi4
def test_gloo_under_open_mpi_4_for_who_asks(run: Run) -> None:
    lines, _ = launched(run, UNDER_4, *INIT, BACKEND="gloo")
    assert are_one_world(lines, mpi=False)


@needs_mpirun
@needs_library_4
@pytest.mark.parametrize("script", [INIT, WRAPPED], ids=["init", "wrapper"])
def test_open_mpi_5_and_a_horovod_on_open_mpi_4_are_no_two_worlds(run: Run, script: tuple[str, ...]) -> None:
    lines, said = launched(run, (*UNDER_5, "env", f"LD_PRELOAD={LIBRARY_4}"), *script)
    assert are_one_world(lines, mpi=False)
    assert "Horovod's MPI is Open MPI v4" in said
    assert "does not work under the mpirun of Open MPI 5; so Horovod uses Gloo" in said


@needs_mpich
def test_mpich_and_a_horovod_on_open_mpi_are_no_two_worlds(run: Run, port: int) -> None:
    lines, said = launched(run, (str(MPICH), "-n", "2"), *INIT, MASTER_PORT=str(port))
    assert are_one_world(lines, mpi=False)
    assert "does not work under the mpirun of mpich; so Horovod uses Gloo" in said


@needs_openmpi4
def test_mpi_that_does_not_find_its_peers_is_an_error(run: Run) -> None:
    launcher = (*UNDER_4, "env", "-u", "PMIX_RANK", "-u", "PMIX_NAMESPACE", "-u", "OMPI_MCA_ess")  # as sudo would
    lines, _ = launched(run, launcher, *INIT)
    assert {(line["code"], line["unchanged"]) for line in lines} == {("rank-mismatch", True)}
    assert any("this is rank 1 of 2, local rank 1 of 2, cross rank 0 of 1, and Horovod that it is rank 0 of 1, "
               in line["text"] for line in lines)  # fmt: skip
    assert "backend='gloo'" in lines[0]["text"]


@needs_gloo_only
@pytest.mark.parametrize(
    "launcher", [pytest.param(UNDER_4, marks=needs_openmpi4), pytest.param(UNDER_5, marks=needs_mpirun)], ids=["4", "5"]
)
def test_gloo_alone_under_mpirun_is_one_world(run: Run, launcher: tuple[str, ...]) -> None:
    lines, _ = launched(run, launcher, *INIT, PYTHONPATH=f"{GLOO_ONLY}:{ROOT}")
    assert are_one_world(lines, mpi=False)


@needs_gloo_only
@needs_openmpi4
def test_ranks_with_different_builds_all_say_so(run: Run) -> None:
    command = [sys.executable, *INIT]
    done = run(*UNDER_4[:2], "-n", "1", *command, ":", "-n", "1", "env", f"PYTHONPATH={GLOO_ONLY}:{ROOT}", *command)
    lines = lines_of(done)
    assert [(line["code"], line["unchanged"]) for line in lines] == [("rank-mismatch", True)] * 2, done.stderr
    texts = sorted(line["text"].partition(": Horovod is about ")[2].partition("\n")[0] for line in lines)
    assert texts == [
        "to use gloo on rank 1, and something else on rank 0", "to use mpi on rank 0, and something else on rank 1"
    ]  # fmt: skip


@needs_gloo_only
@pytest.mark.parametrize(
    ("env", "code", "flag"),
    [
        ({"WHICH": "horovod.tensorflow"}, "framework-not-installed", "HOROVOD_WITH_TENSORFLOW=1"),
        ({"BACKEND": "mpi"}, "backend-not-available", "HOROVOD_WITH_MPI=1"),
    ],
)
def test_what_the_build_lacks_is_named(run: Run, env: dict[str, str], code: str, flag: str) -> None:
    ((line,), _) = launched(run, (), *INIT, PYTHONPATH=f"{GLOO_ONLY}:{ROOT}", **env)
    assert (line["code"], line["unchanged"]) == (code, True)
    assert (
        f"this Horovod was built without {'MPI' if 'BACKEND' in env else 'its part for tensorflow'} ({flag})"
        in line["text"]
    )
