"""Every captured process of every launcher: never a wrong number, also when its variables are damaged."""

import json
import os
from pathlib import Path

import pytest
from captured import ALL, NUMBERS, Capture, one, refused, shared_local_ranks, wrong_numbers
from inside import LAUNCHERS

from distboot import DistbootError, Placement, detect

# What the environment of each captured process cannot prove: capture -> the unknown numbers, rank by rank. After a
# change that is meant: DISTBOOT_WRITE_UNKNOWN=1 make test ARGS=tests/unit/test_captures.py, and read the difference.
_UNKNOWN_FILE = Path(__file__).parents[1] / "unknown_numbers.json"
_UNKNOWN: dict[str, list[str]] = json.loads(_UNKNOWN_FILE.read_text())


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_captured_process_is_placed_and_rank_0_agreed(
    capture: Capture,
) -> None:
    placements = [detect(process.environ) for process in capture.processes]
    for placement, process in zip(placements, capture.processes, strict=True):
        assert wrong_numbers(placement, process) == {}
        assert placement.launcher == capture.launcher
        stated = {field for field in NUMBERS if getattr(placement, field) is not None}
        assert stated <= placement.sources.keys(), "every value says where it came from"
    if capture.processes[0].expected["size"] != 1:  # else each is a job of its own
        assert shared_local_ranks(placements, capture.processes) == []
    assert _unknown(placements) == _UNKNOWN.get(capture.name, [""] * len(placements)), (
        "as in unknown_numbers.json"
    )
    ((host, _),) = {(placement.master_addr, placement.master_port) for placement in placements}
    if host not in (None, "127.0.0.1", "localhost", "10.77.0.11"):  # nodea by its address
        assert host.partition(".")[0] == capture.processes[0].expected["rank0_host"]


def _unknown(placements: list[Placement]) -> list[str]:
    return [
        " ".join(field for field in NUMBERS if getattr(placement, field) is None)
        for placement in placements
    ]


if "DISTBOOT_WRITE_UNKNOWN" in os.environ:
    _UNKNOWN = {
        each.name: _unknown([detect(process.environ) for process in each.processes]) for each in ALL
    }
    _UNKNOWN = {name: fields for name, fields in _UNKNOWN.items() if any(fields)}
    _UNKNOWN_FILE.write_text(json.dumps(_UNKNOWN, indent=1) + "\n")


def _damaged(environ: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    cases = []
    for name in environ:
        cases.append(
            (f"{name} dropped", {other: value for other, value in environ.items() if other != name})
        )
        cases += [
            (f"{name}={value!r}", {**environ, name: value})
            for value in ("abc", "", "-1", "1e3", "9" * 30)
        ]
    return cases


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_damaged_environment_gives_same_numbers_or_error(capture: Capture) -> None:
    for process in capture.processes:
        address = detect(process.environ).master_addr
        for what, environ in _damaged(process.environ):
            try:
                placement = detect(environ)
            except DistbootError:
                continue  # any other exception is a failure
            assert wrong_numbers(placement, process) == {}, what
            if placement.launcher == "slurm" and "MASTER_" not in what:
                loopback = "127.0.0.1" if placement.num_nodes == 1 else None
                assert placement.master_addr in {
                    None,
                    address,
                    process.expected["rank0_host"],
                    loopback,
                }, what


def _read(launcher: str, *more: str) -> tuple[str, ...]:
    return (*filter(None, LAUNCHERS[launcher].numbers), *more)


# The variables that each launcher reads: the first two are rank and size, without which it cannot do.
_SLURM = _read("slurm", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
_READ = {
    "openmpi-5.0.11/uneven_3_1": _read("openmpi"),
    "torchrun-2.13.0/uneven_3_1_c10d": _read(
        "torchrun", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
    ),
    "slurm-srun-22.05.8/uneven_3_1_default": _SLURM,
}


def _read_by_launchers(first: int = 0, last: int | None = None) -> list[tuple[str, str]]:
    return [
        (name, variable) for name, variables in _READ.items() for variable in variables[first:last]
    ]


def _without(name: str, *variables: str) -> dict[str, str]:
    return {name: value for name, value in one(name, 3).items() if name not in variables}


@pytest.mark.parametrize("value", ["", "abc"])
@pytest.mark.parametrize(("name", "variable"), _read_by_launchers())
def test_malformed_variable_is_named_with_its_value(name: str, variable: str, value: str) -> None:
    if (variable, value) == ("MASTER_ADDR", "abc"):
        return  # a name as good as any
    refusal = refused({**_without(name), variable: value})
    assert refusal.code == "broken-environment"
    assert f"{variable}={value!r}" in refusal.message


@pytest.mark.parametrize(("name", "variable"), _read_by_launchers(last=2))
def test_missing_rank_or_size_is_named(name: str, variable: str) -> None:
    # What else says the same
    instead = {"OMPI_COMM_WORLD_RANK": "PMIX_RANK", "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS"}
    refusal = refused(_without(name, variable, instead.get(variable, "")))
    assert refusal.code == "broken-environment"
    assert f"{variable} is missing" in refusal.message
    assert f"docker run -e {variable} " in refusal.hint


@pytest.mark.parametrize(("name", "variable"), _read_by_launchers(first=2))
def test_other_missing_variable_is_noted(name: str, variable: str) -> None:
    placement = detect(_without(name, variable))
    assert (placement.rank, placement.world_size) == (3, 4)
    assert [
        note
        for note in placement.notes
        if note.startswith("not set") and note.endswith(f": {variable}")
    ]
