"""Restarts without the launcher: real wrappers, whose ranks fail, are lost, and come again."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Run, StartRank0
from inside import MPI_LIBRARY, Refused, end_orphans
from launched import MPI_ENV, TWO_OF_MPIRUN, needs, needs_mpirun
from rendezvous_peers import HELLO, OPEN, Rank, answers, peer, record
from supervised import ENDS, Job, Start, until

_ROUND = """
round_ = int(os.environ["DISTBOOT_RESTART_COUNT"])
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(round_)
"""
# In the first round one rank does what a test says, once all are there. Later ones end well at once.
_SCRIPT = (
    _ROUND
    + """
print("round", round_, "rank", rank, "port", os.environ["MASTER_PORT"], flush=True)
Path(f"pid-{rank}").unlink(missing_ok=True)
ready()
if round_ == 0:
    if rank == int(os.environ["CULPRIT"]):
        until("fail")
        %s
    until("end")
"""
)
_ENV = {"DISTBOOT_MAX_RESTARTS": "2", "CULPRIT": "1"}


def rounds(job: Job, rank: int) -> list[tuple[int, int]]:
    """The rounds that a rank has seen, and the port of each."""
    found = re.findall(rf"^round (\d+) rank {rank} port (\d+)$", job.output(rank), re.MULTILINE)
    return [(int(number), int(port)) for number, port in found]


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
HOW = {name: ENDS[name][0] for name in ("exception", "sys.exit", "SIGKILL", "SIGSEGV")}
HOW["a child that holds the output"] = (
    "import subprocess; subprocess.Popen(['sleep', '99']); os._exit(3)"
)


@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        pytest.param(how, str(rank), marks=() if rank == number % 2 else pytest.mark.all)
        for number, how in enumerate(HOW)
        for rank in (0, 1)
    ],
)
def test_job_goes_on_in_another_round(start: Start, how: str, culprit: str) -> None:
    job = start(_SCRIPT % HOW[how], **{**_ENV, "CULPRIT": culprit})
    assert job.fail() == [0, 0, 0]
    seen = [rounds(job, rank) for rank in range(3)]
    assert [[number for number, _ in each] for each in seen] == [[0, 1]] * 3
    first, second = ({each[number][1] for each in seen} for number in (0, 1))
    assert len(first) == len(second) == 1
    assert first != second  # no rank of an earlier round can come to the store of this one
    for rank in range(3):
        assert f"rank {culprit} failed first: " in job.output(rank) or str(rank) == culprit
    for rank in {0, 1, 2} - {int(culprit)} | {0}:
        restart = rf"rank {rank} on \S+: restart 1 of 2: round 0 .*, as rank {culprit} failed\n"
        assert re.search(restart, job.output(rank))
    assert "all ended well" in job.summary()
    report = job.report()
    assert report["outcome"] == "ended"
    assert report["headline"].endswith("all ended well, after 1 restart")
    assert [(one["round"], one["ranks"]) for one in report["failed_rounds"]] == [
        (0, [int(culprit)])
    ]
    assert report["failed_rounds"][0]["text"].startswith(f"rank {culprit} failed first: ")


_TWICE = _ROUND + "%s"
REFUSED = {
    "usage error": ("sys.exit(2)", 2, r"exit code 2 \(a usage error\) would happen again"),
    "broken environment": (
        "sys.exit(78)",
        78,
        (
            r"exit code 78 \(a broken environment\) "
            r"would happen again"
        ),
    ),
    "error of ours": (
        "import distboot; distboot.init('no such')",
        2,
        r"error\[unknown-framework\] \(a usage error\) would happen again",
    ),
    "bug": (
        "raise ValueError(round_)",
        1,
        (
            r"second failure at <module> \(train.py:\d+\) within \d s: "
            r"treated as a bug"
        ),
    ),
    "exit code, again and again": (
        "sys.exit(3)",
        3,
        (
            r"second failure of rank 1 with exit "
            r"code 3 within \d s: treated as a bug"
        ),
    ),
    "fault, again and again": (
        KILL,
        137,
        r"the limit of 2 restarts \(--max-restarts or DISTBOOT_MAX_RESTARTS\) is reached",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_permanent_failure_is_not_followed_by_restart(start: Start, why: str) -> None:
    how, code, said = REFUSED[why]
    job = start(_TWICE % f"if rank == 1: {how}\nelse: until('end')", 2, **_ENV)
    assert job.codes() == [code, code]
    assert re.search(f"no restart: {said}", job.output(0)), job.output(0)


def test_different_or_much_later_failure_is_restarted(start: Start) -> None:
    script = _TWICE % "if rank == 1 and round_ < 2:\n    sys.exit(3)\nelif round_ < 2: until('end')"
    job = start(script, 2, **_ENV, DISTBOOT_RESTART_WINDOW="0", DISTBOOT_RESTART_DELAY="0.2")
    assert job.codes() == [0, 0]
    assert "restart 2 of 2: round 1 ended" in job.output(0)


def test_signal_between_rounds_leaves_the_wrapper_running(start: Start) -> None:
    job = start(_SCRIPT % "sys.exit(3)", **_ENV, DISTBOOT_RESTART_DELAY="2")
    job.all_ready()
    job.touch("fail")
    until(lambda: "restart 1 of 2: " in job.output(0))
    os.kill(job.processes[0].pid, signal.SIGUSR1)  # as Slurm does with --signal=B:USR1
    assert job.codes() == [0, 0, 0]
    said = "warning: SIGUSR1 arrived while no rank was running, and had no effect"
    assert f"rank 0 on {os.uname().nodename}: {said}" in job.output(0)


_READS = (
    _ROUND
    + """
