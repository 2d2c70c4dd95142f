"""The lifeline of the wrapper, around scripts that never heard of distboot: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lifelines import DEFAULT, ENDS, FAILING, Start, job, until


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("way", ENDS)
def test_first_failure_is_known_to_all_and_all_stop(start: Start, way: str, culprit: int) -> None:
    statement, code, said = ENDS[way]
    running = start(FAILING % statement, CULPRIT=str(culprit))
    pids = running.all_ready()
    running.touch("fail")
    assert running.codes() == [code if rank == culprit else 143 for rank in range(3)]
    survivors = {running.first(rank) for rank in range(3) if rank != culprit}
    assert len(survivors) == 1
    (line,) = survivors
    assert line.startswith(f"rank {culprit} failed first: {said}")
    assert f"(node 0, local rank {culprit}, process {pids[culprit]})" in line
    report = running.report()
    assert report["outcome"] == "failed"
    assert report["first_failure"]["rank"] == culprit
    assert [rank["exit_code"] for rank in report["ranks"]] == [code if rank == culprit else 143 for rank in range(3)]


def test_traceback_of_an_unmodified_script_reaches_all_and_its_own_output_stays(start: Start) -> None:
    running = start(FAILING % "raise ValueError('the loss is NaN')", CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    running.codes()
    assert running.output(1).startswith("Traceback (most recent call last):\n")
    assert running.output(1).endswith("ValueError: the loss is NaN\n")
    for rank in (0, 2):
        assert "\n  |     raise ValueError('the loss is NaN')\n" in running.output(rank)


def test_stack_of_a_crash_reaches_all(start: Start) -> None:
    running = start(FAILING % "import ctypes; ctypes.string_at(0)", CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    running.codes()
    assert "  | Fatal Python error: Segmentation fault\n" in running.output(2)
    assert 'train.py", line' in running.output(2)


def test_ends_in_good_order_are_no_failures(start: Start) -> None:
    # Rank 0 first: it waits a moment for the others, and then they go on without it.
    running = start("ready()\nuntil(f'end-{rank}')\nsys.exit(0)\n")
    running.all_ready()
    for rank in (0, 1, 2):
        running.touch(f"end-{rank}")
        assert running.processes[rank].wait(20) == 0
    for rank in (1, 2):
        assert running.first(rank) == "rank 0 has ended: from now on no rank is told how another one ends"
    assert "no failure was seen; exit codes: 0 (rank 0), not known (ranks 1-2)" in running.summary()


def test_job_in_which_all_end_well_says_so_in_one_line(start: Start) -> None:
    running = start()
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert running.output(1) == running.output(2) == ""
    assert running.output(0).count("\n") == 1
    assert running.summary().endswith("s: all ended well; exit codes: 0 (ranks 0-2)")
    report = running.report()
    assert (report["outcome"], report["first_failure"], report["later_failures"]) == ("ended", None, 0)
    assert {rank["host"] for rank in report["ranks"]} == {os.uname().nodename}


def test_a_rank_that_was_stopped_for_a_while_is_no_failure(start: Start) -> None:
    running = start(DISTBOOT_LIFELINE_TIMEOUT="3")
    pids = running.all_ready()
    stopped = [pids[1], running.processes[2].pid]  # a script, and a wrapper
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2)  # shorter than the bound: what is tested is that nothing happens
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    time.sleep(2)
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert "all ended well" in running.summary()


@pytest.mark.parametrize("rank", [0, 1])
def test_script_that_is_stopped_for_ever_is_a_failure(start: Start, rank: int) -> None:
    running = start(DISTBOOT_LIFELINE_TIMEOUT="2", DISTBOOT_GRACE="1")
    running.send(rank, signal.SIGSTOP)
    codes = running.codes()
    assert codes[2] == 143
    assert running.first(2).startswith(f"rank {rank} failed first: stopped by a signal (SIGSTOP?) for 2 s")


@pytest.mark.parametrize("rank", [0, 1])
def test_wrapper_that_is_frozen_is_a_lost_rank(start: Start, rank: int) -> None:
    running = start(DISTBOOT_LIFELINE_TIMEOUT="2")
    running.all_ready()
    os.kill(running.processes[rank].pid, signal.SIGSTOP)
    assert running.processes[2].wait(30) == 143
    line = running.first(2)
    assert line.startswith(f"rank {rank} lost first: no answer for 2 s, though the host answers: stopped or frozen")
    os.kill(running.processes[rank].pid, signal.SIGCONT)
    running.codes()


@pytest.mark.parametrize("rank", [0, 1])
def test_wrapper_that_is_killed_is_a_lost_rank(start: Start, rank: int) -> None:
    running = start()
    running.all_ready()
    running.processes[rank].kill()
    assert running.processes[2].wait(30) == 143
    assert running.first(2).startswith(f"rank {rank} lost first: the connection ended without a word, on ")


def test_two_failures_at_once_have_one_first(start: Start) -> None:
    running = start(ranks=4)
    pids = running.all_ready()
    for rank in (1, 2):
        os.kill(pids[rank], signal.SIGKILL)
    assert running.codes() == [143, 137, 137, 143]
    assert running.first(0) == running.first(3)
    assert "; 1 failed after that; " in running.summary()
    assert running.report()["later_failures"] == 1


def test_what_speaks_of_a_peer_is_not_the_first_failure(start: Start) -> None:
    # As Gloo says it, on a rank that hears of the end before rank 0 does.
    script = """
