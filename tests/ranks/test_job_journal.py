"""The journal that a job writes while it runs, and what `distboot report` makes of it."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run
from supervised import Start, until

FAILS = """
import distboot
ctx = distboot.init("none", join_timeout=60)
if ctx.rank == 1:
    raise ValueError("boom")
ctx.barrier()
"""
WAITS = """
import time
import distboot
distboot.init("none", join_timeout=60)
open("started", "a").write("x")
time.sleep(300)
"""
TWO = ("run", "--nproc-per-node", "2")


def test_journal_and_report_tell_the_same(distboot: Run, tmp_path: Path) -> None:
    done = distboot(*TWO, "--max-restarts", "1", "--report", "job.json", "train.py", train=FAILS)
    assert done.returncode == 1
    reported = json.loads((tmp_path / "job.json").read_text())
    made = json.loads(distboot("report", "--json", "job.jsonl").stdout)
    assert [each["round"] for each in made["failed_rounds"]] == [0, 1]
    assert made == reported
    [summary] = [line for line in done.stderr.splitlines() if ": summary: " in line]
    shown = distboot("report", "job.jsonl").stdout
    assert shown.splitlines()[0].split("; exit codes")[0][:150] in summary
    assert "ValueError: boom" in shown
    assert distboot("report", "--html", "page.html", "job.jsonl").returncode == 0
    assert "ValueError: boom" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("seconds", [-3e9, 5e9])
def test_clock_far_off_damages_no_journal(run: Run, distboot: Run, seconds: float) -> None:
    program = f"""
import sys, time
right = time.time
time.time = lambda: right() + {seconds}
from distboot.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    options = (*TWO, "--report", "job.html", "train.py")
    done = run(sys.executable, "-c", program, *options, train=FAILS)
    assert done.returncode == 1, done.stderr
    shown = distboot("report", "job.jsonl")
    assert shown.returncode == 0, shown.stderr
    assert "ValueError: boom" in shown.stdout


def test_report_in_place_of_its_journal_is_told(distboot: Run) -> None:
    assert distboot(*TWO, "--report", "job.html", "--", "true").returncode == 0
    done = distboot("report", "job.html")
    assert done.returncode == 2
    assert "did you mean 'job.jsonl'?" in done.stderr


def test_report_without_journal_says_what_writes_one(distboot: Run) -> None:
    done = distboot("report", "nope.jsonl")
    hint = "name the journal: job.jsonl, which --report job.jsonl or --report job.html writes"
    assert done.stderr.endswith(f"\ndistboot: hint: {hint}\n")


