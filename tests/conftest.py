"""What the tests share: an environment without launchers, and running distboot as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Families of variables by which a launcher around the tests themselves could leak into what they start.
_LAUNCHER_PREFIXES = (
    "AZ_", "AZUREML_", "DISTBOOT_", "GROUP_", "HOROVOD_", "HYDRA_", "KUBERNETES_", "LOCAL_", "MASTER_", "MPI_", "MV2_",
    "NODE_RANK", "OMPI_", "PALS_", "PET_", "PMIX_", "PMI_", "PRTE_", "RANK", "ROLE_", "SLURM_", "TF_CONFIG",
    "TORCHELASTIC_", "WORLD_SIZE",
)  # fmt: skip


@pytest.fixture
def clean_env() -> dict[str, str]:
    """This process's environment without any launcher, set up for MPI and threads on a small machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(clean_env: dict[str, str], tmp_path: Path) -> Run:
    """Run a command in an empty folder, with extra variables, bounded in time."""

    def run_it(
        *command: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**clean_env, **(env or {})}, cwd=tmp_path, capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    return run_it


@pytest.fixture
def distboot(run: Run) -> Run:
    """Run `python -m distboot …`."""

    def run_it(
        *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "-m", "distboot", *arguments, env=env, timeout=timeout)

    return run_it
