"""`show`, `env` and every misuse of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from captured import one
from conftest import Run

from distboot.errors import CODES
from distboot.placement import FIELDS

MPI_RANK_3 = one("openmpi-4.1.4/2nodes_2procs", 3)
AZURE = {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}


def test_show_json_has_the_whole_placement(distboot: Run) -> None:
    result = distboot("show", "--json", env={**MPI_RANK_3, **AZURE})
    shown = json.loads(result.stdout)
    assert list(shown) == [*FIELDS, "sources", "notes", "node_level"]
    assert (shown["launcher"], shown["platform"], shown["rank"], shown["node_rank"]) == ("openmpi", "azureml", 3, None)
    assert shown["sources"]["master_addr"] == "AZ_BATCH_MASTER_NODE"
    assert (result.returncode, result.stderr) == (0, "")


def test_show_tells_a_person_what_is_known_and_what_is_not(distboot: Run) -> None:
    headline, _, *lines = distboot("show", env=MPI_RANK_3).stdout.splitlines()
    assert headline.startswith("Rank 3 of 4, local rank 1 of 2: started by Open MPI")
    values = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert values["rank"] == ["3", "OMPI_COMM_WORLD_RANK"]
    assert values["node_rank"][0] == "-"
    assert "MASTER_ADDR" in values["master_addr"][1]


def test_show_explains_an_allocation_that_is_no_step(distboot: Run) -> None:
    result = distboot("show", env=one("slurm-salloc-22.05.8/salloc_shell_python", 0))
    assert "note: SLURM_* ignored" in result.stdout


def test_shell_exports_can_be_evaluated(distboot: Run) -> None:
    exports = distboot("env", env={**MPI_RANK_3, **AZURE, "NODE_RANK": "9"}).stdout
    script = f"{exports}\necho $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR ${{NODE_RANK-unset}}"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"NODE_RANK": "9"}, check=True)
    assert result.stdout == "3 4 1 10.0.0.4 unset\n"


def test_dotenv_and_json_exports(distboot: Run) -> None:
    env = {**MPI_RANK_3, **AZURE}
    dotenv = dict(line.split("=", 1) for line in distboot("env", "--format", "dotenv", env=env).stdout.splitlines())
    as_json = json.loads(distboot("env", "--json", env=env).stdout)
    assert dotenv["RANK"] == as_json["RANK"] == "3"
    assert "NODE_RANK" not in dotenv
    assert as_json["NODE_RANK"] is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "--jsno"], "usage"),
        (["show", "extra"], "usage"),
        (["doctor", "extra"], "usage"),
        (["env", "--format", "csv"], "usage"),
        (["--bogus", "train.py"], "usage"),
        (["run", "--laun", "openmpi", "train.py"], "usage"),
        (["run"], "usage"),
        (["run", "--"], "usage"),
        (["run", "-m"], "usage"),
        (["run", "--join-timeout", "soon", "train.py"], "usage"),
        (["run", "--join-timeout", "-1", "--", "true"], "usage"),
        (["run", "--launcher"], "usage"),
        (["no_such_script.py"], "command-not-found"),
        (["run", "--", "no-such-command-at-all"], "command-not-found"),
        (["run", "--", "/"], "command-not-executable"),
        (["run", "--launcher", "opnempi", "--", "true"], "unknown-launcher"),
    ],
)
def test_misuse_is_one_error_with_a_hint_and_its_exit_code(distboot: Run, arguments: list[str], code: str) -> None:
    result = distboot(*arguments)
    assert result.stderr.startswith(f"distboot: error[{code}]: ")
    assert "\nhint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert result.returncode == CODES[code][0]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--nproc_per_node", "2", "train.py"], "did you mean '--nproc-per-node'? "),  # torchrun takes both
        (["shwo"], "did you mean 'show'? "),
        (["run", "--", "train.py"], "name the interpreter of a script: run -- python train.py; "),
    ],
)
def test_hint_says_what_may_be_meant(distboot: Run, tmp_path: Path, arguments: list[str], hint: str) -> None:
    (tmp_path / "train.py").touch()
    assert f"\nhint: {hint}" in distboot(*arguments).stderr


def test_misspelled_setting_is_said_once_and_its_value_is_not(distboot: Run) -> None:
    said = "distboot: warning: DISTBOOT_SECRTE is no setting, and does nothing: did you mean DISTBOOT_SECRET?\n"
    env = {"DISTBOOT_SECRTE": "much to hide", "DISTBOOT_OURS": "1"}
    script = "import distboot; distboot.init('none')"
    assert distboot("run", "--", sys.executable, "-c", script, env=env).stderr == said
    rank_1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert distboot("run", "--", "true", env={**env, **rank_1, "DISTBOOT_ROLL_CALL": "0"}).stderr == ""


@pytest.mark.parametrize("command", [["show"], ["env"], ["run", "--", "touch", "started"]])
@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "abc", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"},
    ],
)
def test_broken_environment_is_refused_and_nothing_is_started(
    distboot: Run, run: Run, command: list[str], env: dict[str, str]
) -> None:
    result = distboot(*command, env=env)
    assert result.returncode == 78
    assert result.stderr.startswith("distboot: error[broken-environment]: ")
    assert run("ls").stdout == ""


def test_bare_multi_node_mpirun_is_told_what_to_pass(distboot: Run) -> None:
    result = distboot("run", "--", "true", env=MPI_RANK_3)
    assert result.returncode == 78
    assert "error[no-master-addr]" in result.stderr
    assert "mpirun -x MASTER_ADDR=" in result.stderr


def test_unresolvable_address_is_waited_for_and_named(distboot: Run) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}
    result = distboot("run", "--join-timeout", "3", "--", "true", env=env)
    assert result.returncode == 75
    who = f"rank 1 on {os.uname().nodename}"
    assert f"distboot: {who}: rank 0 does not answer at nowhere.invalid:29500 yet (Name or service" in result.stderr
    where = "nowhere.invalid:29500 (from MASTER_ADDR)"
    assert f"error[unresolvable-address]: {who}: rank 0 did not answer at {where} within 3 s" in result.stderr


def test_help_of_every_command(distboot: Run) -> None:
    for arguments in (["--help"], ["run", "--help"], ["show", "--help"], ["env", "--help"], ["doctor", "--help"]):
        result = distboot(*arguments)
        assert (result.returncode, result.stderr) == (0, "")
        assert "python -m distboot" in result.stdout
    assert distboot().returncode == 2
    assert distboot("--version").stdout.startswith("distboot ")


def test_reader_that_goes_away_is_no_traceback(clean_env: dict[str, str]) -> None:
    script = f"{sys.executable} -m distboot show | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], env=clean_env, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.returncode in (0, 128 + signal.SIGPIPE)  # 0 when all was written before the reader went


def test_output_that_cannot_be_written_is_an_error(clean_env: dict[str, str]) -> None:
    script = f"{sys.executable} -m distboot show >/dev/full"
    result = subprocess.run(["bash", "-c", script], env=clean_env, capture_output=True, text=True, check=False)
    assert result.stderr == "distboot: error[output-failed]: cannot write to standard output: No space left on device\n"
    assert result.returncode == CODES["output-failed"][0]


def test_job_id_cannot_forge_lines(distboot: Run) -> None:
    result = distboot("show", env={"AZUREML_RUN_ID": "a\x1b[31m\nrank 99"})
    assert "\x1b" not in result.stdout
    assert "\nrank 99" not in result.stdout
