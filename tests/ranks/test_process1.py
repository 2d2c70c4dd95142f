"""The wrapper in a container, as a black box: signals, exit codes, orphans, in every tree of processes there is."""

import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from conftest import Run
from process1 import (
    BARE,
    IN_CONTAINERS,
    LIMIT,
    NAMESPACE,
    NOT_PROCESS_1,
    PROCESS_1,
    SUPERVISED,
    Mode,
    in_modes,
    needs_namespace,
    python,
    wrapped,
)

FORWARDED = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "XCPU", "WINCH", "CONT"]


@in_modes(*IN_CONTAINERS, BARE)
def test_every_signal_reaches_the_child_once(clean_env: dict[str, str], mode: Mode) -> None:
    # Prints the name of every signal that it gets; the second TERM ends it with 7. By `sigwait`: a handler in Python
    # does not run if the signal comes right before the call that waits for it.
    script = """
import os, signal, sys
numbers = {getattr(signal, "SIG" + name) for name in sys.argv[1:]}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
os.write(1, b"ready\\n")
left = 2
while left:
    number = signal.sigwait(numbers)
    os.write(1, signal.Signals(number).name[3:].encode() + b"\\n")
    left -= number == signal.SIGTERM
os._exit(7)
"""
    with wrapped(mode, clean_env, *python(script, *FORWARDED)) as wrapper:
        assert wrapper.line() == "ready"
        sent = [*(name for name in FORWARDED if name != "TERM"), "TERM", "TERM"]
        for name in sent:
            wrapper.send(name)
            assert wrapper.line() == name
        assert (wrapper.rest(), wrapper.code()) == ("", 7)


def _assert_ends_in_the_rendezvous(mode: Mode, env: dict[str, str], rank: str, name: str) -> None:
    # Rank 0, which says nothing; to rank 0 a port that is taken
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(LIMIT)
        port = str(other.getsockname()[1])
        job = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with wrapped(mode, {**env, **job}, "true") as wrapper, other.accept()[0]:
            if rank == "0":
                wrapper.read_until("1/2 ranks joined; missing: rank 1")
            wrapper.send(name)
            assert "rror" not in wrapper.rest()
            assert wrapper.code() == 128 + getattr(signal, f"SIG{name}")


@in_modes(*IN_CONTAINERS)
def test_term_in_the_rendezvous(clean_env: dict[str, str], mode: Mode) -> None:
    _assert_ends_in_the_rendezvous(mode, clean_env, "1", "TERM")


@pytest.mark.parametrize(
    ("rank", "name"), [("1", "INT"), ("1", "HUP"), ("1", "QUIT"), ("0", "TERM")]
)
@in_modes(PROCESS_1)
def test_other_signals_in_the_rendezvous(
    clean_env: dict[str, str], mode: Mode, rank: str, name: str
) -> None:
    # Ctrl-C in `docker run -it`, say: the kernel drops a signal to process 1 that has no handler.
    _assert_ends_in_the_rendezvous(mode, clean_env, rank, name)


@in_modes(PROCESS_1)
def test_term_while_the_address_is_unresolved(clean_env: dict[str, str], mode: Mode) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "61000"}
    with wrapped(mode, {**clean_env, **job}, "true") as wrapper:
        wrapper.read_until("does not resolve yet")
        wrapper.send("TERM")
        assert wrapper.code() == 128 + signal.SIGTERM


@in_modes(*SUPERVISED, NOT_PROCESS_1)
def test_child_that_ignores_term_is_killed_later(clean_env: dict[str, str], mode: Mode) -> None:
    script = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""
    with wrapped(mode, clean_env, *python(script), options=["--grace", "0.2"]) as wrapper:
        assert wrapper.line() == "ready"
        wrapper.send("TERM")
        assert (wrapper.rest(), wrapper.code()) == ("", 128 + signal.SIGTERM)


# Neither the child nor its own child ends at TERM; the latter prints that it got it.
_FAMILY_THAT_STAYS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if os.fork():
    os.write(1, b"ready\\n")
    signal.pause()
while True:
    signal.sigwait({signal.SIGTERM})
    os.write(1, b"child of the child\\n")
"""


# By the wrapper, or by its agent
@pytest.mark.parametrize("options", [[], ["--nproc-per-node", "2"]], ids=["one", "two"])
@in_modes(PROCESS_1, BARE)
def test_group_of_a_killed_child_is_killed(
    clean_env: dict[str, str], mode: Mode, options: list[str]
) -> None:
    command = python(_FAMILY_THAT_STAYS)
    with wrapped(mode, clean_env, *command, options=["--grace", "0.2", *options]) as wrapper:
        wrapper.read_until("ready\n")
        if options:
            wrapper.read_until("ready\n")
        wrapper.send("TERM")
        assert "child of the child" not in wrapper.rest()
        assert wrapper.code() == 128 + signal.SIGTERM


# The child ends at TERM with 3. Its own child gets it, too: it prints that, and ends or stays.
_FAMILY = """
import os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if os.fork():
    os.write(1, b"ready\\n")
    signal.sigwait({signal.SIGTERM})
    os._exit(3)
