"""What a person types or sets with no effect, or wrong: it is named, once, and the process ends or goes on."""

import sys
from pathlib import Path

import pytest
from captured import one
from conftest import Run

MPI_RANK_0 = {**one("openmpi-4.1.4/1node_4procs", 0), "MASTER_ADDR": "127.0.0.1"}
_INIT = "import distboot, datetime; minute = datetime.timedelta(minutes=1); "


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("no.such.module", "'no.such.module': 'no' is missing"),
        ("json.nope", "'json.nope'"),
        ("this.part", "'this.part'"),  # `this` is no package
    ],
)
def test_missing_module_is_named(distboot: Run, module: str, missing: str) -> None:
    result = distboot("-m", module)
    first, hint = result.stderr.splitlines()
    assert first == f"distboot: error[command-not-found]: there is no module {missing}"
    assert hint.startswith("distboot: hint: check the spelling and PYTHONPATH")
    assert result.returncode == 127


def test_modules_that_exist_run(distboot: Run, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "train.py").write_text("print('trained')")
    (package / "__init__.py").write_text("__path__.append('elsewhere')")
    assert distboot("-m", "pack.inner.train").stdout == "trained\n"
    assert distboot("-m", "json.tool", "--help").returncode == 0


@pytest.mark.parametrize("command", [["nofile.py"], ["-m", "no.module"], ["--", "no-command"]])
def test_try_refuses_what_is_missing_once(distboot: Run, command: list[str]) -> None:
    result = distboot("try", *command)
    assert result.stderr.count("error[") == 1
    assert (result.returncode, result.stdout) == (127, "")


def test_options_after_the_script_are_named(distboot: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    late = ["--nproc_per_node=2", "--epochs", "3", "--max-restarts", "1", "--report", "x"]
    said = distboot("train.py", *late, "--", "--log-format=json").stderr
    assert said == (
        "distboot: warning: --nproc_per_node and --max-restarts after the script: passed to the "
        "script, not used by distboot; options of distboot come before the script\n"
    )
    script.write_text("nproc_per_node = max_restarts = 1  # of its own parser")
    assert distboot("train.py", *late).stderr == ""
    assert distboot("--", "true", *late).stderr == ""


def test_world_size_that_the_launcher_overrules_is_named(distboot: Run) -> None:
    off = {"DISTBOOT_RENDEZVOUS": "0", "MASTER_PORT": "29500"}
    given = {**MPI_RANK_0, **off, "WORLD_SIZE": "8"}
    said = distboot("run", "--", "true", env=given).stderr
    assert "WORLD_SIZE='8' is overruled by OMPI_COMM_WORLD_SIZE=4 of openmpi\n" in said
    equal = {**given, "WORLD_SIZE": "4"}
    assert "overruled" not in distboot("run", "--", "true", env=equal).stderr


@pytest.mark.parametrize(
    "command", [["run", "--", "true"], ["run", "--", sys.executable, "-c", _INIT]]
)
def test_wrapper_refuses_all_invalid_settings_at_once(distboot: Run, command: list[str]) -> None:
    result = distboot(*command, env={"DISTBOOT_LATE_AFTER": "abc", "DISTBOOT_HANG": "x"})
    assert result.stderr == (
        "distboot: error[broken-environment]: 2 problems:\n"
        "distboot:   DISTBOOT_LATE_AFTER='abc' is not a valid number of seconds: use 0 to 86400 seconds\n"
        "distboot:   DISTBOOT_HANG='x' is neither warn nor stop: unset it, or set it to warn or stop\n"
        "distboot: hint: unset them, or correct them\n"
    )
    assert result.returncode == 78


def test_option_overrides_an_invalid_variable(distboot: Run) -> None:
    env = {"DISTBOOT_GRACE": "abc", "DISTBOOT_JOIN_TIMEOUT": "abc"}
    options = ["--grace", "2", "--join-timeout", "3"]
    assert distboot("run", *options, "--", "true", env=env).returncode == 0


def _python(run: Run, script: str) -> str:
    return run(sys.executable, "-c", _INIT + script).stderr


def test_init_takes_a_timedelta(run: Run) -> None:
    assert _python(run, "distboot.init('none', timeout=minute, join_timeout=minute)") == ""
    refused = _python(run, "distboot.init('none', timeout=minute * 0)")
    assert "error[usage]: timeout=datetime.timedelta(0) is not a valid number of seconds" in refused
    assert refused.endswith("\ndistboot: hint: use a number of seconds above 0, at most 86400\n")


def test_second_init_names_a_different_launcher(run: Run) -> None:
    said = _python(
        run, "[distboot.init('none', launcher=name) for name in (None, 'slurm', 'single')]"
    )
    assert said == (
        "distboot: warning: init() was called again: launcher='slurm' after launcher='single' has "
        "no effect, the first context stays\n"
    )


def test_barrier_after_destroy_process_group_is_refused(run: Run) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    script = (
        "ctx = distboot.init(); import torch.distributed as dist; dist.destroy_process_group(); "
    )
    said = _python(run, script + "ctx.barrier()")
    assert "barrier() after the end of the process group (destroy_process_group())" in said