import atexit, distboot
atexit.register(lambda: %s)
ctx = distboot.init("none")
print("round", round_, "rank", rank, "port", os.environ["MASTER_PORT"], flush=True)
ready()
while round_ == 0:
    if ctx.preempted: break  # at the SIGTERM for the failure of the other rank
    if rank == 1 and os.access("fail", os.F_OK): raise ValueError("boom")
    time.sleep(0.02)
"""
)


@pytest.mark.parametrize("at_exit", ["None", "time.sleep(1)"])
def test_scripts_that_stop_for_a_failure_restart(start: Start, at_exit: str) -> None:
    job = start(_READS % at_exit, 2, **_ENV)
    assert job.fail() == [0, 0], job.output(0)
    assert [number for number, _ in rounds(job, 0)] == [0, 1]
    assert "no restart" not in job.output(0)


_STOPPED = (
    f"rank 0 on {os.uname().nodename}: stopped by an external SIGTERM before all ranks had joined"
)

_SUMMARY = ": exit code 3; exit codes: 143 (rank 0), 3 (rank 1)\n"  # of round 0


def between_rounds(start: Start, **env: str) -> Job:
    """A job of two ranks that waits for its second round."""
    job = start(_SCRIPT % "sys.exit(3)", 2, **_ENV, **env, DISTBOOT_RESTART_DELAY="600")
    job.all_ready()
    job.touch("fail")
    until(lambda: "restart 1 of 2: " in job.output(0))
    return job


def test_job_is_stopped_between_rounds(start: Start) -> None:
    job = between_rounds(start, DISTBOOT_REPORT="")
    job.processes[0].terminate()
    assert job.processes[0].wait(10) == -signal.SIGTERM
    assert _STOPPED in job.output(0)
    assert _SUMMARY in job.output(0)


def test_report_knows_stop_between_rounds(start: Start, distboot: Run) -> None:
    job = between_rounds(start)
    journal = job.folder / "report.jsonl"
    until(lambda: journal.read_text().count('"rendezvous_started"') == 2)
    job.processes[0].terminate()
    assert job.processes[0].wait(10) == -signal.SIGTERM
    assert _STOPPED in job.output(0)
    report = job.report()
    assert report["outcome"] == "stopped"
    (failed,) = report["failed_rounds"]
    assert failed["ranks"] == [1]
    headline = f"R{failed['text'][1:]}; the job was stopped before restart 1"
    assert report["headline"] == headline
    assert json.loads(distboot("report", "--json", str(journal)).stdout) == report
    recorded = distboot("report", str(journal)).stdout
    assert recorded == f"summary: {headline}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_between_rounds_stops_all(start: Start, rank: int) -> None:
    job = between_rounds(start, DISTBOOT_STOP_SIGNALS="USR1")
    journal = job.folder / "report.jsonl"
    until(lambda: journal.read_text().count('"joined"') == 4)
    number = (signal.SIGTERM, signal.SIGUSR1)[rank]
    os.kill(job.processes[rank].pid, number)
    codes = [143, 143]
    codes[rank] = 128 + number
    assert job.codes(20) == codes
    name = signal.Signals(number).name
    assert f"stopped by an external {name} before all ranks had joined" in job.output(rank)
    assert f"{name} arrived while the ranks met again" in job.output(1 - rank)


def test_stop_signal_before_init_restarts_nothing(start: Start) -> None:
    """The script does not listen to it yet, and so it is the signal that ends it."""
    job = start("ready()\nuntil('end')\n", 2, **_ENV, DISTBOOT_STOP_SIGNALS="USR1")
    job.all_ready()
    os.kill(job.processes[1].pid, signal.SIGUSR1)
    assert 0 not in job.codes(20)
    assert "stopped by an external SIGUSR1" in job.output(0)
    assert "restart 1 of 2" not in job.output(0)


def test_job_asked_to_end_is_not_restarted(start: Start) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n" + _SCRIPT % ""
    job = start(script, **_ENV)
    job.all_ready()
    os.kill(job.processes[1].pid, signal.SIGTERM)
    assert 0 not in job.codes()
    assert all(len(rounds(job, rank)) == 1 for rank in range(3))


def test_waiting_agent_asked_to_end_does_so(
    start: Start,
) -> None:
    job = start(_SCRIPT % KILL, **_ENV)
    own = job.all_ready()[0]
    os.kill(job.processes[2].pid, signal.SIGSTOP)  # its rank has not ended as far as is known
    job.touch("fail")
    until(lambda: not Path(f"/proc/{own}").exists())
    os.kill(job.processes[0].pid, signal.SIGTERM)
    assert job.processes[0].wait(10) not in (0, None)
    assert "restart 1 of 2" not in job.output(0)
    assert [number for number, _ in rounds(job, 0)] == [0]


_CALLED_OFF = "no restart: the job was asked to stop"
_SAVES = """
def save(*_):
    Path("saving").touch()
    until("saved")
    sys.exit(0)
