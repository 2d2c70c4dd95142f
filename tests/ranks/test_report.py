"""The report of a job from real jobs, JSON and page: how it began, what became of each rank, and its file."""

import errno
import html
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run
from hosts import Hosts
from launched import MPI_ENV, MPIRUN, mpirun_on, needs_hosts, needs_mpirun
from rendezvous_peers import Rank, Rank0, record
from reported import NOON, begun
from supervised import FAILING, Start, until
from wrappers import alive

from distboot.base.errors import DistbootError
from distboot.rendezvous.messages import Ready
from distboot.report.content import startup_report
from distboot.report.files import unwritable, write
from distboot.report.start_failure import StartFailure

BEGIN = ["process_start", "detected", "joined", "all_joined"]
INIT = ["framework_imported", "all_ready", "group_ready"]
FAILS = """
import distboot
ctx = distboot.init("none", join_timeout=60)
ctx.barrier()
if ctx.rank == 1:
    raise ValueError("the loss is <b>NaN</b>")
ctx.barrier()
"""

# A wrapper whose clock is an hour ahead until a rank writes a file; that of its ranks is right
STEPPED = """
import sys, time
from pathlib import Path
right = time.time
time.time = lambda: right() + (0 if Path("stepped").exists() else 3600)
from distboot.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
STEPS = """
from pathlib import Path
import distboot
distboot.init("none", join_timeout=60).barrier()
Path("stepped").touch()
"""


def _in_order(steps: Mapping[str, str], names: list[str]) -> None:
    assert list(steps) == names
    assert sorted(steps.values()) == list(steps.values())


def _read(path: Path) -> dict[str, Any]:
    until(path.exists, 20)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_unmodified_script_is_known_until_its_command_starts(start: Start) -> None:
    running = start(FAILING % "raise ValueError('boom')", CULPRIT="1")
    running.fail()
    report = running.report()
    assert [rank["state"] for rank in report["ranks"]] == ["stopped", "failed first", "stopped"]
    lines = (running.folder / "train.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "boom" in text)
    where = f"on {os.uname().nodename}, in <module> (train.py:{line})"
    assert (
        report["headline"]
        == f"Rank 1 failed first: uncaught exception: ValueError: boom, {where}; 2 other ranks stopped"
    )
    for rank in report["ranks"]:
        _in_order(rank["steps"], [*BEGIN, "command_started"])
        assert rank["clock"] == {"ahead": 0.0, "within": 0.0}  # one host has one clock
    assert [one["step"] for one in report["slowest"]] == [
        "process_start",
        "detected",
        "joined",
        "command_started",
    ]
    assert report["findings"] == []
    assert report["versions"]["Python"].startswith(
        f"{sys.version_info.major}.{sys.version_info.minor}."
    )


def test_script_under_the_wrapper_reports_its_steps(start: Start) -> None:
    running = start(
        'import distboot\ndistboot.init("none", join_timeout=60)\nready()\nuntil("end")'
    )
    assert running.finish() == [0, 0, 0]
    report = running.report()
    assert report["headline"] == "3 ranks on 1 node: all ended well"
    for rank in report["ranks"]:
        _in_order(rank["steps"], [*BEGIN, "command_started", "init_called", "all_called", *INIT])


@needs_mpirun
def test_page_of_a_bare_init_under_mpirun(run: Run, tmp_path: Path) -> None:
    env = {**MPI_ENV, "DISTBOOT_REPORT": "job.html"}
    run(
        str(MPIRUN),
        "--map-by",
        ":OVERSUBSCRIBE",
        "-n",
        "3",
        sys.executable,
        "train.py",
        train=FAILS,
        env=env,
    )
    until((tmp_path / "job.html").exists, 20)
    page = (tmp_path / "job.html").read_text()
    assert (
        "<h1>Rank 1 failed first: uncaught exception: ValueError: the loss is "
        "&lt;b&gt;NaN&lt;/b&gt;"
    ) in page
    report = json.loads(page.partition('id="report">')[2].partition("</script>")[0])
    assert report["ranks"][1]["state"] == "failed first"
    assert all(set(INIT) < set(rank["steps"]) for rank in report["ranks"])
    assert list(tmp_path.glob("*.part")) == []


@needs_hosts
@needs_mpirun
def test_two_hosts_are_on_one_clock(hosts: Hosts) -> None:
    (hosts.shared / "fails.py").write_text(FAILS)
    path = hosts.shared / "job.json"
    variables = {"PYTHONPATH": str(ROOT), "DISTBOOT_REPORT": str(path)}
    mpirun_on(
        hosts,
        "nodea:2,nodeb:1",
        sys.executable,
        "fails.py",
        options=(),
        MASTER_ADDR="nodea",
        **variables,
    )
    report = _read(path)
    places = [(rank["host"], rank["node_rank"], rank["local_rank"]) for rank in report["ranks"]]
    assert places == [("nodea", 0, 0), ("nodea", 0, 1), ("nodeb", 1, 0)]
    for rank in report["ranks"][:2]:
        _in_order(rank["steps"], [*BEGIN, *INIT])
    assert set(report["ranks"][2]["steps"]) == {*BEGIN, *INIT}
    clock = report["ranks"][2]["clock"]
    assert 0 < clock["within"] < 10
    assert abs(clock["ahead"]) <= clock["within"], (
        "it is one machine: the truth is 0, and lies within"
    )


@pytest.mark.parametrize("way", ["wrapper", "init"])
def test_job_that_fails_to_meet_lists_ranks(start: Start, way: str) -> None:
    more = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0"}
    # Of the wrapper, and of the script's init
    more |= {"DISTBOOT_JOIN_TIMEOUT": "2", "JOIN_TIMEOUT": "2"}
    running = start("ready()\n" if way == "wrapper" else "", init=way == "init", **more)
    assert set(running.codes()) <= {75, 1}
    report = running.report()
    assert (report["outcome"], report["first_failure"]["code"]) == ("failed", "missing-rank")
    assert report["first_failure"]["ranks"] == [3]
    assert [rank["state"] for rank in report["ranks"]] == ["joined", "joined", "joined", "missing"]
    assert [rank["node_rank"] for rank in report["ranks"]] == [0, 0, 0, 0]
    assert report["headline"].startswith("The job did not start: 3 of 4 ranks joined within")
    _in_order(report["ranks"][1]["steps"], BEGIN[:3])
    assert report["ranks"][3]["steps"] == {}


def test_ranks_of_a_missing_node_are_missing(distboot: Run, tmp_path: Path, port: int) -> None:
    done = distboot(
        *("run", "--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--report", "job.json", "--", "true"),
        env={
            "MASTER_PORT": str(port),
            "DISTBOOT_JOIN_TIMEOUT": "1",
            "DISTBOOT_METRICS": "job.prom",
        },
    )
    assert done.returncode == 75
    report = json.loads((tmp_path / "job.json").read_text())
    again = distboot("report", "job.jsonl", "--json")
    for found in (report, json.loads(again.stdout)):
        assert (found["world_size"], found["first_failure"]["ranks"]) == (4, [2, 3])
        states = [(rank["rank"], rank["node_rank"], rank["state"]) for rank in found["ranks"]]
        assert states == [(0, 0, "joined"), (1, 0, "joined"), (2, 1, "missing"), (3, 1, "missing")]
    metrics = (tmp_path / "job.prom").read_text()
    counts = re.findall(r'distboot_ranks\{state="(\w+)"\} ([0-9]+)', metrics)
    assert counts[:3] == [("expected", "4"), ("joined", "2"), ("missing", "2")]


def test_rank_that_is_not_ready_is_distinguished() -> None:
    first = Rank0(record(0, 3, local_rank=0, node_rank=0, local_world_size=3), ready=Ready())
    problem = (
        "framework-not-installed",
        "torch is not installed in this Python",
        "pip install torch",
    )
    others = [
        Rank(
            first.port,
            record(1, 3),
            ready=Ready(problem=problem),
            gate=lambda _: until(first.is_ready),
        )
    ]
    others += [Rank(first.port, record(2, 3), gate=lambda _: others[0].join(30))]
    error = first.failed()
    report = startup_report(first.server.log, None, StartFailure.from_error(error), 0.0)
    first.close()
    ranks: Any = report["ranks"]
    assert [rank["state"] for rank in ranks] == ["joined", "not ready", "not ready"]
    assert all("all_joined" in rank["steps"] for rank in ranks)


def test_step_of_the_clock_moves_no_end(run: Run, tmp_path: Path) -> None:
    options = ("run", "--nproc-per-node", "2", "--report", "job.json", "train.py")
    done = run(sys.executable, "-c", STEPPED, *options, train=STEPS)
    assert done.returncode == 0, done.stderr
    report = _read(tmp_path / "job.json")
    for rank in report["ranks"]:
        names = [*BEGIN, "command_started", "init_called", "all_called", *INIT]
        _in_order(rank["steps"], names)
        assert report["start"] <= rank["start"] <= rank["end"] <= report["end"]


@pytest.mark.parametrize("way", ["wrapper", "init"])
def test_job_of_one_process(run: Run, distboot: Run, tmp_path: Path, way: str) -> None:
    if way == "wrapper":
        done = distboot("--report", "job.json", "train.py", train="raise ValueError('boom')")
    else:
        fails = FAILS.replace("== 1", "== 0")
        done = run(sys.executable, "train.py", train=fails, env={"DISTBOOT_REPORT": "job.json"})
    assert done.returncode == 1
    report = _read(tmp_path / "job.json")
    assert [rank["state"] for rank in report["ranks"]] == ["failed first"]
    assert report["first_failure"]["traceback"].startswith("Traceback (most recent call last):")


def test_variable_has_no_effect_on_single_wrapper(distboot: Run, tmp_path: Path) -> None:
    # It may be an ENTRYPOINT around mpirun, whose ranks write a report of their own there.
    done = distboot("train.py", train="", env={"DISTBOOT_REPORT": "job.json"})
    assert (done.returncode, done.stderr, (tmp_path / "job.json").exists()) == (0, "", False)


def test_lost_rank_fails_a_job_that_ended_well(start: Start) -> None:
    job = start(
        "ready()\nif rank == 1:\n    until('never')\n",
        2,
        DISTBOOT_METRICS="metrics",
    )
    pids = job.all_ready()
    until(lambda: not alive(pids[0]))
    job.processes[1].kill()  # the wrapper: nobody reports how its rank ends
    job.codes()
    assert job.report()["outcome"] == "failed"
    assert "exit codes: 143 (job), 0 (rank 0), lost (rank 1)" in job.summary()
    metrics = (job.folder / "metrics").read_text()
    assert 'distboot_phase{phase="failed"} 1' in metrics
    assert 'distboot_phase{phase="ended"} 0' in metrics


def test_job_without_a_supervision_is_reported_as_started(start: Start) -> None:
    running = start(DISTBOOT_FAILURE_DETECTION="0")
    running.all_ready()
    report = running.report()
    assert (report["outcome"], report["first_failure"]) == ("started", None)
    assert {rank["state"] for rank in report["ranks"]} == {"joined"}
    running.touch("end")
    running.codes()


_NO_REPORT = "is not written: a report needs the rendezvous, which DISTBOOT_RENDEZVOUS=0 turns off"


def test_report_that_cannot_be_had_is_said(distboot: Run, tmp_path: Path) -> None:
    done = distboot("--report", "job.json", "train.py", train="", env={"DISTBOOT_RENDEZVOUS": "0"})
    assert (done.returncode, (tmp_path / "job.json").exists()) == (0, False)
    assert _NO_REPORT in done.stderr


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
def test_init_says_so_on_rank_0_alone(run: Run, rank: str, said: int) -> None:
    env = {"DISTBOOT_RENDEZVOUS": "0", "DISTBOOT_REPORT": "job.json"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    numbers = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    done = run(
        sys.executable,
        "-c",
        "import distboot; distboot.init('none')",
        env={**env, **address, **numbers},
    )
    assert (done.returncode, done.stderr.count(_NO_REPORT)) == (0, said), done.stderr


def test_secret_is_passed_on_to_nobody(start: Start) -> None:
    # As repr writes it, and where what is cut off of a long line would begin within it.
    script = FAILING % "raise KeyError('x' * 285 + os.environ['DISTBOOT_SECRET'] + 200 * 'x')"
    running = start(
        script,
        2,
        CULPRIT="1",
        DISTBOOT_SECRET="s3cr\u00e9t'\\word",
        DISTBOOT_REPORT="job.html",
        TORCHELASTIC_ERROR_FILE="error.json",
    )
    running.fail()
    path = running.folder / "job.html"
    until(path.exists, 20)
    error: str = json.loads((running.folder / "error.json").read_text())["message"]["message"]
    for said in (html.unescape(path.read_text()), error):
        assert 'KeyError: "' + 285 * "x" + "***x" in said
        assert "s3cr" not in said


@pytest.mark.parametrize(
    ("way", "number"),
    [("wrapper", signal.SIGTERM), ("wrapper", signal.SIGINT), ("init", signal.SIGTERM)],
)
def test_rank_0_stopped_while_it_waits(start: Start, way: str, number: signal.Signals) -> None:
    running = start("", 1, init=way == "init", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    until(lambda: "1/2 ranks joined" in running.output(0))
    running.processes[0].send_signal(number)
    assert running.processes[0].wait(60) == -number  # as without a report
    report = running.report()
    assert (report["outcome"], report["headline"]) == (
        "stopped",
        "The job was stopped while rank 1 was missing",
    )
    said = f"stopped by an external {number.name}"
    assert report["stopped"]["text"] == said
    assert f"{said} before all ranks had joined" in running.output(0)


def test_mistyped_world_size_makes_a_small_report(tmp_path: Path) -> None:
    log = begun(1 << 24, {0: {}, 2: {}})
    error = DistbootError("missing-rank", "ranks are missing")
    report = startup_report(log, None, StartFailure.from_error(error), NOON + 300)
    assert report["unlisted"] == [[1, 1], [3, (1 << 24) - 1]]
    write(str(tmp_path / "job.json"), report)
    assert (tmp_path / "job.json").stat().st_size < 5_000


PROTECTED = Path("/proc/sys/fs/protected_symlinks")


@pytest.mark.parametrize("path", ["/proc/no/report.json", "/", "/proc/report.json"])
@pytest.mark.parametrize("way", ["wrapper", "init"])
def test_unwritable_report_is_an_error_before_start(start: Start, way: str, path: str) -> None:
    running = start("ready()", ranks=2, init=way == "init", DISTBOOT_REPORT=path)
    assert running.codes() == [74, 74]
    for rank in (0, 1):
        assert f"error[output-failed]: rank {rank} on " in running.output(rank)
        assert f"the report '{path}' cannot be written" in running.output(rank)
        assert "warning" not in running.output(rank)  # of a journal, beside the error
        assert not (running.folder / f"pid-{rank}").exists()


@pytest.mark.parametrize("is_relative", [False, True])
def test_relative_report_has_its_own_hint(
    start: Start, tmp_path: Path, *, is_relative: bool
) -> None:
    path = "no/report.json"
    if not is_relative:
        path = str(tmp_path / path)
    running = start("ready()", ranks=2, init=True, DISTBOOT_REPORT=path)
    assert running.codes() == [74, 74]
    said = "'no/report.json' is relative to the working directory"
    for rank in (0, 1):
        assert (said in running.output(rank)) == is_relative


def test_report_of_option_blames_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTBOOT_REPORT", "job.json")
    error = unwritable("/proc/no/job.json")
    assert error is not None
    assert "relative" not in error.hint


def test_earlier_report_survives_a_failed_write(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="File too large"):
            write(str(path), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


_OUTPUTS = ["/dev/stdout", "//dev/stdout", "/dev/./fd/1", "/proc/self/fd/2", "link"]


@pytest.mark.parametrize("path", _OUTPUTS)
def test_own_output_is_no_file_for_a_report(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "second").symlink_to("/dev/stderr")
    (tmp_path / "link").symlink_to("second")
    assert "a different file for each process" in str(unwritable(path))


_CSP_OF_0_1 = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
    "'unsafe-inline'\">"
)


@pytest.mark.parametrize("name", ["train.py", "page.html", "job.json"])
def test_only_a_report_is_replaced(distboot: Run, tmp_path: Path, name: str) -> None:
    command = ("run", "--nproc-per-node", "2", "--report", name, "--", "true")
    for _ in range(2):
        assert distboot(*command).returncode == 0
    written = tmp_path / name
    # As 0.1 began its page
    written.write_text(f"<!doctype html>\n{_CSP_OF_0_1}\n")
    assert distboot(*command).returncode == 0
    assert "2 ranks" in written.read_text()
    for data in (
        '<!doctype html>\n<title>distboot</title>\n{"outcome": 1}\n',
        '{"outcome": 3.5, "loss": 1}\n',
        '{"outcome": "ended", "loss": 1}\n',
        '{"outcome": "won", "headline": "none"}\n',
    ):
        written.write_text(data)
        refused = distboot(*command)
        assert refused.returncode == 74
        assert f"{name}' cannot be written: it is not a report, and would be overwritten" in (
            refused.stderr
        )
        assert written.read_text() == data


def test_data_beside_the_report_is_not_replaced(distboot: Run, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "one"}\n{"text": "two"}\n')
    command = ("run", "--nproc-per-node", "2", "--report", "train.html", "--", "true")
    refused = distboot(*command)
    assert refused.returncode == 74
    assert "the events of the job would replace what is in 'train.jsonl'" in refused.stderr
    assert "name another file" in refused.stderr
    assert data.read_text() == '{"text": "one"}\n{"text": "two"}\n'
    # The second time over a journal, and then over one that was cut
    for before in ("", None, '{"time": 17', "\0" * 100):
        if before is not None:
            data.write_text(before)
        assert distboot(*command).returncode == 0
        assert '"rendezvous_started"' in data.read_text()


def test_link_stays_and_pipe_needs_no_reader(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("job.json")
    assert unwritable(str(tmp_path / "link.json")) is None
    write(str(tmp_path / "link.json"), {"outcome": "ended"})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "job.json").read_text()) == {"outcome": "ended"}
    os.mkfifo(tmp_path / "pipe")
    assert unwritable(str(tmp_path / "pipe")) is None


def test_reader_of_a_pipe_gets_all(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def is_written() -> bool:
        try:
            write(str(pipe), {"text": "x" * 500_000})
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no reader yet
                return False
            raise
        return True

    with (
        subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader,
        ThreadPoolExecutor() as pool,
    ):
        writing = pool.submit(until, is_written)
        assert reader.stdout is not None
        assert len(json.loads(reader.stdout.read())["text"]) == 500_000
        writing.result()


def test_report_keeps_the_permissions_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    for mode in (0o600, 0o666):
        path.touch()
        path.chmod(mode)
        write(str(path), {})
        assert path.stat().st_mode & 0o777 == mode


def test_link_that_cannot_be_followed_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "job.json").symlink_to("job.json")
    assert "Too many levels of symbolic links" in str(unwritable(str(tmp_path / "job.json")))
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write(str(tmp_path / "job.json"), {})
    assert (tmp_path / "job.json").is_symlink()


@pytest.mark.skipif(
    os.geteuid() != 0 or not PROTECTED.exists() or PROTECTED.read_text().strip() == "0",
    reason="needs root, for another user's link, and fs.protected_symlinks",
)
def test_link_of_another_user_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("earlier")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "job.json").symlink_to(tmp_path / "precious")
    os.chown(shared / "job.json", 65534, 65534, follow_symlinks=False)
    assert "Permission denied" in str(unwritable(str(shared / "job.json")))
    with pytest.raises(PermissionError):
        write(str(shared / "job.json"), {})
    assert (tmp_path / "precious").read_text() == "earlier"
