"""The first failure where platforms look for it.

A rank is process 1 of a container here, whose kubelet is a file that is mounted: with it, all of its processes end.
"""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import Run
from launched import in_both_ways
from process1 import NAMESPACE, needs_namespace
from supervised import FAILING, Start

from distboot.agent import platform_log

# In the place of /dev and /opt, which are the machine's: the same with a file, or a folder, more.
_MOUNTS = """
set -e
mkdir dev-$RANK opt-$RANK
mount -n -t tmpfs none dev-$RANK
for name in null zero full random urandom; do : > dev-$RANK/$name; mount -n --bind /dev/$name dev-$RANK/$name; done
mkdir dev-$RANK/shm
mount -n --rbind /dev/shm dev-$RANK/shm
cp -P /dev/fd dev-$RANK
: > dev-$RANK/termination-log
mount -n --bind log-$RANK dev-$RANK/termination-log
mount -n --rbind dev-$RANK /dev
for path in /opt/*/; do
  [ ! -d $path ] || { mkdir opt-$RANK${path#/opt}; mount -n --rbind $path opt-$RANK${path#/opt}; }
done
mkdir -p opt-$RANK/ml/output
mount -n --bind output-of-$RANK opt-$RANK/ml/output
mount -n --rbind opt-$RANK /opt
exec "$@"
"""
_CONTAINER = (*NAMESPACE, "sh", "-c", _MOUNTS, "sh")
_SECRET = "s3cr\"et'\\word"
_BOOM = "raise ValueError('boom ' + os.environ['DISTBOOT_SECRET'])"


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """The termination logs of three containers; the folders for SageMaker's file are beside them."""
    found = [tmp_path / f"log-{rank}" for rank in range(3)]
    for rank, path in enumerate(found):
        path.touch()
        (tmp_path / f"output-of-{rank}").mkdir()
    return found


