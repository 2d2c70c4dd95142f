"""What distboot says as JSON, for programs: DISTBOOT_LOG_FORMAT=json, or --log-format json."""

import json
import os
import re
import signal
import sys
import time
from typing import Any

import pytest
from conftest import PACKAGE, ROOT, Run
from launched import MPI_ENV, TWO_OF_MPIRUN, needs_mpirun
from supervised import FAILING, Start, until

HOST = os.uname().nodename
_FAILS = """
import os, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK")
if {init}:
    import distboot
    distboot.init("none", join_timeout=60)
if rank == "1":
    raise ValueError("boom " + os.environ["DISTBOOT_SECRET"])
time.sleep(60)
"""


def _said(stderr: str) -> list[dict[str, Any]]:
    """What distboot says, all of it as JSON."""
    assert not re.findall("^distboot: .*", stderr, re.MULTILINE)
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


def _only(said: list[dict[str, Any]], event: str) -> dict[str, Any]:
    (found,) = [line for line in said if line["event"] == event]
    return found


@needs_mpirun
@pytest.mark.parametrize("init", [False, True], ids=["wrapper", "init"])
def test_every_line_of_a_failing_job_is_json(run: Run, port: int, init: bool) -> None:
    secret = "s3cr\"et'\\word"
    env = {
        **MPI_ENV,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DISTBOOT_SECRET": secret,
    }
    command = [
        sys.executable,
        *([] if init else ["-m", "distboot", "--log-format=json"]),
        "train.py",
    ]
    before = time.time()
    env |= {"DISTBOOT_LOG_FORMAT": "json"} if init else {}
    done = run(*TWO_OF_MPIRUN, *command, train=_FAILS.format(init=init), env=env)
    assert done.returncode != 0
    said = _said(done.stderr)
    assert {line["host"] for line in said} == {HOST}
    assert all(before - 1 < line["time"] < time.time() + 1 for line in said)
    cause = _only(said, "root_cause")
    assert (cause["rank"], cause["ranks"], cause["is_failure"]) == (0, [1], True)
    assert cause["message"].startswith(
        f"rank 1 failed first: uncaught exception: ValueError: boom ***, on {HOST}, "
        "in <module> (train.py:8)\n"
    )
    assert cause["message"].endswith("\n  | ValueError: boom ***")
    assert "s3cr" not in json.dumps(said)
    if not init:  # else mpirun has ended before it comes
        assert _only(said, "summary")["message"].startswith("2 ranks on 1 node, ")


def test_node_says_which_it_is(distboot: Run) -> None:
    done = distboot(
        "--log-format=json", "--nproc-per-node=2", "train.py", train="import os\nos.abort()"
    )
    said = _said(done.stderr)
    assert (_only(said, "root_cause")["rank"], _only(said, "root_cause")["node"]) == (None, 0)
    crashes = [line for line in said if line["event"] == "crash"]
    assert crashes
    assert {line["rank"] for line in crashes} <= {0, 1}


def test_ranks_that_are_waited_for(start: Start) -> None:
    more = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "DISTBOOT_LOG_FORMAT": "json"}
    running = start("", 1, init=True, **more)
    until(lambda: "waiting" in running.output(0))
    running.processes[0].send_signal(signal.SIGKILL)
    assert _said(running.output(0))[0]["message"].startswith("1/2 ranks joined; missing: rank 1")


def test_script_that_is_killed_after_the_grace(start: Start) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    running = start(
        deaf + FAILING % "os._exit(5)",
        2,
        CULPRIT="1",
        DISTBOOT_GRACE="0.1",
        DISTBOOT_LOG_FORMAT="json",
    )
    running.fail()
    assert _only(_said(running.output(0)), "killed")["rank"] == 0


def test_error_has_its_code_and_its_hint(distboot: Run) -> None:
    for arguments, code in (
        (("--log-format=json", "train.py"), 127),
        (("--log-format=json", "--grace=soon", "train.py"), 2),
    ):
        done = distboot(*arguments)
        (error,) = _said(done.stderr)
        assert (done.returncode, error["event"], error["rank"]) == (code, "error", None)
        assert error.keys() == {"event", "time", "rank", "host", "message", "code", "hint"}
        assert error["code"] == ("command-not-found" if code == 127 else "usage")
        assert not error["message"].startswith("error[")


def test_hint_after_a_traceback(run: Run) -> None:
    # As DeepSpeed's own check does, by the names of the module and of the function.
    script = "def _do_args_sanity_check(): raise AssertionError\n"
    script += "__name__ = 'deepspeed.runtime.engine'\n_do_args_sanity_check()\n"
    env = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "DISTBOOT_LOG_FORMAT": "json",
        "PYTHONPATH": str(PACKAGE / "script" / "injected"),
    }
    done = run(sys.executable, "train.py", train=script, env=env)
    hint = _only(_said(done.stderr), "hint")
    assert (hint["rank"], hint["host"]) == (1, HOST)
    assert hint["message"].startswith("python -m distboot run --pass-local-rank passes ")


def test_events_on_the_page_match_the_code() -> None:
    page = (
        (ROOT / "docs" / "reference" / "environment.md")
        .read_text()
        .partition("## Lines as JSON")[2]
    )
    shown = re.findall(r"^\| `(\w+)` \|", page.partition("\n## ")[0], re.MULTILINE)
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = re.findall(r'\bevent(?:=|": )"(\w+)"', source)
    begin = re.findall(r'"(\w+)"', source.partition("_EVENT_WORDS = ")[2].partition("\n")[0])
    assert sorted(shown) == sorted({*named, *begin, "note"})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to name a host")
@pytest.mark.parametrize("how", ["wrapper", "init", "show", "doctor"])
def test_name_of_this_host_is_escaped(run: Run, how: str) -> None:
    command = {
        "wrapper": "-m distboot run --nproc-per-node 2 -- false",
        "init": "train.py",
        "show": "-m distboot show",
        "doctor": "-m distboot doctor",
    }[how]
    named = (
        "import os, socket, sys; socket.sethostname(b'n\\x1b[31m\\x07'); "
        "os.execv(sys.executable, sys.argv[1:])"
    )
    done = run(
        *("unshare", "--uts", sys.executable, "-c", named, sys.executable, *command.split()),
        train="import distboot\ndistboot.init('none', join_timeout=0.5)\n",
        env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} if how == "init" else {},
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert "\x07" not in done.stdout + done.stderr
    assert how == "show" or "n\\x1b[31m\\x07" in done.stdout + done.stderr
