"""The wrapper with a terminal, in a container (`docker run -it`) and without: its keys, and a shell's job control."""

import json
import os
import sys

import pytest
from process1 import BARE, EXEC_PROCESS_1, SUPERVISED, Mode, in_modes, python, wrapped

# Prints the name of the signals of the keys, and every line that is typed; "end" ends it.
_CHILD = """
import os, signal, sys, threading
keys = {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH}
signal.pthread_sigmask(signal.SIG_BLOCK, keys)
def take():
    while True:
        os.write(1, signal.Signals(signal.sigwait(keys)).name[3:].encode() + b"\\n")
threading.Thread(target=take, daemon=True).start()
os.write(1, b"ready\\n")
for line in sys.stdin:
    os.write(1, b"line " + line.encode())
    if line == "end\\n":
        os._exit(5)
"""


@in_modes(*SUPERVISED, EXEC_PROCESS_1, BARE)
def test_keys_and_runtime_signals_reach_child_once(clean_env: dict[str, str], mode: Mode) -> None:
    with wrapped(mode, clean_env, *python(_CHILD), terminal=True) as wrapper:
        wrapper.read_until("ready")
        # In a terminal the child is in the wrapper's group, and gets what these inits send to all of that, too.
        if mode.name not in {"tini -g", "dumb-init"}:
            # docker stop with STOPSIGNAL SIGINT, and what tells of a new size of the window: not the keys. These first,
            # as two of one number that are pending at once are one.
            wrapper.send("INT")
            wrapper.read_until("INT")
            wrapper.send("WINCH")
            assert "INT" not in wrapper.read_until("WINCH")
        wrapper.type("\x03")
        assert "WINCH" not in wrapper.read_until("INT")
        wrapper.type("\x1c")
        assert "INT" not in wrapper.read_until("QUIT")
        wrapper.type("end\n")
        assert "QUIT" not in wrapper.read_until("line end")
        assert wrapper.code() == 5


@in_modes(*SUPERVISED, EXEC_PROCESS_1)
def test_ctrl_z_never_stops_the_container_forever(clean_env: dict[str, str], mode: Mode) -> None:
    # There is no shell to continue it. Below an init it is stopped, and CONT for process 1 continues all of it.
    with wrapped(mode, clean_env, *python(_CHILD), terminal=True) as wrapper:
        wrapper.read_until("ready")
        wrapper.type("\x1a")
        wrapper.read_until("^Z")  # which the terminal shows after it has sent the signal
        wrapper.send("CONT")
        wrapper.type("end\n")
        wrapper.read_until("line end")
        assert wrapper.code() == 5


_SHELL = ("bash", "--norc", "-ic", '"$@"; echo stopped $?; fg; exit $?', "bash")


@in_modes(Mode("supervised", _SHELL), Mode("--exec", _SHELL, ("--exec",)))
def test_job_control_of_a_shell_in_the_container(clean_env: dict[str, str], mode: Mode) -> None:
    with wrapped(mode, clean_env, *python(_CHILD), terminal=True) as wrapper:
        wrapper.read_until("ready")
        wrapper.type("\x1a")
        wrapper.read_until("stopped 148")
        wrapper.type("hello\n")
        wrapper.read_until("line hello")
        wrapper.type("\x03")
        wrapper.read_until("INT")
        wrapper.type("end\n")
        assert "INT" not in wrapper.read_until("line end")
        assert wrapper.code() == 5


def _interrupted(clean_env: dict[str, str], mode: Mode, script: str) -> tuple[str, int]:
    """What follows Ctrl-C once two ranks have printed "ready", and the exit code of the wrapper."""
    with wrapped(
        mode,
        clean_env,
        sys.executable,
        "-c",
        script,
        terminal=True,
    ) as wrapper:
        wrapper.read_until("ready")
        wrapper.read_until("ready")
        wrapper.type("\x03")
        rest = wrapper.rest()
        return rest, wrapper.code()


@in_modes(Mode("ranks of a node", options=("--nproc-per-node", "2"), is_contained=False))
def test_ctrl_c_ends_all_ranks_without_tracebacks(clean_env: dict[str, str], mode: Mode) -> None:
    script = """
import time
def train():
    print("ready", flush=True); time.sleep(100)  # one line: the key may come before the other
train()
"""
    rest, code = _interrupted(clean_env, mode, script)
    assert code == 130
    assert "Traceback" not in rest
    for rank in (0, 1):
        assert (
            f"distboot: rank {rank} on {os.uname().nodename}: interrupted in train (<string>:4)"
            in rest
        )


@in_modes(Mode("ranks of a node", options=("--nproc-per-node", "2"), is_contained=False))
def test_each_line_about_ctrl_c_is_json(clean_env: dict[str, str], mode: Mode) -> None:
    script = "import time; print('ready', flush=True); time.sleep(100)"
    rest, code = _interrupted({**clean_env, "DISTBOOT_LOG_FORMAT": "json"}, mode, script)
    assert code == 130
    said = rest.replace("^C", "")  # by the terminal
    lines = [json.loads(line) for line in said.splitlines() if line.strip()]
    told = [
        line["rank"] for line in lines if line["message"] == "interrupted in <module> (<string>:1)"
    ]
    assert sorted(told) == [0, 1]


@in_modes(Mode("ranks of a node", options=("--nproc-per-node", "2"), is_contained=False))
def test_slow_rank_ends_by_the_key_itself(clean_env: dict[str, str], mode: Mode) -> None:
    script = """
import os, signal, time
def train():
    print("ready", flush=True); signal.pause()
if os.environ["RANK"] == "1":  # it takes its signal late, as on a busy host
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("ready", flush=True)
    while signal.SIGINT not in signal.sigpending():
        time.sleep(0.01)
    time.sleep(0.7)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
train()
"""
    rest, code = _interrupted(clean_env, mode, script)
    assert code == 130
    assert "exit codes: 130 (job), 130 (ranks 0-1)" in rest


@pytest.mark.all
@in_modes(Mode("ranks of a node", options=("--nproc-per-node", "2"), is_contained=False))
def test_ctrl_c_shows_one_prefix_with_torchs_hook(clean_env: dict[str, str], mode: Mode) -> None:
    pytest.importorskip("torch")
    script = """
import time, distboot
distboot.init(backend="gloo")
def train():
    print("ready", flush=True); time.sleep(100)
train()
"""
    rest, _ = _interrupted(clean_env, mode, script)
    assert rest.count(f" on {os.uname().nodename}: interrupted in train (<string>:5)") == 2
    assert "[rank" not in rest
