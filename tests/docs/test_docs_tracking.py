"""What `mlflow-wandb.md` tells a user to run: one run for a job, with its first failure, in the real packages."""

import json
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from conftest import Run
from pages import blocks

PAGE = "docs/how-to/mlflow-wandb.md"
FAILURE = "rank 1 failed first: uncaught exception: ValueError: the loss is NaN"
pytestmark = pytest.mark.all


def _run(run: Run, folder: Path, package: str, **more: str) -> CompletedProcess[str]:
    """Run the job script of a package with the files of the page."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    (script,) = [
        block.text for block in blocks("bash") if block.page == PAGE and package in block.text
    ]
    for block in blocks("python"):
        if block.page == PAGE and block.title:
            (folder / block.title).write_text(block.text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run("bash", "-c", script, env={"PATH": path, **more}, timeout=200)


def test_mlflow_has_one_run_with_the_failure(run: Run, tmp_path: Path) -> None:
    store = {
        "MLFLOW_TRACKING_URI": (tmp_path / "runs").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 prefers a database
    }
    done = _run(run, tmp_path, "mlflow", **store)
    assert done.returncode == 1, done.stderr
    (meta,) = (tmp_path / "runs" / "0").glob("*/meta.yaml")
    folder = meta.parent
    assert "status: 4\n" in meta.read_text()  # FAILED of mlflow.proto
    assert (folder / "tags" / "distboot.first_failure").read_text().startswith(FAILURE)
    assert (folder / "metrics" / "loss").read_text().split()[1] == "0.25"
    assert (folder / "metrics" / "distboot.seconds_training").exists()
    report = json.loads((folder / "artifacts" / "job.json").read_text())
    assert report["first_failure"]["ranks"] == [1]


def test_wandb_has_one_run_with_the_failure(run: Run, tmp_path: Path) -> None:
    done = _run(run, tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.returncode == 1, done.stderr
    trained, after = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert trained.name == after.name  # one id
    assert b"loss" in trained.read_bytes()
    assert FAILURE.encode() in after.read_bytes()