if rank == 0: signal.signal(signal.SIGTERM, save)
"""


def test_stop_while_round_ends_calls_off_next(start: Start) -> None:
    job = start(_SAVES + _SCRIPT % KILL, 2, **_ENV)
    job.all_ready()
    job.touch("fail")
    until((job.folder / "saving").exists)
    job.processes[0].terminate()
    until(lambda: _CALLED_OFF in job.output(0))
    job.touch("saved")
    assert job.codes() == [137, 137]
    assert "summary: 2 ranks on 1 node" in job.output(0)
    assert "error[" not in job.output(1)
    assert [number for number, _ in rounds(job, 0)] == [0]


@pytest.mark.parametrize("rank", [0, 1])
def test_stop_of_an_ended_wrapper_reaches_all(start: Start, rank: int) -> None:
    script = _SCRIPT.replace('    until("end")', f'    if rank != {rank}: until("end")')
    job = start(script % KILL, 2, **{**_ENV, "CULPRIT": "9"})
    last = job.pid(rank)
    until(lambda: not Path(f"/proc/{last}").exists())
    job.processes[rank].terminate()
    codes = [143, 143]
    codes[rank] = 0
    assert job.codes() == codes
    said = f"stopped by an external SIGTERM: the wrapper of rank {rank} got it"
    assert said in job.summary()


def test_rank_that_has_ended_well_begins_again(start: Start) -> None:
    job = start(
        _SCRIPT.replace('    until("end")', '    if rank != 2: until("end")') % KILL, **_ENV
    )
    last = job.pid(2)
    until(lambda: not Path(f"/proc/{last}").exists())
    assert job.processes[2].poll() is None  # its agent waits for how the others end
    assert job.fail() == [0, 0, 0]
    assert [number for number, _ in rounds(job, 2)] == [0, 1]


def test_leftovers_of_a_rank_are_gone_before_restart(start: Start) -> None:
    stubborn = """
import subprocess
if round_ == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keeps = "import signal, socket, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
        "s = socket.create_server(('127.0.0.1', %d)); open('kept', 'w'); time.sleep(999)"
    if rank == 0:
        port = int(os.environ["MASTER_PORT"])
        child = subprocess.Popen([sys.executable, "-c", keeps % port], start_new_session=True)
        Path("child").write_text(str(child.pid))
        until("kept")
