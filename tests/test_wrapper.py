"""The wrapper as a black box: a real child that prints what it gets, real signals, real exit codes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from conftest import Run

FORWARDED = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"]

# Prints "ready", then the name of every signal that it gets; TERM twice ends it with 7.
_CHILD = """
import os, signal, sys
terms = 0
def got(number, frame):
    global terms
    print(signal.Signals(number).name, flush=True)
    terms += number == signal.SIGTERM
    if terms == 2:
        os._exit(7)
for name in sys.argv[1:]:
    signal.signal(getattr(signal, "SIG" + name), got)
print("ready", os.getpid(), flush=True)
while True:
    signal.pause()
"""


def _read_line(stream: IO[str], seconds: float = 20) -> str:
    """The next line of a child, bounded in time."""
    ready, _, _ = select.select([stream], [], [], seconds)
    assert ready, "the child said nothing"
    return stream.readline().strip()


def _until(condition: object, seconds: float = 20) -> None:
    """Wait for a condition, bounded in time."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@contextmanager
def _wrapped(env: dict[str, str], *command: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The wrapper around a command, and what that prints; ended with its child when the block ends, however it ends."""
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "distboot", "run", "--", *command],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True,
    )  # fmt: skip
    assert wrapper.stdout is not None
    try:
        yield wrapper, wrapper.stdout
    finally:
        wrapper.kill()  # its child follows: that is tested below
        wrapper.wait(20)
        wrapper.stdout.close()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 42, 126, 127, 255])
def test_exit_code_of_the_child_is_ours(distboot: Run, code: int) -> None:
    assert distboot("run", "--", "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("name", ["TERM", "KILL", "ABRT", "SEGV", "INT", "HUP", "PIPE", "USR1"])
def test_signal_that_ended_the_child_is_128_more(distboot: Run, name: str) -> None:
    result = distboot("run", "--", "bash", "-c", f"ulimit -c 0; kill -{name} $$; sleep 20")
    assert result.returncode == 128 + getattr(signal, f"SIG{name}")


@pytest.mark.parametrize("name", FORWARDED)
def test_signal_is_forwarded_once(clean_env: dict[str, str], name: str) -> None:
    with _wrapped(clean_env, sys.executable, "-c", _CHILD, name, "TERM") as (wrapper, output):
        assert _read_line(output).startswith("ready")
        os.kill(wrapper.pid, getattr(signal, f"SIG{name}"))
        assert _read_line(output) == f"SIG{name}"
        os.kill(wrapper.pid, signal.SIGTERM)
        assert _read_line(output) == "SIGTERM", "and not the first signal again"
        if name != "TERM":  # else that was the second one
            os.kill(wrapper.pid, signal.SIGTERM)
        assert wrapper.wait(20) == 7


def test_child_is_in_a_group_of_its_own(clean_env: dict[str, str]) -> None:
    # mpirun signals the whole group of the wrapper: the child gets each signal once, from the wrapper.
    script = "import os; print(os.getpgrp(), os.getpid(), flush=True); input()"
    with _wrapped(clean_env, sys.executable, "-c", script) as (wrapper, output):
        group, child = _read_line(output).split()
        assert group == child != str(wrapper.pid)


def test_child_is_in_a_group_of_its_own_also_when_stdin_is_somebody_elses_terminal(clean_env: dict[str, str]) -> None:
    # torchrun starts its workers in new sessions with its own stdin, and ends them by their groups.
    master, slave = os.openpty()
    command = [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", "import os; print(os.getpgrp())"]
    wrapper = subprocess.Popen(command, env=clean_env, stdin=slave, stdout=subprocess.PIPE, start_new_session=True)
    output, _ = wrapper.communicate(timeout=20)
    os.close(master)
    os.close(slave)
    assert int(output) != wrapper.pid


def test_signal_to_the_whole_group_reaches_the_child(clean_env: dict[str, str]) -> None:
    with _wrapped(clean_env, sys.executable, "-c", _CHILD, "TERM", "USR1") as (wrapper, output):
        assert _read_line(output).startswith("ready")
        os.killpg(wrapper.pid, signal.SIGTERM)
        assert _read_line(output) == "SIGTERM"
        os.kill(wrapper.pid, signal.SIGUSR1)
        assert _read_line(output) == "SIGUSR1"


def test_child_does_not_outlive_a_killed_wrapper(clean_env: dict[str, str]) -> None:
    with _wrapped(clean_env, sys.executable, "-c", _CHILD, "TERM") as (wrapper, output):
        child = int(_read_line(output).split()[1])
        assert _alive(child)
        wrapper.kill()
        wrapper.wait(20)
        _until(lambda: not _alive(child))


def test_child_starts_with_the_signal_mask_and_handlers_of_its_parent(distboot: Run) -> None:
    show = "grep -E '^Sig(Blk|Ign)' /proc/self/status"
    direct = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True).stdout
    assert distboot("run", "--", "bash", "-c", show).stdout == direct


def test_child_gets_the_variables_arguments_and_streams(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys; print(sys.argv, *(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))"
    )
    result = distboot(
        "train.py", "--epochs", "3", "--launcher", "mine", "--", "-m", env={"RANK": "0", "WORLD_SIZE": "1"}
    )
    assert result.stdout == "['train.py', '--epochs', '3', '--launcher', 'mine', '--', '-m'] 0 1 0 127.0.0.1\n"
    assert (result.stderr, result.returncode) == ("", 0)


def test_module_command_and_interpreter_options(run: Run, distboot: Run) -> None:
    assert "usage: python -m this" not in distboot("run", "-m", "this").stderr
    assert "Beautiful is better" in distboot("-m", "this").stdout
    assert distboot("run", "--", "echo", "--", "a b").stdout == "-- a b\n"
    options = run(sys.executable, "-u", "-X", "utf8=1", "-m", "distboot", "-m", "platform")
    assert options.returncode == 0


def test_options_of_the_interpreter_reach_the_script(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flags.py").write_text("import sys; print(sys.flags.bytes_warning, sys.flags.optimize)")
    assert run(sys.executable, "-b", "-O", "-m", "distboot", "flags.py").stdout == "1 1\n"
    assert run(sys.executable, "-bOm", "distboot", "flags.py").stdout == "1 1\n"
    assert run(sys.executable, "-Xutf8=1", "-Wmodule", "-O", "-m", "distboot", "flags.py").stdout == "0 1\n"
    assert run(sys.executable, "-m", "distboot", "flags.py").stdout == "0 0\n"


def test_script_that_may_not_be_executed(distboot: Run, tmp_path: Path) -> None:
    script = tmp_path / "data.txt"
    script.write_text("no program")
    assert distboot("run", "--", str(script)).returncode == 126


def test_error_of_the_child_is_shown_as_it_is(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('the loss is NaN')")
    result = distboot("train.py")
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: the loss is NaN\n")
    assert "distboot" not in result.stderr


def test_rest_of_the_group_gets_the_signal_that_ended_the_child(clean_env: dict[str, str]) -> None:
    # A shell that runs the training: TERM ends the shell, and must not leave the training behind.
    script = "sleep 60 & echo $!; wait"
    with _wrapped(clean_env, "sh", "-c", script) as (wrapper, output):
        grandchild = int(_read_line(output))
        os.kill(wrapper.pid, signal.SIGTERM)
        assert wrapper.wait(20) == 128 + signal.SIGTERM
        _until(lambda: not _alive(grandchild))


def test_what_a_child_leaves_running_on_purpose_stays(clean_env: dict[str, str]) -> None:
    with _wrapped(clean_env, "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!") as (wrapper, output):
        left_behind = int(_read_line(output))
        assert wrapper.wait(20) == 0
        assert _alive(left_behind)
        os.kill(left_behind, signal.SIGKILL)


def test_ignored_sigchld_does_not_eat_the_exit_code(clean_env: dict[str, str]) -> None:
    command = f"trap '' CHLD; exec {sys.executable} -m distboot run -- sh -c 'exit 7'"
    assert subprocess.run(["bash", "-c", command], env=clean_env, timeout=20, check=False).returncode == 7


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_change_the_exit_code(clean_env: dict[str, str], closed: str) -> None:
    command = f"{sys.executable} -m distboot run -- sh -c 'exit 7' {closed}"
    assert subprocess.run(["bash", "-c", command], env=clean_env, timeout=20, check=False).returncode == 7
    command = f"RANK=x {sys.executable} -m distboot show {closed}"
    assert subprocess.run(["bash", "-c", command], env=clean_env, timeout=20, check=False).returncode == 78


def test_console_script_that_runs_a_module_named_distboot(run: Run) -> None:
    console_script = Path(sys.executable).with_name("distboot")
    if not console_script.exists():
        pytest.skip("distboot is not installed in this Python")
    assert run(str(console_script), "run", "-m", "distboot", "--version", timeout=20).stdout.startswith("distboot ")


_UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def _no_pid_namespace() -> str | None:
    try:
        tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False, timeout=20)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() or None if tried.returncode else None


def test_child_that_ends_while_a_name_is_still_looked_up_is_not_missed(run: Run) -> None:
    """The thread that looks it up must not take the SIGCHLD that the wrapper waits for."""
    script = (
        "import os, time\n"
        "from distboot.agent import supervisor as supervise\n"
        "from distboot.host import network\n"
        "network._ask = lambda host, port: time.sleep(60)\n"
        "for _ in range(3):\n"
        "    try: network.look_up('slow', 1, 0.01)\n"
        "    except TimeoutError: pass\n"
        "for _ in range(200): assert supervise.run([supervise.Command(['/bin/true'], {})], grace=30) == 0\n"
        "print('all', flush=True); os._exit(0)\n"
    )
    assert run(sys.executable, "-c", script).stdout == "all\n"


@pytest.mark.skipif(_no_pid_namespace() is not None, reason=f"no PID namespace here: {_no_pid_namespace()}")
def test_term_ends_process_1_while_it_waits_for_other_ranks(clean_env: dict[str, str], port: int) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [*_UNSHARE, sys.executable, "-m", "distboot", "run", "--", "true"]
    with subprocess.Popen(command, env={**clean_env, **job}, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "1/2 joined, missing 1" in _read_line(process.stderr)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert process.wait(20) == 143