@needs_namespace
@in_both_ways
def test_every_container_has_the_first_failure(start: Start, logs: list[Path], init: bool) -> None:
    own = "if rank == 2:\n    Path('/dev/termination-log').write_text('mine')\n"
    (logs[2].parent / "output-of-2" / "failure").write_text("mine")
    platform = {"TRAINING_JOB_NAME": "train"} if init else {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    env = {"CULPRIT": "1", "DISTBOOT_SECRET": _SECRET, **platform}
    running = start(own + FAILING % _BOOM, init=init, before=_CONTAINER, **env)
    assert running.fail()[1] == 1
    for rank, log in enumerate(logs[:2]):
        text = log.read_text()
        said = (
            "distboot: rank 1 failed first: uncaught exception: ValueError: boom "
            f"***, on {os.uname().nodename}, in "
        )
        assert text.startswith(said), (rank, text, running.output(rank))
        assert text.endswith("\n  | ValueError: boom ***")
        failure = log.parent / f"output-of-{rank}" / "failure"
        assert (failure.read_text() if init else failure.exists()) == (text if init else False)
    assert logs[2].read_text() == (logs[2].parent / "output-of-2" / "failure").read_text() == "mine"


@needs_namespace
@in_both_ways
def test_process_that_is_alone_leaves_its_failure_there(
    start: Start, logs: list[Path], init: bool
) -> None:
    job = start(
        _BOOM,
        1,
        init=init,
        before=_CONTAINER,
        DISTBOOT_SECRET=_SECRET,
        DISTBOOT_REPORT="",
    )
    assert job.codes() == [1]
    text = logs[0].read_text()
    if init:
        assert text.startswith("distboot: uncaught exception: ValueError: boom ***\n  | Traceback ")
    else:
        assert text == "distboot: exit code 1: the output of the script says why"


@needs_namespace
def test_agent_ending_with_its_rank_does_not_wait(start_init: Start, logs: list[Path]) -> None:
    # Where rank 0 has no failure detection, it never says one.
    before = (
        *_CONTAINER,
        "sh",
        "-c",
        '[ $RANK = 1 ] || export DISTBOOT_FAILURE_DETECTION=0; exec "$@"',
        "sh",
    )
    running = start_init(FAILING % "sys.exit(3)", 2, before=before, CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    assert running.processes[1].wait(60) == 3
    assert (
        logs[1]
        .read_text()
        .startswith(f"distboot: rank 1 failed first: exit code 3, on {os.uname().nodename}")
    )
    assert logs[0].read_text() == ""


@needs_namespace
@in_both_ways
def test_start_that_failed_is_there_too(start: Start, logs: list[Path], init: bool) -> None:
    alone = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "DISTBOOT_JOIN_TIMEOUT": "1",
        "JOIN_TIMEOUT": "1",
    }
    start("", 1, init=init, before=_CONTAINER, **alone).codes()
    who = f"rank 0 on {os.uname().nodename}"
    first, hint = logs[0].read_text().splitlines()
    assert first == (
        f"distboot: error[missing-rank]: {who}: 1 of 2 ranks joined within 1 s; "
        "missing: rank 1 (node 0)"
    )
    assert hint.startswith(f"distboot: hint: {who}: look at ")


@needs_namespace
@pytest.mark.parametrize("code", [0, 3])
def test_failed_start_is_dropped_if_script_succeeds(run: Run, logs: list[Path], code: int) -> None:
    script = f"""
import distboot, os, sys
try:
    distboot.init("torhc-" + os.environ["DISTBOOT_SECRET"])
except distboot.DistbootError:
    sys.exit({code})
"""
    env = {"RANK": "0", "WORLD_SIZE": "1", "DISTBOOT_SECRET": _SECRET}
    assert run(*_CONTAINER, sys.executable, "-c", script, env=env).returncode == code
    said = logs[0].read_text()
    assert (
        said.startswith("distboot: error[unknown-framework]: ")
        == ("torhc-***" in said)
        == bool(code)
    )
    assert "s3cr" not in said


@needs_namespace
@pytest.mark.parametrize(
    ("later", "said"),
    [
        ("raise ValueError('no data')", "distboot: uncaught exception: ValueError: no data"),
        ("raise ValueError('no data') from failed", "distboot: error[unknown-framework]: "),
        ("raise failed", "distboot: error[unknown-framework]: "),
    ],
    ids=["another", "led to", "the same"],
)
def test_what_ends_the_script_is_there(run: Run, logs: list[Path], later: str, said: str) -> None:
    script = f"""
import distboot
try:
    distboot.init("torhc")
except distboot.DistbootError as error:
    failed = error
{later}
"""
    env = {"RANK": "0", "WORLD_SIZE": "1"}
    assert run(*_CONTAINER, sys.executable, "-c", script, env=env).returncode != 0
    assert logs[0].read_text().startswith(said)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(platform_log, "_KUBERNETES", str(path))
    return path


def test_missing_termination_log_is_not_created(log: Path) -> None:
    platform_log.write("rank 1 failed first")
    assert not log.exists()
    os.mkfifo(log)
    pipe = os.open(log, os.O_RDWR | os.O_NONBLOCK)
    os.write(pipe, b"distboot: ")
    platform_log.write("rank 1 failed first", replaces=True)
    assert os.read(pipe, 100) == b"distboot: "  # what is no file is left alone
    os.close(pipe)


def test_root_cause_replaces_what_is_less_certain(log: Path) -> None:
    log.touch()
    platform_log.write("rank 2 failed first, and this was a longer text")
    platform_log.write("rank 3 failed first")
    platform_log.write("rank 1 failed first", replaces=True)
    assert log.read_text() == "distboot: rank 1 failed first"
    log.write_text("of the script")
    platform_log.write("rank 1 failed first", replaces=True)
    assert log.read_text() == "of the script"


@pytest.mark.parametrize("headline", ["short", "\N{GRINNING FACE}" * 5000])
def test_long_termination_log_keeps_headline_and_end(log: Path, headline: str) -> None:
    log.touch()
    platform_log.write(
        "\n".join([headline, *(f"line {number}: \udcff" for number in range(1000)), "the end"])
    )
    first, mark, *_, last = log.read_text().split("\n")
    assert (first, mark, last) == (f"distboot: {headline[:900]}", "…", "the end")
    assert 4000 < log.stat().st_size <= 4096


@pytest.mark.usefixtures("log")
def test_agent_waits_once_for_a_stalled_log(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(platform_log, "_LIMIT", 0.05)
    monkeypatch.setattr(platform_log, "_has_stalled", threading.Event())
    monkeypatch.setattr(platform_log, "_write_file", lambda *_, **__: answers.wait(20))
    begin = time.monotonic()
    platform_log.write_in_time("rank 1 failed first")
    monkeypatch.setattr(platform_log, "_LIMIT", 20)
    platform_log.write_in_time("rank 1 failed first", replaces=True)
    assert time.monotonic() - begin < 10
    answers.set()


def test_termination_log_on_a_full_disk_is_partial(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.touch()
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:14], at))
    platform_log.write("rank 1 failed first")
    assert log.read_bytes() == b"distboot: rank"
