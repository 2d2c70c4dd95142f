"""The wrapper as a black box, without a container: what its child gets from it, and what it leaves alone."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run
from process1 import BARE, python, wrapped
from supervised import until
from wrappers import alive

# Prints its group, then the name of every signal that it gets.
_CHILD = """
import os, signal
numbers = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print(os.getpid(), os.getpgrp(), flush=True)
while True:
    print(signal.Signals(signal.sigwait(numbers)).name, flush=True)
"""


def test_child_in_its_own_group_gets_signals_once(
    clean_env: dict[str, str],
) -> None:
    with wrapped(BARE, clean_env, *python(_CHILD)) as wrapper:
        child, group = wrapper.line().split()
        assert group == child != str(wrapper.pid)
        os.killpg(wrapper.pid, signal.SIGTERM)  # as mpirun does
        assert wrapper.line() == "SIGTERM"
        os.kill(wrapper.pid, signal.SIGUSR1)
        assert wrapper.line() == "SIGUSR1"


def test_child_keeps_its_group_with_foreign_terminal(
    clean_env: dict[str, str],
) -> None:
    # torchrun starts its workers in new sessions with its own stdin, and ends them by their groups.
    master, slave = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "distboot",
        "run",
        "--",
        *python("import os; print(os.getpgrp())"),
    ]
    wrapper = subprocess.Popen(
        command, env=clean_env, stdin=slave, stdout=subprocess.PIPE, start_new_session=True
    )
    output, _ = wrapper.communicate(timeout=20)
    os.close(master)
    os.close(slave)
    assert int(output) != wrapper.pid


def test_child_does_not_outlive_a_killed_wrapper(clean_env: dict[str, str]) -> None:
    with wrapped(BARE, clean_env, *python(_CHILD)) as wrapper:
        child = int(wrapper.line().split()[0])
        assert alive(child)
        wrapper.send("KILL")
        wrapper.code()
        until(lambda: not alive(child))


def test_child_inherits_signal_mask_and_handlers(distboot: Run) -> None:
    show = "grep -E '^Sig(Blk|Ign)' /proc/self/status"
    direct = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True).stdout
    assert distboot("run", "--", "bash", "-c", show).stdout == direct


def test_child_gets_the_variables_arguments_and_streams(distboot: Run) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    script = f"import os, sys; print(sys.argv, *(os.environ[name] for name in {names}))"
    command = ("train.py", "--epochs", "3", "--launcher", "mine", "--", "-m")
    result = distboot(*command, train=script, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert (
        result.stdout
        == "['train.py', '--epochs', '3', '--launcher', 'mine', '--', '-m'] 0 1 0 127.0.0.1\n"
    )
    assert (result.stderr, result.returncode) == ("", 0)


@pytest.mark.parametrize("framework", ["jax", "horovod", "tensorflow"])
def test_one_process_keeps_its_frameworks_variables(distboot: Run, framework: str) -> None:
    # What the framework itself detects stays, and nothing tells it that it is alone.
    given = {
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_orte_tmpdir_base": "/tmp",
        "JAX_PLATFORMS": "cpu",
    }
    names = ("JAX_", "HOROVOD_", "OMPI_COMM", "OMPI_MCA", "TF_CONFIG", "PADDLE_")
    script = (
        f"import os, json; print(json.dumps({{n: os.environ[n] for n in "
        f"os.environ if n.startswith({names})}}))"
    )
    ended = distboot("run", "--framework", framework, "--", *python(script), env=given)
    assert json.loads(ended.stdout) == given


def test_module_command_and_interpreter_options(run: Run, distboot: Run, tmp_path: Path) -> None:
    assert "usage: python -m this" not in distboot("run", "-m", "this").stderr
    assert "Beautiful is better" in distboot("-m", "this").stdout
    package = tmp_path / "no_init" / "inner"
    package.mkdir(parents=True)
    (package / "module.py").write_text("print('ran')")
    assert distboot("-m", "no_init.inner.module").stdout == "ran\n"
    assert distboot("run", "--", "echo", "--", "a b").stdout == "-- a b\n"
    assert (
        run(sys.executable, "-u", "-X", "utf8=1", "-m", "distboot", "-m", "platform").returncode
        == 0
    )


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        *(("-b -O -m distboot", "1 1"), ("-bOm distboot", "1 1")),
        *(("-Xutf8=1 -Wmodule -O -m distboot", "0 1"), ("-m distboot", "0 0")),
        *(("-OWignore:m -m distboot", "0 1"), ("-bOW ignore -m distboot", "1 1")),
        *(("-O -m host -m distboot", "0 1"), ("-bOm host -m distboot", "1 1")),
    ],
)
def test_options_of_the_interpreter_reach_the_script(
    run: Run, tmp_path: Path, options: str, flags: str
) -> None:
    (tmp_path / "flags.py").write_text(
        "import sys; print(sys.flags.bytes_warning, sys.flags.optimize)"
    )
    # As coverage and debuggers do
    (tmp_path / "host.py").write_text(
        "import runpy, sys\n"
        "sys.argv = [*sys.argv[:1], *sys.argv[3:]]\n"
        "runpy.run_module('distboot', run_name='__main__', alter_sys=True)\n"
    )
    assert run(sys.executable, *options.split(), "flags.py").stdout == f"{flags}\n"


@pytest.mark.parametrize(
    "host",
    [["host.py"], ["-m", "host"], ["host.py", "-m", "distboot"]],
    ids=["script", "module", "script with -m"],
)
def test_program_that_runs_distboot_by_runpy(run: Run, tmp_path: Path, host: list[str]) -> None:
    (tmp_path / "host.py").write_text(
        "import os, runpy, sys\n"
        "assert 'IN_HOST' not in os.environ, 'in a rank, the program starts itself'\n"
        "os.environ['IN_HOST'] = '1'\n"
        "sys.argv = [arg for arg in sys.argv if arg not in ('-m', 'distboot')]\n"
        "runpy.run_module('distboot', run_name='__main__', alter_sys=True)\n"
    )
    ended = run(sys.executable, *host, "train.py", train="print('trained')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "trained\n", "")


def test_error_of_the_child_is_unchanged(distboot: Run) -> None:
    result = distboot("train.py", train="raise ValueError('the loss is NaN')")
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: the loss is NaN\n")
    assert "distboot" not in result.stderr


@pytest.mark.parametrize(
    ("before", "after"), [("trap '' CHLD;", ""), ("", ">&-"), ("", "2>&-"), ("", "<&- >&- 2>&-")]
)
def test_ignored_sigchld_and_closed_streams_keep_exit_codes(
    run: Run, before: str, after: str
) -> None:
    ours = f"{sys.executable} -m distboot"
    assert run("bash", "-c", f"{before} exec {ours} run -- sh -c 'exit 7' {after}").returncode == 7
    assert run("bash", "-c", f"{before} RANK=x exec {ours} show {after}").returncode == 78


def test_console_script_that_runs_a_module_named_distboot(run: Run) -> None:
    console_script = Path(sys.executable).with_name("distboot")
    if not console_script.exists():
        pytest.skip("distboot is not installed in this Python")
    assert run(
        str(console_script), "run", "-m", "distboot", "--version", timeout=20
    ).stdout.startswith("distboot ")


def test_child_that_ends_during_lookup_is_noticed(run: Run) -> None:
    """The thread that looks it up must not take the SIGCHLD that the wrapper waits for."""
    script = """
import os, time
from distboot.agent import child, supervisor
from distboot.host import network
network._ask = lambda host, port: time.sleep(60)
for _ in range(3):
    try: network.look_up("slow", 1, 0.01)
    except TimeoutError: pass
for _ in range(200): assert supervisor.run([child.Command(["/bin/true"], {})], grace=30) == 0
print("all", flush=True)
os._exit(0)
"""
    assert run(sys.executable, "-c", script).stdout == "all\n"


def test_development_mode_finds_nothing_left_open(distboot: Run) -> None:
    result = distboot("--nproc-per-node", "2", "--", "true", env={"PYTHONDEVMODE": "1"})
    assert "Warning" not in result.stderr
    assert result.returncode == 0