else:
    assert not Path("/proc", Path("child").read_text()).exists()
"""
    script = _ROUND + stubborn + _SCRIPT % KILL
    job = start(script, 2, **{**_ENV, "DISTBOOT_GRACE": "1"})
    assert job.fail() == [0, 0]
    assert "has not ended within the grace (DISTBOOT_GRACE): killed" in job.output(0)


def test_what_was_there_before_the_ranks_stays(run: Run, tmp_path: Path) -> None:
    """As in a script that starts something in the background, and then becomes the wrapper."""
    script = f"import os, signal\nif os.environ['DISTBOOT_RESTART_COUNT'] == '0': {KILL}\n"
    wrapper = f"{sys.executable} -m distboot --max-restarts 1 train.py"
    # Not with the output of the wrapper, for whose end the test waits
    command = f"sleep 99 >/dev/null 2>&1 & echo $! > before; exec {wrapper}"
    done = run("bash", "-c", command, train=script)
    before = int((tmp_path / "before").read_text())
    os.kill(before, signal.SIGKILL)  # it is there
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_ended_is_only_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    with subprocess.Popen(["sleep", "99"]) as child:
        monkeypatch.setattr("distboot.agent.orphans._KILLED", 0.1)
        monkeypatch.setattr("distboot.agent.orphans.children", lambda: {child.pid, 1})
        monkeypatch.setattr("os.kill", kill)
        end_orphans(0.1, {1})
        monkeypatch.undo()
        child.kill()
    assert (
        f"cannot end processes that a rank has left behind: {child.pid} (sleep)"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("jump", [-86400, 86400, 10**10])
def test_clock_that_jumps_changes_nothing(start: Start, tmp_path: Path, jump: int) -> None:
    script = """
import os, time
_right = time.time
time.time = lambda: _right() + (%d if os.access("fail", os.F_OK) else 0)
"""
    # For every process of the job; that of the machine is not ours to set.
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(script % jump)
    path = os.pathsep.join([str(tmp_path / "clock"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # For exit code 2 there is no restart.
    fails = "sys.exit('jumped' if abs(time.time() - os.stat('fail').st_mtime) > 9999 else 2)"
    job = start(_SCRIPT % fails, **_ENV, PYTHONPATH=path)
    assert job.fail() == [0, 0, 0], job.output(0)
    (failed,) = job.report()["failed_rounds"]
    assert 0 < failed["seconds"] < 60
    (seconds,) = re.findall(r"summary: 3 ranks on 1 node, (\S+) s: ", job.output(0))
    assert failed["seconds"] < float(seconds) < 60


@pytest.mark.parametrize("lost", [0, 1])
def test_agent_that_returns_is_the_same_rank(start: Start, distboot: Run, lost: int) -> None:
    """As a pod that Kubernetes replaces: it knows of no earlier round."""
    job = start(_SCRIPT % "", **_ENV, DISTBOOT_SECRET="of this job")
    job.all_ready()
    job.replace(lost)
    assert job.codes() == [0, 0, 0]
    assert [number for number, _ in rounds(job, 2)] == [0, 1]
    assert [number for number, _ in rounds(job, lost)] == [0, 1]
    assert f"rank {lost} became unreachable first: " in job.output(2)
    assert "restart 1 of 2: " in job.output(0)
    report = job.report()
    (failed,) = report["failed_rounds"]
    assert (failed["round"], failed["ranks"]) == (0, [lost])
    assert (failed["start"] is None) is (lost == 0)  # which only the agent knew that is lost
    journal = str(job.folder / "report.jsonl")
    assert json.loads(distboot("report", "--json", journal).stdout) == report


def test_agent_lost_while_meeting_may_return_once(start: Start) -> None:
    job = start(_SCRIPT % KILL, **_ENV, DISTBOOT_GRACE="1")
    job.all_ready()
    os.kill(job.processes[2].pid, signal.SIGSTOP)  # so that the others wait for it
    job.touch("fail")
    until(lambda: "missing: rank 2" in job.output(0).partition("restart 1 of 2")[2])
    job.replace(1)
    job.replace(2)
    assert job.codes() == [0, 0, 0]
    assert [number for number, _ in rounds(job, 0)] == [0, 1]


def test_rank_that_does_not_come_again_is_named(start: Start) -> None:
    job = start(_SCRIPT % "", **_ENV, DISTBOOT_JOIN_TIMEOUT="2", DISTBOOT_GRACE="0.5")
    job.all_ready()
    os.killpg(job.processes[1].pid, signal.SIGKILL)
    assert job.codes() == [75, 137, 75]
    for rank in (0, 2):
        assert re.search(
            r"2 of 3 ranks joined within 2.5 s; missing: rank 1 \(node 0\); rank 1 on \S+ was lost at \d\d:\d\d:\d\d "
            r"and has not come back\ndistboot: hint: .*: start the wrapper of what is missing again, ",
            job.output(rank),
        ), job.output(rank)
    assert "MASTER_ADDR" not in job.output(0)
    summaries = re.findall(r"summary: 3 ranks .*: rank 1 ", job.output(0))
    assert len(summaries) == 1
    assert "Round 1 did not start" in job.report()["headline"]


def test_rank_0_that_never_returns_is_named(start: Start) -> None:
    job = start(_SCRIPT % "", 2, **_ENV, DISTBOOT_JOIN_TIMEOUT="2", DISTBOOT_GRACE="0.5")
    job.all_ready()
    os.killpg(job.processes[0].pid, signal.SIGKILL)
    assert job.codes() == [137, 75]
    assert re.search(
        r"rank 0 on \S+ was lost at \d\d:\d\d:\d\d and has not come back\n", job.output(1)
    )
    assert "set MASTER_ADDR" not in job.output(1)


def test_second_agent_of_a_present_rank_is_refused(
    rank0: StartRank0,
) -> None:
    first = rank0(3, 20)
    again = Rank(first.port, record(1, 3, round=4))
    until(lambda: 1 in first.server.table.records)
    late = answers(peer(first.port, HELLO + OPEN.sign(record(1, 3, "b"))))[-1]
    assert isinstance(late, Refused)
    assert "joined a second time; rank 1 is already process 1001 on 'a'" in late.why
    last = Rank(first.port, record(2, 3))
    assert {each.met().round for each in (first, again, last)} == {4}  # which only one of them knew


def test_no_file_is_left_open_by_a_round(distboot: Run, tmp_path: Path) -> None:
    script = """