while True:
    signal.sigwait({signal.SIGTERM})
    os.write(1, b"child of the child\\n")
    if sys.argv[1] == "ends":
        os._exit(0)
    if sys.argv[1] == "ends later":
        time.sleep(0.5)
        os.write(1, b"later\\n")
        os._exit(0)
"""
# As torchrun is, or whatever else waits for its own children only.
_REAPS_NOT = tuple(
    python("import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)")
)


_BELOW_ONE_THAT_REAPS_NOT = Mode("below a process 1 that does not reap", _REAPS_NOT, below=1)


# What stays is killed after the grace; for what ends, and for zombies, nothing waits.
@pytest.mark.parametrize(("does", "grace"), [("ends", "1000"), ("stays", "0.2")])
@in_modes(*SUPERVISED, NOT_PROCESS_1, _BELOW_ONE_THAT_REAPS_NOT, BARE)
def test_children_of_the_child_get_term_after_it(
    clean_env: dict[str, str], mode: Mode, does: str, grace: str
) -> None:
    with wrapped(mode, clean_env, *python(_FAMILY, does), options=["--grace", grace]) as wrapper:
        assert wrapper.line() == "ready"
        wrapper.send("TERM")
        assert (wrapper.rest(), wrapper.code()) == ("child of the child\n", 3)


@in_modes(*SUPERVISED, NOT_PROCESS_1)
def test_second_term_does_not_wait_for_grandchildren(clean_env: dict[str, str], mode: Mode) -> None:
    with wrapped(
        mode, clean_env, *python(_FAMILY, "stays"), options=["--grace", "1000"]
    ) as wrapper:
        assert wrapper.line() == "ready"
        wrapper.send("TERM")
        assert wrapper.line() == "child of the child"
        wrapper.send("TERM")
        assert (wrapper.rest(), wrapper.code()) == ("", 3)


_IGNORES_INT = Mode("INT ignored", ("sh", "-c", 'trap "" INT; exec "$@"', "sh"))


@in_modes(_IGNORES_INT)
def test_ignored_signal_cuts_no_grace_short(clean_env: dict[str, str], mode: Mode) -> None:
    with wrapped(
        mode, clean_env, *python(_FAMILY, "ends later"), options=["--grace", "1000"]
    ) as wrapper:
        assert wrapper.line() == "ready"
        wrapper.send("TERM")
        assert wrapper.line() == "child of the child"
        wrapper.send("INT")
        assert (wrapper.rest(), wrapper.code()) == ("later\n", 3)


@in_modes(PROCESS_1, NOT_PROCESS_1)
@pytest.mark.parametrize("when", ["before the child", "with the child"])
def test_thousand_orphans(clean_env: dict[str, str], mode: Mode, when: str) -> None:
    # 1,000 processes whose parent has ended; they end all at once when the pipe closes, or when the child ends.
    script = """
import os, signal, sys, time
wait, end_all = os.pipe()
middle = os.fork()
if not middle:
    for _ in range(1000):
        if not os.fork():
            os.close(end_all)
            os.read(wait, 1)
            os._exit(0)
    os._exit(0)
os.waitpid(middle, 0)
if sys.argv[1] == "with the child":
    os._exit(43)
os.close(end_all)
ours, end = {os.getpid(), os.getppid(), 1}, time.monotonic() + 60
while {int(pid) for pid in os.listdir("/proc") if pid.isdigit()} - ours:
    assert time.monotonic() < end
    time.sleep(0.01)
os._exit(43)
"""
    with wrapped(mode, clean_env, *python(script, when)) as wrapper:
        assert (wrapper.rest(), wrapper.code()) == ("", 43)


@in_modes(*IN_CONTAINERS)
def test_closed_stdin_and_stdout(clean_env: dict[str, str], mode: Mode) -> None:
    shows = (
        "import os; os.write(2, ' "
        "'.join(sorted(os.listdir('/proc/self/fd'))).encode()); os._exit(7)"
    )
    closed = ("sh", "-c", 'exec "$@" <&- >&-', "sh")
    mode = replace(mode, above=(*mode.above, *closed))  # tini itself does not start without them
    with wrapped(mode, clean_env, *python(shows)) as wrapper:
        assert (wrapper.rest(), wrapper.code()) == ("0 2", 7)  # 0 is that of the folder


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="bare", marks=pytest.mark.all),
        pytest.param(NAMESPACE, id="process 1", marks=needs_namespace),
    ],
)
def test_every_exit_code_and_signal_of_the_child(run: Run, before: Sequence[str]) -> None:
    script = """
import signal, sys
from distboot.cli.main import main
def code(script):
    return main(["run", "--", "sh", "-c", "ulimit -c 0; " + script])
stop = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
ignored = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
deadly = sorted(signal.valid_signals() - stop - ignored)
assert [code(f"exit {n}") for n in range(256)] == [*range(256)]
assert [code(f"kill -{int(n)} $$") for n in deadly] == [128 + n for n in deadly]
assert {signal.SIGKILL, signal.SIGALRM, signal.SIGRTMIN, signal.SIGRTMAX} <= {*deadly}
print("all")
"""
    # One process for all: it would be slow to start one for each.
    done = run(*before, sys.executable, "-c", script)
    assert (done.stdout, done.stderr) == ("all\n", "")
