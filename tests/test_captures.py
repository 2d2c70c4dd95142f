"""Every captured process of every launcher: never a wrong number, also when its variables are damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeVar

import pytest
from captured import ALL, NUMBERS, Capture, wrong_numbers

from distboot import DistbootError, Placement, detect

# What the environment of each captured process cannot prove: capture -> the unknown numbers, rank by rank. After a
# change that is meant: DISTBOOT_WRITE_UNKNOWN=1 make test ARGS=tests/test_captures.py, and read the difference.
_UNKNOWN_FILE = Path(__file__).parent / "unknown_numbers.json"
_UNKNOWN: dict[str, list[str]] = json.loads(_UNKNOWN_FILE.read_text())

_LAUNCHERS = {
    "accelerate-1.15.0/cpu_num_processes_2": "single",
    "accelerate-1.15.0/cpu_mpirun_hostfile_mpich": "mpich",
    "accelerate-1.15.0/use_deepspeed_pdsh": "deepspeed",
    "accelerate": "torchrun",
    "deepspeed-0.19.8/slurm": "slurm",
    "deepspeed-0.19.8/openmpi4": "openmpi",
    "deepspeed-0.19.8/mpich": "mpich",
    "deepspeed-0.19.8/impi": "intelmpi",
    "deepspeed": "deepspeed",
    "horovodrun-0.28.1/mpi": "openmpi",
    "horovodrun": "horovodrun",
    "intelmpi": "intelmpi",
    "lightning": "torchrun",
    "mpich": "mpich",
    "mvapich": "mvapich",
    "openmpi": "openmpi",
    "plain-python": "single",
    "slurm-interactive-22.05.8/uis_salloc_shell_typed_srun": "slurm",
    "slurm-interactive": "single",
    "slurm-salloc-22.05.8/salloc_shell": "single",
    "slurm-sbatch+openmpi": "openmpi",
    "slurm-sbatch+mpich": "mpich",
    "slurm-sbatch+intelmpi": "intelmpi",
    "slurm-sbatch+torchrun": "torchrun",
    "slurm-salloc+torchrun": "torchrun",
    "slurm-sbatch-22.05.8/batch_step": "single",
    "slurm-": "slurm",
    "torch": "torchrun",
}

_T = TypeVar("_T")

_MALFORMED = ("abc", "", "-1", "1e3", "9" * 30)


def _by_prefix(table: dict[str, _T], name: str) -> _T | None:
    return next((value for prefix, value in table.items() if name.startswith(prefix)), None)


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_captured_process_is_placed_as_it_really_was(capture: Capture) -> None:
    placements = [detect(process.environ) for process in capture.processes]
    for placement, process in zip(placements, capture.processes, strict=True):
        assert wrong_numbers(placement, process.expected) == {}
        assert placement.launcher == _by_prefix(_LAUNCHERS, capture.name), "a new capture needs its line in _LAUNCHERS"
        stated = {field for field in NUMBERS if getattr(placement, field) is not None}
        assert stated <= placement.sources.keys(), "every value says where it came from"
    assert _unknown(placements) == _UNKNOWN.get(capture.name, [""] * len(placements)), "as in unknown_numbers.json"


def _unknown(placements: list[Placement]) -> list[str]:
    return [" ".join(field for field in NUMBERS if getattr(placement, field) is None) for placement in placements]


if "DISTBOOT_WRITE_UNKNOWN" in os.environ:
    _UNKNOWN = {one.name: _unknown([detect(process.environ) for process in one.processes]) for one in ALL}
    _UNKNOWN = {name: fields for name, fields in _UNKNOWN.items() if any(fields)}
    _UNKNOWN_FILE.write_text(json.dumps(_UNKNOWN, indent=1) + "\n")


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_all_ranks_of_a_job_agree_on_where_rank_0_is(capture: Capture) -> None:
    placements = [detect(process.environ) for process in capture.processes]
    assert len({(p.master_addr, p.master_port) for p in placements}) == 1
    host = placements[0].master_addr
    if host not in (None, "127.0.0.1", "localhost", "10.77.0.11"):  # nodea by its address
        assert host.partition(".")[0] == capture.processes[0].expected["rank0_host"]


def _damaged(environ: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """The environment with each of its variables dropped, and malformed in several ways."""
    cases = []
    for name in environ:
        cases.append((f"{name} dropped", {other: value for other, value in environ.items() if other != name}))
        cases += [(f"{name}={value!r}", {**environ, name: value}) for value in _MALFORMED]
    return cases


def _detected(environ: dict[str, str]) -> Placement | None:
    """The placement; None when there is an error, which then has a text. Any other exception is a failure."""
    try:
        return detect(environ)
    except DistbootError as error:
        return None if error.message else detect(environ)


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_damaged_environment_gives_the_same_numbers_or_a_named_error(capture: Capture) -> None:
    for process in capture.processes:
        address = detect(process.environ).master_addr
        for what, environ in _damaged(process.environ):
            placement = _detected(environ)
            assert placement is None or wrong_numbers(placement, process.expected) == {}, what
            if placement is not None and placement.launcher == "slurm" and "MASTER_" not in what:
                assert placement.master_addr in (None, address, process.expected["rank0_host"]), what


# The variables of which each launcher needs every one.
_REQUIRED = {
    "openmpi-5.0.11/uneven_3_1": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "torchrun-2.13.0/uneven_3_1_c10d": (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
        "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    ),
    "slurm-srun-22.05.8/uneven_3_1_default": (
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID",
    ),
}  # fmt: skip


# Any text is well-formed there; an empty host is not.
_FREE_TEXT = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def _broken_requirements() -> list[tuple[str, str, str | None]]:
    cases = [(n, v, value) for n, variables in _REQUIRED.items() for v in variables for value in (None, "", "abc")]
    host_name = ("MASTER_ADDR", "abc")
    return [
        (n, v, value) for n, v, value in cases if value is None or (v not in _FREE_TEXT and (v, value) != host_name)
    ]


@pytest.mark.parametrize(("name", "variable", "value"), _broken_requirements())
def test_required_variable_is_named_with_its_value(name: str, variable: str, value: str | None) -> None:
    capture = next(capture for capture in ALL if capture.name == name)
    environ = dict(capture.processes[3].environ)
    if value is None:
        del environ[variable]
    else:
        environ[variable] = value
    with pytest.raises(DistbootError) as refusal:
        detect(environ)
    assert refusal.value.code == "broken-environment"
    assert (f"{variable} is missing" if value is None else f"{variable}={value!r}") in refusal.value.message


def test_all_problems_come_in_one_error() -> None:
    environ = {**ALL[0].processes[0].environ, "RANK": "abc", "WORLD_SIZE": "", "LOCAL_RANK": "-1", "MASTER_PORT": "0"}
    with pytest.raises(DistbootError) as refusal:
        detect(environ)
    for said in ("RANK='abc'", "WORLD_SIZE='' is empty", "LOCAL_RANK='-1'", "MASTER_PORT='0'"):
        assert said in refusal.value.message


def test_detection_reads_the_mapping_and_changes_nothing() -> None:
    environ = dict(ALL[0].processes[0].environ)
    before = dict(environ)
    first = detect(environ)
    assert isinstance(first, Placement)
    assert environ == before
    assert detect(environ) == first
