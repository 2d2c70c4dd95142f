"""The jobs of Azure Machine Learning that the pages show: Azure's own package makes them, and what they start knows
who it is. There is no Azure here.

The package is asked in a process of its own, once for all jobs: importing it takes seconds, and warns.
"""

import json
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import PACKAGE
from pages import Block, blocks
from ranks import RunRanks

needs_azure = pytest.mark.skipif(
    not any(distributions(name="azure-ai-ml")),
    reason="azure-ai-ml is not installed (pip install azure-ai-ml)",
)
SHOWN = [block for block in blocks("yaml") if "azuremlschemas" in block.text]
SHOWN += [block for block in blocks("python") if "azure.ai.ml" in block.text]
NPROC = "--nproc-per-node=8"

# Reads a list of [language, text], and writes one of what each makes; an unknown field is an error of load_job's.
ASK = """
import json, logging, sys, warnings
from pathlib import Path
logging.disable(logging.CRITICAL)
from azure.ai.ml import load_compute, load_job
def made(language, text):
    if language == "python":
        names = {}
        exec(text, names)
        return names["job"]
    Path("job.yaml").write_text(text)
    return (load_compute if "amlCompute" in text else load_job)("job.yaml")
def said(language, text):
    try:
        job = made(language, text)
    except Exception as error:
        return {"error": str(error)}
    if not hasattr(job, "command"):
        return {"type": job.type, "size": job.size}
    kind = job.distribution
    return {
        "command": job.command,
        "distribution": {name: value for name, value in vars(kind).items() if value is not None} if kind else {},
        "instances": job.resources.instance_count if job.resources else None,
        "shm_size": job.resources.shm_size if job.resources else None,
    }
json.dump([said(*each) for each in json.load(sys.stdin)], sys.stdout)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Block, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("azure")
    (folder / "src").mkdir()
    asked = json.dumps([[block.language, block.text] for block in SHOWN])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        cwd=folder,
        input=asked,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(SHOWN, json.loads(done.stdout), strict=True))


@pytest.mark.all
@needs_azure
@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_azures_package_makes_it(made: dict[Block, dict[str, Any]], block: Block) -> None:
    job = made[block]
    assert "error" not in job, job["error"]
    if "command" not in job:
        assert (job["type"], job["size"]) == ("amlcompute", "Standard_ND96isr_H100_v5")
        return
    command = job["command"]
    distribution = job["distribution"]
    nodes = job["instances"]
    assert command.startswith("python -m distboot ")
    if distribution.get("type") == "tensorflow":
        assert "--framework=tensorflow" in command
        assert distribution["worker_count"] == nodes
        return
    assert job["shm_size"], "DataLoader workers and NCCL need it"
    # Eight ranks per node: of Azure's, or of the wrapper's where Azure starts one process; `deepspeed` starts its own.
    own = distribution.get("process_count_per_instance", 1)
    assert own == (1 if NPROC in command or " -- deepspeed " in command else 8)
    assert distribution or nodes in (None, 1), "several machines need a distribution"
    if "--framework=horovod" in command:
        assert distribution["type"] == "mpi"


def test_every_kind_of_job_has_yaml_and_python() -> None:
    yamls = [yaml.safe_load(block.text) for block in SHOWN if block.language == "yaml"]
    kinds = {
        job["distribution"]["type"] if "distribution" in job else None
        for job in yamls
        if "command" in job
    }
    assert kinds == {"mpi", "pytorch", "tensorflow", None}
    pythons = "".join(block.text for block in SHOWN if block.language == "python")
    for name in ("MpiDistribution", "PyTorchDistribution", "TensorFlowDistribution"):
        assert f"distribution={name}(" in pythons


def test_copy_of_the_folder_beside_the_script_works(tmp_path: Path, run_ranks: RunRanks) -> None:
    """As the page says of curated environments: the Python below a virtual environment has no distboot."""
    shutil.copytree(PACKAGE, tmp_path / "distboot", ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "import distboot\nwith distboot.init('none') as ctx:\n    "
        "print(distboot.__file__, ctx.rank)\n"
    )
    python = getattr(sys, "_base_executable", sys.executable)
    ranks = run_ranks(script, before=(python, "-m", "distboot"), PYTHONPATH="")
    own = str(tmp_path / "distboot" / "__init__.py")
    assert [(rank.code, rank.out.split()) for rank in ranks] == [
        (0, [own, str(rank)]) for rank in range(2)
    ], ranks


def test_hostfile_has_a_line_for_each_machine(tmp_path: Path, clean_env: dict[str, str]) -> None:
    (script,) = [block.text for block in blocks("bash") if "AZ_BATCH_HOST_LIST" in block.text]
    env = {**clean_env, "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, timeout=30, check=True)
    assert (tmp_path / "hostfile").read_text() == "10.0.0.4 slots=8\n10.0.0.5 slots=8\n"