import os, signal
parent = os.getppid()
with open("open", "a") as file:
    file.write(f"{len(os.listdir(f'/proc/{parent}/fd'))}\\n")
if os.environ["DISTBOOT_RESTART_COUNT"] != "12":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    options = "--nproc-per-node 1 --max-restarts 20 --log-dir logs"
    done = distboot(*options.split(), "train.py", train=script)
    assert done.returncode == 0, done.stderr
    counts = (tmp_path / "open").read_text().split()
    assert len(counts) == 13
    assert int(counts[-1]) <= int(counts[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--report files/report.json", "the report could not be written"),
        ("--log-dir files", "the log file 'files/rank-0.log' cannot be written: "),
        (
            "--nproc-per-node 1 --log-dir files",
            "the log file 'files/rank-0.log' cannot be written: ",
        ),
    ],
)
def test_file_that_cannot_be_written_ends_no_job(
    distboot: Run, tmp_path: Path, options: str, said: str
) -> None:
    script = """
import os, shutil, signal
print("round", os.environ["DISTBOOT_RESTART_COUNT"], flush=True)
if os.environ["DISTBOOT_RESTART_COUNT"] == "0":
    shutil.rmtree("files")
    open("files", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "files").mkdir()
    done = distboot(*options.split(), "--max-restarts", "1", "train.py", train=script)
    assert done.returncode == 0, done.stderr
    assert f"warning: {said}" in done.stderr
    assert "round 1" in done.stdout


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        (["--max-restarts", "-1"], {}, "--max-restarts='-1' is not a valid number of restarts"),
        (
            [],
            {"DISTBOOT_MAX_RESTARTS": "many"},
            "DISTBOOT_MAX_RESTARTS='many' is not a valid number of restarts",
        ),
        (
            ["--max-restarts", "1", "--restart-delay", "-1"],
            {},
            "--restart-delay='-1' is not a valid number of seconds",
        ),
        (["--max-restarts", "1", "--restart-delay", "inf"], {}, "hint: use 0 to 86400 seconds"),
        (
            [],
            {"DISTBOOT_RESTART_WINDOW": "x"},
            "DISTBOOT_RESTART_WINDOW='x' is not a valid number of seconds",
        ),
        (["--max-restarts", "1", "--exec"], {}, "cannot be used with --exec"),
        (
            ["--max-restarts", "1"],
            {"DISTBOOT_RENDEZVOUS": "0"},
            "needs failure detection, which DISTBOOT_RENDEZVOUS=0 turns off",
        ),
        (
            ["--max-restarts", "1"],
            {"DISTBOOT_FAILURE_DETECTION": "0"},
            "DISTBOOT_FAILURE_DETECTION=0 turns off",
        ),
        (
            ["--max-restarts", "1", "--framework", "mpi"],
            {},
            "each of its processes call MPI_Init once",
        ),
    ],
)
def test_settings_that_cannot_be(
    distboot: Run, options: list[str], env: Mapping[str, str], said: str
) -> None:
    done = distboot("run", *options, "--", "true", env=env)
    assert done.returncode in (2, 78)
    assert said in done.stderr


def test_init_alone_warns_that_it_cannot_restart(run: Run) -> None:
    done = run(
        sys.executable,
        "-c",
        "import distboot; distboot.init('none')",
        env={"DISTBOOT_MAX_RESTARTS": "3"},
    )
    assert done.returncode == 0
    assert (
        "DISTBOOT_MAX_RESTARTS has no effect: init() cannot start its own process again"
        in done.stderr
    )


def test_wrapper_in_a_wrapper_multiplies_no_restarts(distboot: Run, tmp_path: Path) -> None:
    inner = [sys.executable, "-m", "distboot", "--nproc-per-node", "2", "--"]
    script = '[ "$RANK" = 0 ] || exec sleep 60; echo start >> starts; exit 5'
    variables = {"DISTBOOT_MAX_RESTARTS": "2", "DISTBOOT_RESTART_WINDOW": "0"}
    ended = distboot("--", *inner, "sh", "-c", script, env=variables)
    assert ended.returncode == 5, ended.stderr
    assert (tmp_path / "starts").read_text() == "start\n" * 3


@pytest.mark.all
def test_wrapper_opens_no_more_files_in_later_rounds(distboot: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import distboot, os, sys
ctx = distboot.init("none", join_timeout=60)
ctx.barrier()
if ctx.is_main:
    print(len(os.listdir(f"/proc/{os.getppid()}/fd")), flush=True)
ctx.barrier()
sys.exit(f"round {os.environ['DISTBOOT_RESTART_COUNT']}")
""")
    options = ("--nproc-per-node", "4", "--max-restarts", "5", "--restart-window", "0")
    result = distboot(*options, str(script))
    first, *later = result.stdout.split()
    assert later == [later[0]] * 5
    assert int(later[0]) <= int(first) + 1