ready()
until("fail")
if rank == 2:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3456")
if rank == 1:
    until("pid-2.said")
    os._exit(6)
until("end")
"""
    running = start(script)
    running.all_ready()
    running.touch("fail")
    until(lambda: "Connection closed" in running.output(2))
    running.touch("pid-2.said")
    running.codes()
    assert running.first(0).startswith("rank 1 failed first: exit code 6")


def test_failure_of_another_process_than_the_rank_is_none(start: Start) -> None:
    script = """
import subprocess
if rank == 1:
    subprocess.run([sys.executable, "-c", "raise ValueError('not mine')"])
    if os.fork() == 0:
        raise ValueError("not mine, either")
    os.wait()
"""
    running = start(script + DEFAULT)
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0, 0]


def test_lifeline_can_be_off(start: Start) -> None:
    running = start(DISTBOOT_LIFELINE="0")
    running.send(1, signal.SIGKILL)
    assert running.processes[1].wait(20) == 137
    running.touch("end")
    assert running.codes() == [0, 137, 0]
    assert [running.output(rank) for rank in range(3)] == ["", "", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_lifeline_that_is_off_on_one_rank_is_no_failure(
    clean_env: dict[str, str], port: int, tmp_path: Path, rank: int
) -> None:
    (tmp_path / "off").mkdir()
    begin = f"import os\nif os.environ['RANK'] == '{rank}': os.environ['DISTBOOT_LIFELINE'] = '0'\n"
    (tmp_path / "off" / "sitecustomize.py").write_text(begin)
    env = {**clean_env, "PYTHONPATH": f"{tmp_path / 'off'}{os.pathsep}{Path(__file__).parents[1]}"}
    with job(env, port, tmp_path) as running:
        running.all_ready()
        running.touch("end")
        assert running.codes() == [0, 0, 0]


def test_command_that_is_missing_on_one_rank_is_named_on_all(clean_env: dict[str, str], port: int) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "distboot", "run", "--", "true" if rank else "no-such-command"],
            env={
                **clean_env, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [127, 127]
    assert all("error[command-not-found]" in output and "'no-such-command'" in output for output in outputs)


def test_secret_is_not_in_what_the_others_are_told(start: Start) -> None:
    running = start(FAILING % "raise ValueError('s3cret-word')", CULPRIT="1", DISTBOOT_SECRET="s3cret-word")
    running.all_ready()
    running.touch("fail")
    assert running.codes() == [143, 1, 143]
    assert "ValueError: ***" in running.first(0)
    assert "s3cret-word" not in running.output(0) + running.output(2) + str(running.report())


def test_script_finds_its_python_as_it_was(start: Start, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.own_ran = True\n")
    script = """
import sitecustomize
print(own_ran, os.environ["PYTHONPATH"], "DISTBOOT_LAST_WORDS" in os.environ, any("injected" in p for p in sys.path))
ready()
"""
    path = f"{own}{os.pathsep}{Path(__file__).parents[1]}"
    running = start(script, PYTHONPATH=path)
    assert running.codes() == [0, 0, 0]
    assert running.output(1) == f"True {path} False False\n"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DISTBOOT_LIFELINE", "yes"), ("DISTBOOT_LIFELINE_TIMEOUT", "-1"), ("DISTBOOT_GRACE", "soon")],
)
def test_setting_that_is_none_is_refused(start: Start, variable: str, value: str) -> None:
    env = {variable: value}
    running = start(DEFAULT, 3, None, (), **env)
    assert running.codes() == [78, 78, 78]
    assert f"{variable}='{value}'" in running.output(1)


def test_script_that_closes_all_files_gets_nothing_written_into_its_own(start: Start) -> None:
    script = """
os.closerange(3, 65536)
files = [open(f"data-{rank}-{n}", "w") for n in range(8)]
"""
    running = start(script + DEFAULT, ranks=2)
    running.all_ready()
    running.touch("end")
    running.codes()
    assert [path.read_text() for path in running.folder.glob("data-*")] == [""] * 16
