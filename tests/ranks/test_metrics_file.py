"""The file that DISTBOOT_METRICS names, of real jobs: when it is written, and what a bad path costs."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import Run
from supervised import Start, until

FAILS_ONCE = """
import os, distboot
ctx = distboot.init("none")
if ctx.rank == 1 and os.environ["DISTBOOT_RESTART_COUNT"] == "0":
    raise ValueError("bad batch")
"""
FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
time.sleep(60)
"""
WRAPPER = (sys.executable, "-m", "distboot", "--nproc-per-node", "2")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_metrics_tell_of_a_restart(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    with_umask = ["sh", "-c", 'umask 077; exec "$@"', "sh"]
    command = [*with_umask, *WRAPPER, "--max-restarts", "1", "train.py"]
    done = run(*command, train=FAILS_ONCE, env={"DISTBOOT_METRICS": str(path)})
    assert done.returncode == 0, done.stderr
    lines = _lines(path)
    assert 'distboot_job{launcher="distboot"' in "\n".join(lines)
    assert "distboot_restarts 1" in lines
    assert 'distboot_phase{phase="ended"} 1' in lines
    assert 'distboot_ranks{state="ended"} 2' in lines
    (failure,) = [line for line in lines if line.startswith("distboot_first_failure{")]
    assert 'rank="1"' in failure
    assert "ValueError: bad batch" in failure
    assert lines[-1] == "# EOF"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["job.prom", "train.py"]
    assert path.stat().st_mode & 0o777 == 0o644, "a collector is another user"


def test_ranks_of_a_failure_are_told_apart(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    done = run(*WRAPPER, "train.py", train=FAILS, env={"DISTBOOT_METRICS": str(path)})
    assert done.returncode == 1, done.stderr
    lines = _lines(path)
    assert 'distboot_ranks{state="failed"} 1' in lines
    assert 'distboot_ranks{state="stopped"} 1' in lines


def test_external_sigterm_is_not_a_failure(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    job = start("ready()\nuntil('never')\n", 2, DISTBOOT_METRICS=str(path))
    job.all_ready()
    job.processes[0].terminate()
    job.codes()
    assert job.report()["outcome"] == "stopped"
    lines = _lines(path)
    assert 'distboot_phase{phase="stopped"} 1' in lines
    assert 'distboot_phase{phase="failed"} 0' in lines
    assert 'distboot_ranks{state="stopped"} 2' in lines
    assert 'distboot_ranks{state="failed"} 0' in lines


@pytest.mark.parametrize("before", [(), ("-m", "distboot")], ids=["init", "wrapper"])
def test_metrics_tell_who_is_missing(
    run: Run, tmp_path: Path, port: int, before: tuple[str, ...]
) -> None:
    path = tmp_path / "job.prom"
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DISTBOOT_JOIN_TIMEOUT": "1",
        "DISTBOOT_METRICS": str(path),
    }
    script = "import distboot; distboot.init('none')"
    done = run(sys.executable, *before, "train.py", train=script, env=environ)
    assert "missing: rank 1" in done.stderr
    until(lambda: 'distboot_phase{phase="failed"} 1' in path.read_text())
    lines = _lines(path)
    assert 'distboot_ranks{state="missing"} 1' in lines
    assert any("missing-rank" in line for line in lines)


@pytest.mark.parametrize("before", [(), ("-m", "distboot")], ids=["init", "wrapper"])
def test_metrics_of_a_duplicate_rank_0(
    run: Run, start: Start, tmp_path: Path, port: int, before: tuple[str, ...]
) -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    first = start("", 1, **environ)
    until(lambda: "missing: rank 1" in first.output(0))
    path = tmp_path / "job.prom"
    environ["DISTBOOT_METRICS"] = str(path)
    script = "import distboot; distboot.init('none')"
    done = run(sys.executable, *before, "train.py", train=script, env=environ)
    assert "error[duplicate-rank]" in done.stderr
    until(lambda: 'distboot_phase{phase="failed"} 1' in path.read_text())
    assert any("duplicate-rank" in line for line in _lines(path))


def test_link_is_replaced_and_not_followed(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("of another user\n")
    path = tmp_path / "job.prom"
    path.symlink_to(other)
    done = run(*WRAPPER, "train.py", train="", env={"DISTBOOT_METRICS": str(path)})
    assert done.returncode == 0, done.stderr
    assert other.read_text() == "of another user\n"
    assert not path.is_symlink()
    assert _lines(path)[-1] == "# EOF"


BAD_PATHS = {
    ".": "it is not a regular file",
    "/dev/full": "it is not a regular file",
    "nowhere/job.prom": "No such file or directory",
    "train.py": "it has no metrics of a job in it, and would be replaced",
}


def test_link_to_a_device_or_output_stays(run: Run, tmp_path: Path) -> None:
    for name, place in {"null": "/dev/null", "output": "/dev/stdout"}.items():
        (tmp_path / name).symlink_to(place)
        done = run(*WRAPPER, "train.py", train="", env={"DISTBOOT_METRICS": name})
        assert (done.returncode, os.readlink(tmp_path / name)) == (0, place)
        assert "it is not a regular file" in done.stderr


@pytest.mark.parametrize(("name", "why"), BAD_PATHS.items())
def test_bad_path_costs_a_warning(run: Run, name: str, why: str) -> None:
    done = run(*WRAPPER, "train.py", train="print('trained')", env={"DISTBOOT_METRICS": name})
    assert (done.returncode, done.stdout.count("trained")) == (0, 2)
    warning = re.search(f"warning: no more metrics are written to '(.*)': {why}", done.stderr)
    assert warning is not None, done.stderr
    assert warning[1].endswith(name.strip("."))


def test_other_metrics_are_not_replaced(run: Run, tmp_path: Path) -> None:
    others = "# TYPE distboot_job_mine gauge\ndistboot_job_mine 1\n"
    (tmp_path / "job.prom").write_text(others)
    for _ in range(2):
        done = run(*WRAPPER, "train.py", train="", env={"DISTBOOT_METRICS": "job.prom"})
        assert (done.returncode, (tmp_path / "job.prom").read_text()) == (0, others)
        assert BAD_PATHS["train.py"] in done.stderr
        # A job replaces those of the job before it
        done = run(*WRAPPER, "train.py", train="", env={"DISTBOOT_METRICS": "own.prom"})
        assert (done.returncode, "no more metrics" in done.stderr) == (0, False)


def test_full_file_system_costs_a_warning(run: Run, tmp_path: Path) -> None:
    words = shlex.join([*WRAPPER, "train.py"])
    full = f"ulimit -f 0; exec {words}"  # no byte fits into a file
    done = run("bash", "-c", full, train="print('trained')", env={"DISTBOOT_METRICS": "job.prom"})
    assert (done.returncode, done.stdout.count("trained")) == (0, 2)
    assert "job.prom': File too large" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]