def test_library_of_mpi_is_known_by_its_name() -> None:
    def is_known(name: str) -> bool:
        return bool(
            MPI_LIBRARY.search(
                f"7f1c00000000-7f1c00001000 r-xp 00000000 08:01 42  /usr/lib/{name}\n"
            )
        )

    assert all(
        map(
            is_known,
            ("libmpi.so.40.30.4", "libmpich.so.12", "libmpi_gnu_112.so.12", "libmpi_abi.so.0"),
        )
    )
    assert not any(map(is_known, ("libmpiwrapper.so", "libmpir.so")))


@pytest.mark.all
@needs_mpirun
@needs("mpi4py")
@pytest.mark.parametrize(
    "target",
    [["train.py"], ["--", "bash", "-c", f"{sys.executable} train.py; exit $?"]],
    ids=["script", "in a shell"],
)
def test_script_that_uses_mpi_is_not_started_again(run: Run, target: list[str]) -> None:
    mpi = """
import os, signal, time
from mpi4py import MPI
time.sleep(2.5)
os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    command = [sys.executable, "-m", "distboot", "run", "--max-restarts", "2", *target]
    done = run(*TWO_OF_MPIRUN, *command, train=mpi, env=MPI_ENV)
    assert done.returncode != 0
    assert "no restart: the script uses MPI" in done.stderr