def test_missing_journal_names_the_newest_there(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for number in range(4):
        journal = tmp_path / f"out/{number}.jsonl"
        journal.write_text('{"time": 1.0, "rank": null, "event": "earlier", "details": {}}\n')
        os.utime(journal, (number, number))
    (tmp_path / "out/data.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "out/empty.jsonl").touch()
    (tmp_path / "other.jsonl").write_text((tmp_path / "out/0.jsonl").read_text())
    for name in ("out/job.jsonl", "out/data.jsonl", "out"):
        hint = "hint: name a journal, the newest there: 'out/3.jsonl', 'out/2.jsonl', 'out/1.jsonl'"
        assert distboot("report", name).stderr.endswith(f"\ndistboot: {hint}\n")


def test_journal_alone_where_the_report_is_one(distboot: Run, tmp_path: Path) -> None:
    distboot(*TWO, "--report", "job.jsonl", "train.py", train=FAILS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.jsonl", "train.py"]
    assert "rank 1 failed first" in distboot("report", "job.jsonl").stdout


def test_job_that_is_killed_outright_has_a_report(
    distboot: Run, clean_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    command = [sys.executable, "-m", "distboot", *TWO, "--report", "job.html", "train.py"]
    job = subprocess.Popen(command, cwd=tmp_path, env=clean_env, start_new_session=True)
    started = tmp_path / "started"
    try:
        until(lambda: started.exists() and started.read_text() == "xx")
        second = distboot(*TWO, "--report", "job.html", "--", "true")
        holders = "another job, or an earlier context of this process,"
        assert f"/job.jsonl': {holders} writes to it" in second.stderr
        (tmp_path / "job.html").unlink()
        assert "2 had not ended" in distboot("report", "job.jsonl").stdout  # while it runs
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(10)
    assert not (tmp_path / "job.html").exists()
    shown = distboot("report", "job.jsonl").stdout
    assert "2 ranks on 1 node: still running, or killed; 2 had not ended" in shown


def test_journal_waits_for_the_job_before(
    distboot: Run, clean_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    journal = tmp_path / "job.jsonl"
    earlier_line = '{"time": 1.0, "rank": null, "event": "earlier", "details": {}}\n'
    journal.write_text(earlier_line)
    started = tmp_path / "started"
    command = [sys.executable, "-m", "distboot", *TWO, "--report", "job.html", "train.py"]
    with journal.open() as earlier:
        fcntl.flock(earlier, fcntl.LOCK_EX)
        job = subprocess.Popen(command, cwd=tmp_path, env=clean_env, start_new_session=True)
        try:
            until(lambda: started.exists() and started.read_text() == "xx")
            assert journal.read_text() == earlier_line
            fcntl.flock(earlier, fcntl.LOCK_UN)
            until(lambda: "started" in journal.read_text())
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)
    assert "2 ranks on 1 node: still running, or killed" in distboot("report", "job.jsonl").stdout
    assert "earlier" not in journal.read_text()


@pytest.mark.parametrize("way", ["wrapper", "init"])
def test_ranks_that_do_not_meet(start: Start, distboot: Run, way: str) -> None:
    more = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0"}
    # Of the wrapper, and of the script's init
    more |= {"DISTBOOT_JOIN_TIMEOUT": "2", "JOIN_TIMEOUT": "2"}
    job = start("ready()\n" if way == "wrapper" else "", init=way == "init", **more)
    job.codes()
    [journal] = job.folder.glob("*.jsonl")
    shown = distboot("report", str(journal)).stdout
    assert "summary: The job did not start: 3 of 4 ranks joined within" in shown
    assert "missing: rank 3" in shown


def test_disk_that_is_full_costs_the_journal_alone(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "job.jsonl").symlink_to("/dev/full")
    done = distboot(*TWO, "--report", "job.json", "train.py", train=FAILS)
    assert done.returncode == 1
    said = r"warning: no more events are written to the journal '.*': No space left on device"
    assert len(re.findall(said, done.stderr)) == 1
    assert json.loads((tmp_path / "job.json").read_text())["outcome"] == "failed"


def test_journal_that_nobody_reads_holds_up_no_rank(distboot: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.jsonl")
    pipe = os.open(tmp_path / "job.jsonl", os.O_RDWR)
    try:
        os.write(pipe, bytes(fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)))  # full
        done = distboot(*TWO, "--report", "job.json", "train.py", train=FAILS, timeout=60)
    finally:
        os.close(pipe)
    assert done.returncode == 1
    assert json.loads((tmp_path / "job.json").read_text())["outcome"] == "failed"


@pytest.mark.parametrize("name", ["nothing.jsonl", "train.py", "."])
def test_file_that_is_no_journal(distboot: Run, name: str) -> None:
    done = distboot("report", name, train=FAILS)
    assert done.returncode == 2
    assert "error[usage]: " in done.stderr
    assert "Traceback" not in done.stderr


_JOURNAL = ROOT / "tests" / "journals" / "exception.jsonl"


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_report_of_damaged_journal_needs_no_stderr(run: Run, tmp_path: Path, stderr: str) -> None:
    (tmp_path / "dam.jsonl").write_text(_JOURNAL.read_text() + "{not JSON\n")
    command = f"{sys.executable} -m distboot report dam.jsonl"
    shown = run("sh", "-c", command)
    warning = "distboot: warning: 1 line of 'dam.jsonl' could not be read\n"
    assert (shown.returncode, shown.stderr) == (0, warning)
    done = run("sh", "-c", f"{command} {stderr}")
    assert (done.returncode, done.stdout) == (0, shown.stdout)


def test_page_may_go_to_an_open_file(run: Run, tmp_path: Path) -> None:
    command = f"{sys.executable} -m distboot report {_JOURNAL} --html /dev/fd/3 3> page.html"
    assert run("sh", "-c", command).returncode == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("path", ["/dev/stdout", "/proc/self/fd/1", "log"])
def test_page_on_standard_output_replaces_no_log(run: Run, tmp_path: Path, path: str) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    command = f"{sys.executable} -m distboot report {_JOURNAL} --html {path}"
    assert run("sh", "-c", f"({command}; echo after) >> log").returncode == 0
    text = log.read_text()
    assert text.startswith("before\n<!doctype html>")
    assert text.endswith("</html>\n\nafter\n")


def test_empty_name_of_page_is_refused(distboot: Run, tmp_path: Path) -> None:
    done = distboot("report", str(_JOURNAL), "--html", "")
    assert (done.returncode, done.stdout) == (74, "")
    assert "error[output-failed]: the page '' cannot be written: No such file" in done.stderr
    assert list(tmp_path.iterdir()) == []
