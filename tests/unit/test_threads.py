"""How many threads per rank is told to start: its part of the CPUs, unless the user or the launcher has said it."""

import json
import os
import sys
from pathlib import Path

import pytest
from captured import one
from conftest import Run
from inside import bound_cpus, cpus
from launched import needs_torch

from distboot import detect

PLACE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
PLACE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("listed", "quota", "ranks", "expected"),
    [
        ("0-63 of 0-63", None, 1, None),  # what OpenMP does by itself
        ("0-63 of 0-63", None, 8, 8),
        ("0-63 of 0-63", 400_000, 1, 4),
        ("0-63 of 0-63", 150_000, 4, 1),
        ("16-23 of 0-63", None, 8, None),  # mpirun has bound each rank
        ("16-23 of 0-63", 1_600_000, 8, 2),
        ("0-15 of 0-15", None, 8, 2),  # docker run --cpuset-cpus
        ("0-15 of 0-63", None, 8, 2),  # taskset mpirun
        ("0 of 0-63", None, 8, None),
    ],
)
def test_share_of_a_rank(
    tmp_path: Path, listed: str, quota: int | None, ranks: int, expected: int | None
) -> None:
    _write_host(tmp_path, listed, quota)
    assert cpus.share(ranks, tmp_path) == expected


def _write_host(root: Path, listed: str, quota: int | None = None) -> None:
    """The files of a host where a process may use such CPUs."""
    allowed, of_all = listed.split(" of ")
    group = root / "sys/fs/cgroup"
    for folder in (root / "proc/self", group):
        folder.mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Cpus_allowed_list:\t{allowed}\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (group / "cpuset.cpus.effective").write_text(f"{of_all}\n")
    (group / "cpu.max").write_text(f"{quota or 'max'} 100000\n")


@pytest.mark.parametrize(
    ("listed", "threads", "expected"),
    [
        ("0 of 0-63", None, "has bound each rank to 1 of 64 CPUs, of which its share is 32: "),
        ("0,32 of 0-63", None, "has bound each rank to 2 of 64 CPUs, of which its share is 32: "),
        ("0 of 0-63", "8", "to 1 of 64 CPUs, and OMP_NUM_THREADS=8 is more than that: "),
        ("0-15 of 0-63", "32", "to 16 of 64 CPUs, and OMP_NUM_THREADS=32 is more than that: "),
        ("0-15 of 0-63", None, ""),  # of a NUMA node: enough
        ("0 of 0-1", None, ""),  # its share
        ("0-63 of 0-63", "64", ""),  # not bound
        ("0-15 of 0-63", "two", ""),  # for OpenMP to refuse
    ],
)
def test_rank_bound_below_its_share(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    listed: str,
    threads: str | None,
    expected: str,
) -> None:
    _write_host(tmp_path, listed)
    environ = {} if threads is None else {"OMP_NUM_THREADS": threads}
    first = detect(one("openmpi-4.1.4/2nodes_2procs", 0))
    second = detect(one("openmpi-4.1.4/2nodes_2procs", 1))
    bound_cpus.warn_of_rank(first, environ, tmp_path)
    said = capsys.readouterr().err
    if expected:
        assert said.startswith("distboot: rank 0 on ")
        assert expected + "mpirun --bind-to none" in said
    else:
        assert said == ""
    bound_cpus.warn_of_rank(second, environ, tmp_path)
    assert capsys.readouterr().err == ""


def test_torchrun_has_not_bound_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_host(tmp_path, "0 of 0-63")
    placement = detect(one("torchrun-2.13.0/2nodes_2procs_c10d", 0))
    bound_cpus.warn_of_rank(placement, {}, tmp_path)
    assert "warning: what started torchrun has bound each rank to 1 of" in capsys.readouterr().err


def test_unknown_without_proc_and_what_is_set_stays(tmp_path: Path) -> None:
    assert cpus.variables(8, {}, tmp_path) == {}
    assert cpus.variables(1_000_000, {"OMP_NUM_THREADS": "7"}) == {}


# The number for the one process that the wrapper started is not that for the ranks which this starts.
@pytest.mark.parametrize(
    "outer", [[], [sys.executable, "-m", "distboot", "run", "--"]], ids=["bare", "wrapper"]
)
def test_ranks_of_a_node_share_its_cpus(
    run: Run, clean_env: dict[str, str], outer: list[str]
) -> None:
    del clean_env["OMP_NUM_THREADS"]
    ranks = [
        "env",
        *(f"{name}={value}" for name, value in PLACE.items()),
        sys.executable,
        "-m",
        "distboot",
    ]
    done = run(*outer, *ranks, "env", "--json")
    assert int(json.loads(done.stdout)["OMP_NUM_THREADS"]) <= max(
        len(os.sched_getaffinity(0)) // 4, 1
    )


@needs_torch
def test_ranks_started_by_torchrun_share_them(distboot: Run, clean_env: dict[str, str]) -> None:
    del clean_env["OMP_NUM_THREADS"]
    share = max(len(os.sched_getaffinity(0)) // 2, 1)
    done = distboot(
        "run", "--nproc-per-node", "2", "--", "sh", "-c", "echo threads=$OMP_NUM_THREADS"
    )
    found = [
        int(line.removeprefix("threads="))
        for line in done.stdout.splitlines()
        if line.startswith("threads=")
    ]
    assert len(found) == 2, done.stderr
    assert all(each <= share for each in found)


def test_number_of_the_user_reaches_the_script(distboot: Run) -> None:
    script = "import os; print(os.environ['OMP_NUM_THREADS'])"
    done = distboot("run", "--", sys.executable, "-c", script, env={"OMP_NUM_THREADS": "5"})
    assert done.stdout == "5\n"
