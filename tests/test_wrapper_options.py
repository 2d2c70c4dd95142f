"""What the wrapper does besides starting a command: `--exec`, `--pass-local-rank`, and a warning of ranks apart."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Run
from launched import MPI_ENV, MPIRUN, json_lines, needs_mpirun, needs_torch

SAY = """
import json, os, sys
state = {"arguments": sys.argv[1:], "rank": os.environ.get("RANK"), "pid": os.getpid()}
sys.stdout.write(json.dumps(state) + "\\n")
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "say.py").write_text(SAY)
    return "say.py"


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--pass-local-rank"], ["--local_rank=0", "--epochs", "3"]),
        (["--pass-local-rank=--gpu"], ["--gpu=0", "--epochs", "3"]),
        (["--local-rank=0"], ["--epochs", "3"]),  # which a launcher has put there
        (["--local_rank=0", "--pass-local-rank"], ["--local_rank=0", "--epochs", "3"]),
    ],
)
def test_local_rank_as_an_argument(distboot: Run, script: str, options: list[str], arguments: list[str]) -> None:
    (line,) = json_lines(distboot(*options, script, "--epochs", "3", env=ALONE))
    assert line["arguments"] == arguments


def test_argument_of_a_command_is_its_last(distboot: Run, script: str) -> None:
    command = [sys.executable, script, "--epochs", "3"]
    (line,) = json_lines(distboot("run", "--pass-local-rank", "--", *command, env=ALONE))
    assert line["arguments"] == ["--epochs", "3", "--local_rank=0"]


def test_local_rank_that_one_process_cannot_tell(distboot: Run, script: str) -> None:
    job = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DISTBOOT_ROLL_CALL": "0",
    }
    done = distboot("run", "--pass-local-rank", script, env=job)
    assert (done.returncode, done.stdout) == (78, "")
    assert "error[roll-call-needed]: rank 1 on " in done.stderr


@needs_torch
def test_launcher_that_passes_it_to_a_script_that_does_not_know_it(run: Run, script: str) -> None:
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2", "-m", "distboot"]
    assert [line["arguments"] for line in json_lines(run(*launch, script, "--epochs", "3"))] == [["--epochs", "3"]] * 2


@needs_mpirun
def test_exec_becomes_the_command_in_every_rank(run: Run, script: str) -> None:
    launch = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2", "sh", "-c"]
    wrapper = f'echo "{{\\"shell\\": $$}}"; exec {sys.executable} -m distboot run --exec {script}'
    done = run(*launch, wrapper, env=MPI_ENV)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = [line for line in lines if "pid" in line]
    assert sorted(line["rank"] for line in said) == ["0", "1"], done.stderr
    assert {line["pid"] for line in said} == {line["shell"] for line in lines if "shell" in line}


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (["no-such-command"], 127, "command-not-found"),
        (["./say.py"], 126, "command-not-executable"),
    ],
)
def test_exec_of_what_cannot_be_run(distboot: Run, script: str, command: list[str], code: int, error: str) -> None:
    done = distboot("run", "--exec", "--", *command)
    assert (done.returncode, f"error[{error}]" in done.stderr) == (code, True), (script, done.stderr)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--exec", "--grace", "3"], "--grace: nobody stays for it"),
        (["--exec", "--log-prefix"], "--log-prefix: nobody stays for it"),
        (["--exec", "--framework", "horovod"], "--framework horovod: the wrapper holds a port for the script"),
        (["--max-restarts", "3"], "--max-restarts is torchrun's, which --nproc-per-node starts"),
        (["--rdzv-backend=c10d"], "--rdzv-backend is torchrun's"),
        (["--pass-local-rank=3"], "'3' is no name of an option"),
        (["--framework", "tensorflaw"], "'tensorflaw' is no framework: did you mean 'tensorflow'?"),
        (["--join-timeout", "-5"], "error[usage]: --join-timeout='-5' is not a number of seconds\nhint: give a number"),
        (
            ["--join-timeout=soon"],
            "error[usage]: --join-timeout='soon' is not a number of seconds\nhint: give a number",
        ),
        (["--grace", "0"], "error[usage]: --grace='0' is not a number of seconds\nhint: give a number"),
        (["--framework", "pandas"], "'pandas' is no framework: they are torch, deepspeed, horovod"),
    ],
)
def test_misuse(distboot: Run, options: Sequence[str], said: str) -> None:
    done = distboot("run", *options, "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "framework", "named"),
    [
        ("import horovod.torch as hvd", "torch", "horovod"),
        ("strategy = tf.distribute.MultiWorkerMirroredStrategy()", "torch", "tensorflow"),
        ("jax.distributed.initialize()", "torch", "jax"),
        ("import horovod.torch as hvd", "none", None),
        ("import distboot\nimport horovod.torch as hvd", "torch", None),
        ("pass  # import horovod", "torch", None),
    ],
)
def test_script_whose_ranks_would_train_apart_is_warned_of(
    clean_env: dict[str, str], tmp_path: Path, text: str, framework: str, named: str | None
) -> None:
    (tmp_path / "train.py").write_text(f"if False:\n    {text.replace(chr(10), chr(10) + '    ')}\n")
    command = [sys.executable, "-m", "distboot", "run", "--framework", framework, "train.py"]
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    job = {**clean_env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda rank: _ended(command, {**job, "RANK": str(rank)}, tmp_path), range(2)))
    expected = f"warning: train.py starts {named}, which reads variables of its own, and without them each rank trains"
    assert [expected in each for each in done] == [bool(named), False], done
    assert [each.count("warning") for each in done] == [1 if named else 0, 0]


def _ended(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> str:
    """What a command that ends well prints on stderr."""
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stderr
