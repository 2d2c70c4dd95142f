"""`make gpu`, with GPUs that are not there (`gpu_stand_in`): its checks run, and fail when something is wrong."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Run
from launched import all_with, needs_torch
from recorded import lay_out

sys.path.append(str(ROOT / "bench"))

import gpu
from gpu_checks import Here, agreement, choices
from gpu_jobs import FailedError, Jobs
from page import gpu_part, with_gpu

_UUIDS = ["GPU-00000000-2a9e-4d5b-8c1f-0a6b3c9d2e10", "GPU-11111111-2a9e-4d5b-8c1f-0a6b3c9d2e10"]
_VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Mar  5 22:23:56 UTC 2024\n"
)
_PAGE = "# Results\n\nOf `make bench`.\n"

Gpu = Callable[..., tuple[int, str, str]]


@pytest.fixture
def script(run: Run, tmp_path: Path) -> Gpu:
    """Runs `bench/gpu.py` on a machine with so many GPUs; its exit code, what it says, and the page."""

    def run_it(*arguments: str, count: int, fault: str = "") -> tuple[int, str, str]:
        root = tmp_path / "root"
        page = tmp_path / "RESULTS.md"
        files = {"proc/driver/nvidia/version": _VERSION, "dev/nvidiactl": "", "dev/nvidia-uvm": ""}
        files["site/torch/version.py"] = (
            "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
        )
        for number, uuid in enumerate(_UUIDS[:count]):
            bus = f"0000:0{number}:00.0"
            minor = f"Device Minor: \t {number}\n"
            files[f"dev/nvidia{number}"] = ""
            files[f"sys/bus/pci/devices/{bus}/vendor"] = "0x10de\n"
            files[f"sys/bus/pci/devices/{bus}/class"] = "0x030200\n"
            files[f"proc/driver/nvidia/gpus/{bus}/information"] = f"GPU UUID: \t {uuid}\n{minor}"
        listed = "".join(
            f"GPU {number}: H100 (UUID: {uuid})\n" for number, uuid in enumerate(_UUIDS[:count])
        )
        files["bin/nvidia-smi"] = f"#!/bin/sh\ncat <<END\n{listed}END\n"
        lay_out(files, root)
        (root / "bin/nvidia-smi").chmod(0o755)
        page.write_text(_PAGE)
        environ = {"STAND_IN_ROOT": str(root), "STAND_IN_FAULT": fault}
        environ["PATH"] = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environ["PYTHONPATH"] = f"{ROOT / 'tests/gpu_stand_in'}{os.pathsep}{ROOT}"
        command = [
            sys.executable,
            str(ROOT / "bench/gpu.py"),
            "--rounds",
            "1",
            "--page",
            str(page),
            *arguments,
        ]
        done = run(*command, env=environ, timeout=360)
        return done.returncode, done.stdout + done.stderr, page.read_text()

    return run_it


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][
        2:
    ]


@all_with("torch")
def test_every_check_runs_and_has_a_row(script: Gpu) -> None:
    code, said, page = script(count=2)
    assert code == 0, said
    assert [what for what, *_ in rows(page)] == [what for what, _ in gpu.CHECKS.values()]
    assert [verdict for *_, verdict in rows(page)] == ["ok"] * len(gpu.CHECKS)
    assert rows(said) == rows(page)
    assert page.startswith(_PAGE), "the rest of the page stays"


@all_with("torch")
def test_failed_or_impossible_check_has_a_row(script: Gpu) -> None:
    code, said, page = script("--only", "devices", "--only", "visible", count=1, fault="named")
    assert code == 1
    (_, one, not_here), (_, why, failed) = rows(said)
    assert (one, not_here) == ("one GPU only", "not here")
    assert failed == "**failed**"
    assert why.startswith("an index: UUIDs in torch: ['GPU-00000000")
    assert page == _PAGE, "a part of the checks is shown only"


@pytest.mark.all
@needs_torch
def test_a_machine_without_a_gpu_is_told(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text(_PAGE)
    done = run(
        sys.executable,
        str(ROOT / "bench/gpu.py"),
        "--page",
        str(page),
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert "sees no GPU here" in done.stderr
    assert page.read_text() == _PAGE


def test_rank_training_alone_is_outside_the_tolerance() -> None:
    # Losses of two ranks on the stand-in, with DistributedDataParallel and without it.
    assert (
        agreement([0.607373, 0.607374], 0.607373)
        == "0.607373, 0.607373 on the CPU: 2e-06 off, 1e-04 allowed"
    )
    for wrong in (0.792366, float("nan")):
        with pytest.raises(FailedError, match="loss on rank 1"):
            agreement([0.607373, wrong], 0.607373)


def test_a_mig_device_is_shown_by_its_uuid(tmp_path: Path) -> None:
    mig = "MIG-a65afc88-50b5-5ccf-b0a8-f93b3247ae9e"
    listed = f"GPU 0: H100 (UUID: {_UUIDS[0]})\n  MIG 1g.10gb     Device  0: (UUID: {mig})\n"
    assert gpu.uuids(listed) == ([_UUIDS[0]], [mig])
    here = Here(Jobs(tmp_path, 0), 1, {"gpus": ["H100"]}, *gpu.uuids(listed))
    assert list(choices(here)) == [("nothing", "", []), ("a MIG UUID", mig, [mig])]


def test_a_job_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, 2)
    with pytest.raises(FailedError, match=r"rank 1 did not end within \d s: so far"):
        jobs.run(
            [
                "-c",
                (
                    "import os, sys, time; sys.stderr.write('so far\\n'); "
                    "time.sleep(3600 * int(os.environ['I']))"
                ),
            ],
            [{"I": "0"}, {"I": "1"}],
        )
    with pytest.raises(FailedError, match="within 0 s"):
        jobs.run(["-c", "import time; time.sleep(3600)"])


def test_results_of_a_gpu_survive_other_measurements() -> None:
    first = with_gpu(_PAGE, "## On a GPU\n\nSeen.")
    assert gpu_part(first) == "## On a GPU\n\nSeen."
    assert with_gpu(_PAGE, gpu_part(first)) == first
    assert with_gpu(first, "Again.").count("on a GPU") == 2, (
        "the two marks, and nothing of the first"
    )
    assert with_gpu(_PAGE, gpu_part(_PAGE)) == _PAGE
