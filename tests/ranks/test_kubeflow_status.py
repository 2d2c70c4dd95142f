"""The status of a TrainJob of Kubeflow Trainer: what real jobs post, and what a bad server costs."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Run
from status_servers import TOKEN, StatusServer, missing_for_server, status_server

pytestmark = pytest.mark.skipif(missing_for_server() is not None, reason=str(missing_for_server()))
WRAPPER = (sys.executable, "-m", "distboot", "--nproc-per-node", "2")
FAILS = """
import distboot
ctx = distboot.init("none")
if ctx.rank == 1:
    raise ValueError("bad batch")
ctx.barrier()
"""
WAITS = "import distboot, time\ndistboot.init('none')\ntime.sleep({seconds})\n"
# For every process of a job. The controller asks for a status every 5 s: test_missing_ranks_are_in_the_status waits.
HURRIED = """
from distboot.agent import kubeflow_status
kubeflow_status.KubeflowStatus.between = 0.5
kubeflow_status._TIMEOUT = 1.0
"""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StatusServer]:
    with status_server(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def hurried(run: Run, server: StatusServer, tmp_path: Path) -> Run:
    """Runs a job whose wrapper posts ten times as often, and waits less for an answer."""
    (tmp_path / "hurried").mkdir()
    (tmp_path / "hurried" / "sitecustomize.py").write_text(HURRIED)
    path = f"{tmp_path / 'hurried'}{os.pathsep}{ROOT}"

    def run_it(train: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**server.environ(**variables), "PYTHONPATH": path}
        return run(*WRAPPER, "train.py", train=train, env=env)

    return run_it


def test_first_failure_is_in_the_status(run: Run, server: StatusServer) -> None:
    done = run(*WRAPPER, "train.py", train=FAILS, env=server.environ())
    assert done.returncode == 1
    last = server.posted[-1]
    assert last["distboot_phase"] == "failed"
    assert last["distboot_joined"] == "2 of 2"
    assert last["distboot_first_failure"].startswith("rank 1 failed first: ")
    assert "warning" not in done.stderr
    assert TOKEN not in done.stderr


@pytest.mark.parametrize("before", [(), ("-m", "distboot")], ids=["init", "wrapper"])
def test_missing_ranks_are_in_the_status(
    run: Run, server: StatusServer, port: int, before: tuple[str, ...]
) -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DISTBOOT_JOIN_TIMEOUT": "7",
        **server.environ(),
    }
    script = "import distboot; distboot.init('none')"
    done = run(sys.executable, *before, "train.py", train=script, env=environ)
    assert done.returncode == 75, done.stderr
    first = server.posted[0]
    assert first["distboot_phase"] == "joining"
    assert first["distboot_joined"] == "1 of 4"
    assert first["distboot_missing"] == "1-3"


def test_status_is_left_to_a_script_that_trains(hurried: Run, server: StatusServer) -> None:
    done = hurried(WAITS.format(seconds=2))
    assert done.returncode == 0, done.stderr
    phases = [one["distboot_phase"] for one in server.posted]
    assert phases[-1] == "running"
    assert phases.count("running") == 1


def test_no_status_where_it_is_turned_off(run: Run, server: StatusServer) -> None:
    environ = {**server.environ(), "DISTBOOT_KUBEFLOW_STATUS": "0"}
    done = run(*WRAPPER, "train.py", train=FAILS, env=environ)
    assert done.returncode == 1
    assert server.posted == []


@pytest.mark.parametrize(
    ("answer", "headers", "why"),
    [
        (403, {}, "the server answers 403"),
        (307, {"Location": "https://127.0.0.1:1/elsewhere"}, "the server answers 307"),
        (0, {}, "timed out"),
    ],
)
def test_bad_server_costs_one_warning(
    hurried: Run, server: StatusServer, answer: int, headers: dict[str, str], why: str
) -> None:
    server.answer = answer
    server.headers = headers
    done = hurried(WAITS.format(seconds=3))
    assert done.returncode == 0
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert "the status of the TrainJob at 'https://127.0.0.1:" in warning
    assert why in warning
    assert TOKEN not in done.stderr


def test_status_is_told_again_after_an_error(hurried: Run, server: StatusServer) -> None:
    server.first_answers = [503]
    done = hurried(WAITS.format(seconds=2) + "raise ValueError('bad batch')\n")
    assert done.returncode == 1
    assert server.posted[-1]["distboot_phase"] == "failed"
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "the server answers 503" in warnings[0]


@pytest.mark.parametrize("token", [f"{TOKEN}\nsecond", f"{TOKEN} second", f"{TOKEN}\u00e9"])
def test_bad_token_is_not_shown(hurried: Run, tmp_path: Path, token: str) -> None:
    path = tmp_path / "token"
    path.write_text(token)
    done = hurried(WAITS.format(seconds=2), TOKEN=str(path))
    assert done.returncode == 0
    assert "was not updated" in done.stderr
    assert TOKEN not in done.stderr


def test_job_does_not_wait_for_the_server(run: Run, server: StatusServer) -> None:
    server.answer = 0
    begun = time.monotonic()
    done = run(*WRAPPER, "train.py", train=FAILS, env=server.environ())
    assert done.returncode == 1
    assert time.monotonic() - begun < 60  # and not until the server has answered


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("URL", "http://127.0.0.1:1/status", "its URL is not one of https"),
        ("URL", "https://127.0.0.1:port/status", "Port could not be cast to integer value"),
        ("TOKEN", "/nowhere/token", "No such file or directory"),
        ("CA_CERT", "/nowhere/ca.crt", "No such file or directory"),
    ],
)
def test_bad_variables_cost_one_warning(
    hurried: Run, server: StatusServer, name: str, value: str, why: str
) -> None:
    done = hurried(WAITS.format(seconds=2), **{name: value})
    assert done.returncode == 0
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert why in warning
    assert server.posted == []


def test_wrong_certificate_is_refused(hurried: Run, server: StatusServer, tmp_path: Path) -> None:
    with status_server(tmp_path) as other:
        certificate = other.environ()["KUBEFLOW_TRAINER_SERVER_CA_CERT"]
        done = hurried(WAITS.format(seconds=2), CA_CERT=certificate)
    assert done.returncode == 0
    assert "certificate verify failed" in done.stderr
    assert server.posted == []
